"""Listings, the text files that they are read from, and the parts that classes are cut into."""

import dataclasses
import hashlib
import math
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.datasets import contents
from benchmarks.datasets.listing import DatasetError, DatasetInfo, Listing, load
from benchmarks.datasets.splits import shuffled, validation_fold

NAMES = [f"class {i}" for i in range(23)]


def listing_of(root, *rows):
    """Rows (path, class, part)."""
    return Listing("toy", root, "flat", *map(list, zip(*rows, strict=True)))


@pytest.fixture
def listing(tmp_path):
    for path, size in (("a.jpg", 3), ("b.jpg", 5), ("c.jpg", 7)):
        (tmp_path / path).write_bytes(bytes(size))
    return listing_of(
        tmp_path, ("a.jpg", "x", "train"), ("b.jpg", "x", "train"), ("c.jpg", "y", "test")
    )


def test_load_reads_and_checks(listing, tmp_path):
    assert listing.counts() == {"train": (2, 1), "test": (1, 1)}
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


@pytest.fixture
def decoded(monkeypatch):
    """Bytes that are no image are taken for one."""
    blank = Image.new("L", (1, 1))
    monkeypatch.setattr(contents, "read_image", lambda path, upright, box: blank)


def test_the_content_is_a_function_of_paths_and_bytes(listing, tmp_path, decoded, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    rows = ((name, hashlib.sha256(bytes(size))) for name, size in (("a", 3), ("b", 5), ("c", 7)))
    text = "".join(f"{name}.jpg\0{of.hexdigest()}\n" for name, of in rows)
    before = listing.content
    assert before == hashlib.sha256(text.encode()).hexdigest()
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    os.utime(copy / "a.jpg", (1e9, 1e9))
    assert dataclasses.replace(listing, root=copy).content == before
    (tmp_path / "b.jpg").write_bytes(b"other")
    changed = dataclasses.replace(listing)
    assert changed.fingerprint == listing.fingerprint and changed.content != before


def test_files_that_did_not_change_are_not_read_again(listing, tmp_path, decoded, monkeypatch):
    """Whatever its time of modification says, a file that was replaced is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(contents, "YOUNG", -math.inf)
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda f, *a: read.append(f.name) or digest(f, *a))
    before = listing.content
    assert len(read) == 3
    assert dataclasses.replace(listing).content == before and len(read) == 3
    facts = (tmp_path / "b.jpg").stat()
    (tmp_path / "new.jpg").write_bytes(b"other")
    os.utime(tmp_path / "new.jpg", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    (tmp_path / "new.jpg").rename(tmp_path / "b.jpg")
    assert dataclasses.replace(listing).content != before
    assert [Path(name).name for name in read[3:]] == ["b.jpg"]
    [kept] = (tmp_path / "caches").rglob("*.json")
    for damage in ("", "[]", '{"a.jpg": 1}', '{"a.jpg": []}', '{"a.jpg": [3, 1, 1, 1, "x"]}'):
        kept.write_text(damage)
        (tmp_path / "b.jpg").write_bytes(bytes(5))
        assert dataclasses.replace(listing).content == before


def test_a_young_file_is_read_again(listing, tmp_path, decoded, monkeypatch):
    """A second change within a clock's tick leaves no trace."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(contents, "YOUNG", math.inf)
    before = listing.content
    assert not [*(tmp_path / "caches").rglob("*.json")]
    monkeypatch.setattr(contents, "_facts", lambda found: [1])
    (tmp_path / "b.jpg").write_bytes(b"other")
    assert dataclasses.replace(listing).content != before


def test_a_folder_of_caches_that_cannot_be_written_is_no_hindrance(
    listing, tmp_path, decoded, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(contents, "YOUNG", -math.inf)
    assert listing.content == dataclasses.replace(listing).content


def test_a_damaged_image_is_named_before_anything_is_trained(listing):
    with pytest.raises(
        DatasetError, match=r"a\.jpg: cannot be read .*, and 2 more cannot be read$"
    ):
        _ = listing.content


def test_no_path_leads_out_of_the_folder(tmp_path):
    for path in ("../a.jpg", "/etc/a.jpg", "x//a.jpg", "x/../../a.jpg", ""):
        with pytest.raises(DatasetError, match=f"{tmp_path}: the name {path!r} .*leads out of the"):
            listing_of(tmp_path, (path, "x", "train"))


def test_a_missing_file_is_named(listing, tmp_path):
    (tmp_path / "b.jpg").unlink()
    message = rf"{tmp_path}/b.jpg: cannot be read \(FileNotFoundError: .*\); restore or replace it"
    with pytest.raises(DatasetError, match=message):
        _ = listing.fingerprint


def test_shuffled_is_the_order_of_the_hashes():
    by_hash = sorted(NAMES, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert shuffled(NAMES) == by_hash != NAMES


@pytest.mark.parametrize(("count", "folds"), [(2, 2), (14, 4), (23, 7)])
def test_folds_cut_the_classes_into_equal_parts(count, folds):
    names = NAMES[:count]
    cuts = [validation_fold(names, fold, folds) for fold in range(folds)]
    assert sorted(name for _, held_out in cuts for name in held_out) == sorted(names)
    for kept, held_out in cuts:
        assert sorted(kept + held_out) == sorted(names)
        assert kept == sorted(kept, key=names.index)
        assert held_out == sorted(held_out, key=names.index)
        assert len(held_out) in (count // folds, -(-count // folds))
    reordered = [validation_fold(names[::-1], fold, folds)[1][::-1] for fold in range(folds)]
    assert reordered == [held_out for _, held_out in cuts]


def test_impossible_folds():
    for fold, folds, message in (
        (0, 1, "folds: expected 2 to 23, the number of classes, got 1"),
        (0, 24, "folds: expected 2 to 23, the number of classes, got 24"),
        (-1, 4, "fold: expected 0 to 3, got -1"),
        (4, 4, "fold: expected 0 to 3, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            validation_fold(NAMES, fold, folds)
