"""Listings, the text files that they are read from, and the parts that classes are cut into."""

import dataclasses
import hashlib
from pathlib import Path

import pytest

from benchmarks.datasets.listing import DatasetError, DatasetInfo, Listing, load, read_lines
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


def test_load_reads_and_checks(listing, tmp_path):
    info = DatasetInfo(
        "toy", lambda root: dataclasses.replace(listing, root=root), listing.counts()
    )
    assert load(info, tmp_path) == listing
    message = rf"{tmp_path}: lists train 2 / 1, .*, but toy has train 3 / 1, .*; the index files"
    with pytest.raises(DatasetError, match=message):
        load(dataclasses.replace(info, counts={"train": (3, 1), "test": (1, 1)}), tmp_path)


def test_the_fingerprint_is_a_function_of_what_is_listed_and_of_the_sizes(listing):
    text = "toya.jpg\0x\0train\x003\nb.jpg\0x\0train\x005\nc.jpg\0y\0test\x007\n"
    assert listing.fingerprint == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("path", ["../a.jpg", "/etc/a.jpg", "x//a.jpg", "x/../../a.jpg", ""])
def test_no_path_leads_out_of_the_folder(tmp_path, path):
    with pytest.raises(DatasetError, match=f"{tmp_path}: the name {path!r} .*leads out of the f"):
        listing_of(tmp_path, (path, "x", "train"))


def test_a_missing_file_is_named(listing, tmp_path):
    (tmp_path / "b.jpg").unlink()
    message = rf"{tmp_path}: cannot be read \(FileNotFoundError: .*b.jpg'\); restore or replace it"
    with pytest.raises(DatasetError, match=message):
        _ = listing.fingerprint


def test_lines_keep_their_spaces_and_the_letters_of_all_languages(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text(" Dachshund\nTeckel, Größe \n\nлайка\n", encoding="utf-8")
    assert read_lines(path) == [" Dachshund", "Teckel, Größe ", "", "лайка"]


def test_shuffled_is_the_order_of_the_hashes():
    order = shuffled(NAMES)
    assert sorted(order) == sorted(NAMES)
    assert order != NAMES
    hashes = [hashlib.sha256(name.encode()).hexdigest() for name in order]
    assert hashes == sorted(hashes)


@pytest.mark.parametrize(("count", "folds"), [(2, 2), (5, 5), (14, 4), (23, 7)])
def test_folds_cut_the_classes_into_equal_parts(count, folds):
    names = NAMES[:count]
    cuts = [validation_fold(names, fold, folds) for fold in range(folds)]
    assert sorted(name for _, held_out in cuts for name in held_out) == sorted(names)
    for kept, held_out in cuts:
        assert sorted(kept + held_out) == sorted(names)
        assert kept == sorted(kept, key=names.index)
        assert held_out == sorted(held_out, key=names.index)
        assert len(held_out) in (count // folds, -(-count // folds))


@pytest.mark.parametrize("fold", range(4))
def test_folds_depend_on_the_names_and_not_on_their_order(fold):
    _, held_out = validation_fold(NAMES, fold, 4)
    _, reordered = validation_fold(NAMES[::-1], fold, 4)
    assert held_out == reordered[::-1]


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
