"""Listings, the text files that they are read from, and the parts that classes are cut into."""

import dataclasses
import hashlib
from pathlib import Path

import pytest

from benchmarks.datasets.listing import (
    DatasetError,
    DatasetInfo,
    Listing,
    check_counts,
    file_sizes,
    load,
    read_lines,
    read_rows,
)
from benchmarks.datasets.splits import shuffled, validation_fold

NAMES = [f"class {i}" for i in range(23)]


def listing_of(root, *rows):
    """Rows (path, class, part)."""
    paths, classes, parts = zip(*rows, strict=True) if rows else ([], [], [])
    return Listing("toy", root, "flat", list(paths), list(classes), list(parts))


@pytest.fixture
def listing(tmp_path):
    for path, size in (("a.jpg", 3), ("b.jpg", 5), ("c.jpg", 7)):
        (tmp_path / path).write_bytes(bytes(size))
    return listing_of(
        tmp_path, ("a.jpg", "x", "train"), ("b.jpg", "x", "train"), ("c.jpg", "y", "test")
    )


def test_counts_are_images_and_classes_of_each_part(listing):
    assert listing.counts() == {"train": (2, 1), "test": (1, 1)}
    assert listing_of(Path()).counts() == {}


def test_right_counts_pass(listing):
    check_counts(listing, {"test": (1, 1), "train": (2, 1)})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [("a", "x", "train"), ("a", "x", "train"), ("b", "y", "test")],
            "1 images are listed more than once, the first is a; restore",
        ),
        (
            [("a", "x", "train"), ("b", "y", "train"), ("c", "y", "query"), ("d", "y", "gallery")],
            "1 classes are in the training and in the test part, the first is y; restore",
        ),
        (
            [("a", "x", "train"), ("b", "y", "test")],
            "lists train 1 / 1, test 1 / 1, but toy has train 1,234 / 1, "
            r"test 1 / 1 \(images / classes\); the index files are incomplete",
        ),
        ([], "lists no images, but toy has train 1,234 / 1"),
    ],
    ids=["listed twice", "class overlap", "numbers", "empty"],
)
def test_wrong_listings_have_their_own_errors(tmp_path, rows, message):
    with pytest.raises(DatasetError, match=f"{tmp_path}: {message}"):
        check_counts(listing_of(tmp_path, *rows), {"train": (1234, 1), "test": (1, 1)})


def test_load_reads_and_checks(listing, tmp_path):
    info = DatasetInfo(
        name="toy",
        title="Toy",
        read=lambda root: dataclasses.replace(listing, root=root),
        counts=listing.counts(),
        layouts=[],
        licence="",
        citation="",
    )
    assert load(info, tmp_path) == listing
    with pytest.raises(DatasetError, match="but toy has train 3 / 1"):
        load(dataclasses.replace(info, counts={"train": (3, 1), "test": (1, 1)}), tmp_path)


def test_file_sizes_are_none_for_what_is_no_file(listing, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link").symlink_to("b.jpg")
    paths = ["c.jpg", "folder", "dangling", "link", "nowhere", "a.jpg"]
    assert file_sizes(tmp_path, paths) == [7, None, None, 5, None, 3]


def test_the_fingerprint_is_a_function_of_what_is_listed_and_of_the_sizes(listing):
    text = "toya.jpg\0x\0train\x003\nb.jpg\0x\0train\x005\nc.jpg\0y\0test\x007\n"
    assert listing.fingerprint == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"classes": ["x", "z", "y"]},
        {"parts": ["train", "test", "test"]},
        {"paths": ["b.jpg", "a.jpg", "c.jpg"]},
        {"name": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_fingerprint_changes_with_the_listing(listing, change):
    assert dataclasses.replace(listing, **change).fingerprint != listing.fingerprint


def test_the_fingerprint_changes_with_a_size_and_not_with_the_place(listing, tmp_path):
    before = listing.fingerprint
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in listing.paths:
        (tmp_path / path).rename(moved / path)
    assert dataclasses.replace(listing, root=moved).fingerprint == before
    (moved / "b.jpg").write_bytes(bytes(6))
    assert dataclasses.replace(listing, root=moved).fingerprint != before


@pytest.mark.parametrize("path", ["../a.jpg", "/etc/a.jpg", "x//a.jpg", "x/../../a.jpg", ""])
def test_no_path_leads_out_of_the_folder(tmp_path, path):
    with pytest.raises(DatasetError, match=f"{tmp_path}: expected a path below this folder, got"):
        listing_of(tmp_path, (path, "x", "train"))


@pytest.mark.parametrize("row", [("a\0.jpg", "x", "train"), ("a.jpg", "x\x1b[2J", "test")])
def test_every_name_can_be_shown(tmp_path, row):
    with pytest.raises(DatasetError, match=rf"{tmp_path}: the name .* has control characters") as e:
        listing_of(tmp_path, row)
    assert str(e.value).isprintable()


def test_missing_files_are_counted(listing, tmp_path):
    (tmp_path / "b.jpg").unlink()
    (tmp_path / "c.jpg").unlink()
    message = rf"{tmp_path}: 2 of 3 images are missing, the first is b.jpg; unpack"
    with pytest.raises(DatasetError, match=message):
        _ = listing.fingerprint


@pytest.mark.parametrize(
    "content",
    [
        b"a b\nc d\n",
        b"a b\r\nc d\r\n",
        b"\xef\xbb\xbfa b\nc d",
        b"a b\nc d\n\n\n",
        b" a  b\nc\td \n",
        b"a b\rc d",
    ],
    ids=["plain", "Windows", "BOM", "blank lines", "white space", "old Mac"],
)
def test_rows_are_words_whatever_the_ends_of_lines(tmp_path, content):
    path = tmp_path / "list.txt"
    path.write_bytes(content)
    assert read_rows(path, 2) == [["a", "b"], ["c", "d"]]
    assert read_rows(path, 2, skip=1) == [["c", "d"]]


def test_lines_keep_their_spaces_and_the_letters_of_all_languages(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text(" Dachshund\nTeckel, Größe \n\nлайка\n", encoding="utf-8")
    assert read_lines(path) == [" Dachshund", "Teckel, Größe ", "", "лайка"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a b\nc d\ne", "line 3: expected 2 words, got 1"),
        (b"a b\n\nc d\n", "line 2: expected 2 words, got 0"),
        (b"a b\nc d e\n", "line 2: expected 2 words, got 3"),
        (b"a b\nc \xff\n", "cannot be read .'utf-8' codec can't"),
        ("a b\n".encode("utf-16"), "cannot be read .'utf-8' codec can't"),
    ],
    ids=["cut off", "blank", "too long", "Latin-1", "UTF-16"],
)
def test_the_damaged_line_is_named(tmp_path, content, message):
    path = tmp_path / "list.txt"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=f"{path}: {message}"):
        read_rows(path, 2)


def test_skipped_lines_are_counted(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("header\na b\nc\n")
    with pytest.raises(DatasetError, match="line 3: expected 2 words, got 1"):
        read_rows(path, 2, skip=1)


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_file_that_cannot_be_read(tmp_path, kind):
    path = tmp_path / "list.txt"
    if kind == "folder":
        path.mkdir()
    with pytest.raises(DatasetError, match=rf"{path}: cannot be read \(.*(No such|Is a)"):
        read_lines(path)


def test_shuffled_is_the_order_of_the_hashes():
    order = shuffled(NAMES)
    assert sorted(order) == list(range(23))
    assert order != list(range(23))
    hashes = [hashlib.sha256(NAMES[i].encode()).hexdigest() for i in order]
    assert hashes == sorted(hashes)


@pytest.mark.parametrize(
    ("count", "folds"), [(2, 2), (5, 2), (5, 5), (6, 4), (10, 4), (14, 4), (23, 4), (23, 7)]
)
def test_folds_cut_the_classes_into_equal_parts(count, folds):
    names = NAMES[:count]
    cuts = [validation_fold(names, fold, folds) for fold in range(folds)]
    assert sorted(i for _, held_out in cuts for i in held_out) == list(range(count))
    for kept, held_out in cuts:
        assert sorted(kept + held_out) == list(range(count))
        assert kept == sorted(kept)
        assert held_out == sorted(held_out)
        assert len(held_out) in (count // folds, -(-count // folds))


@pytest.mark.parametrize("fold", range(4))
def test_folds_depend_on_the_names_and_not_on_their_order(fold):
    _, held_out = validation_fold(NAMES, fold, 4)
    _, reordered = validation_fold(NAMES[::-1], fold, 4)
    assert {NAMES[i] for i in held_out} == {NAMES[::-1][i] for i in reordered}


@pytest.mark.parametrize(
    ("fold", "folds", "message"),
    [
        (0, 1, "folds: expected 2 to 23, the number of classes, got 1"),
        (0, 24, "folds: expected 2 to 23, the number of classes, got 24"),
        (-1, 4, "fold: expected 0 to 3, got -1"),
        (4, 4, "fold: expected 0 to 3, got 4"),
    ],
)
def test_impossible_folds(fold, folds, message):
    with pytest.raises(ValueError, match=message):
        validation_fold(NAMES, fold, folds)
