"""Listings, what is kept of their files, and the parts that classes are cut into."""

import dataclasses
import hashlib
import math
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.datasets import contents
from benchmarks.datasets.contents import content_digest
from benchmarks.datasets.listing import DatasetError, Listing
from benchmarks.datasets.splits import shuffled, validation_fold

NAMES = [f"class {i}" for i in range(23)]


@pytest.fixture
def listing(tmp_path):
    """Three files of zeros."""
    paths, sizes = ["a.jpg", "b.jpg", "c.jpg"], (3, 5, 7)
    for path, size in zip(paths, sizes, strict=True):
        (tmp_path / path).write_bytes(bytes(size))
    return Listing("toy", tmp_path, "flat", paths, ["x", "x", "y"], ["train", "train", "test"])


def test_the_fingerprint_is_a_function_of_what_is_listed_and_of_the_sizes(listing, tmp_path):
    text = "toya.jpg\0x\0train\x003\nb.jpg\0x\0train\x005\nc.jpg\0y\0test\x007\n"
    assert listing.fingerprint == hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "b.jpg").unlink()
    line = rf"{tmp_path}/b.jpg: cannot be read \(No such file or directory\); restore it, or name"
    with pytest.raises(DatasetError, match=line):
        _ = dataclasses.replace(listing).fingerprint


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """The user's folder of caches; bytes that are no image are taken for one, and no file for young."""
    blank = Image.new("L", (1, 1))
    monkeypatch.setattr(contents, "read_image", lambda path, upright, box: blank)
    monkeypatch.setattr(contents, "YOUNG", -math.inf)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def test_an_error_names_the_first_20_files_that_cannot_be_used(tmp_path):
    """Missing ones before any is read, then damaged ones."""
    paths = [f"{i}.jpg" for i in range(25)]
    toy = Listing("toy", tmp_path, "flat", paths, ["x"] * 25, ["train"] * 25)
    names = ", ".join(paths[1:20])
    line = rf"^{tmp_path}/0.jpg: cannot be read \(.*; 24 more cannot be used: {names} and 5 others$"
    with pytest.raises(DatasetError, match=line):
        _ = toy.fingerprint
    for path in paths:
        (tmp_path / path).touch()
    with pytest.raises(DatasetError, match=line):
        content_digest(toy)
    Image.new("RGB", (1, 1)).save(tmp_path / "0.jpg")
    with pytest.raises(DatasetError, match=r"/1.jpg: .*; 23 more .*: 2.jpg, .*, 20.jpg and 4 oth"):
        content_digest(toy)


@pytest.mark.usefixtures("caches")
def test_the_content_is_a_function_of_paths_and_bytes(listing, tmp_path):
    rows = ((name, hashlib.sha256(bytes(size))) for name, size in (("a", 3), ("b", 5), ("c", 7)))
    text = "".join(f"{name}.jpg\0{digest.hexdigest()}\n" for name, digest in rows)
    assert content_digest(listing) == hashlib.sha256(text.encode()).hexdigest()
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    os.utime(copy / "a.jpg", (1e9, 1e9))
    assert content_digest(dataclasses.replace(listing, root=copy)) == content_digest(listing)
    before = content_digest(listing)
    (tmp_path / "b.jpg").write_bytes(b"other")
    changed = dataclasses.replace(listing)
    assert changed.fingerprint == listing.fingerprint
    assert content_digest(changed) != before


def test_a_relative_folder_of_caches_is_not_used(listing, tmp_path, caches, monkeypatch):
    """Else a folder called ~ would appear."""
    monkeypatch.chdir(tmp_path)
    before = {*tmp_path.rglob("*")}
    for given in ("~/.cache", "", "caches"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no home
        assert content_digest(dataclasses.replace(listing))
    assert {*tmp_path.rglob("*")} == before
    monkeypatch.undo()


def test_files_that_did_not_change_are_not_read_again(listing, tmp_path, caches, monkeypatch):
    """Whatever its time of modification says, a file that was replaced is."""
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda f, *a: read.append(f.name) or digest(f, *a))
    before = content_digest(listing)
    assert len(read) == 3
    assert content_digest(dataclasses.replace(listing)) == before and len(read) == 3
    facts = (tmp_path / "b.jpg").stat()
    (tmp_path / "new.jpg").write_bytes(b"other")
    os.utime(tmp_path / "new.jpg", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    (tmp_path / "new.jpg").rename(tmp_path / "b.jpg")
    assert content_digest(dataclasses.replace(listing)) != before
    assert [Path(name).name for name in read[3:]] == ["b.jpg"]
    [kept] = caches.rglob("*.json")
    (tmp_path / "b.jpg").write_bytes(bytes(5))
    for damage in ("", "[]", '{"a.jpg": 1}', '{"a.jpg": [3, 1, 1, 1, "x"]}'):
        kept.write_text(damage)
        assert content_digest(dataclasses.replace(listing)) == before
    kept.unlink()
    caches.joinpath("pml-regularizers").rmdir()
    caches.rmdir()
    caches.touch()  # now nothing can be kept
    assert content_digest(dataclasses.replace(listing)) == before


def test_no_path_leads_out_of_the_folder(tmp_path):
    for path in ("../a.jpg", "/etc/a.jpg", "x/../../a.jpg"):
        with pytest.raises(DatasetError, match=f"{tmp_path}: the name {path!r} .*leads out of the"):
            Listing("toy", tmp_path, "flat", [path], ["x"], ["train"])


def test_folds_cut_the_classes_into_equal_parts():
    cuts = [validation_fold(NAMES, fold, 7) for fold in range(7)]
    by_hash = sorted(NAMES, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert shuffled(NAMES) == by_hash
    assert cuts[0][1] == sorted(by_hash[:3], key=NAMES.index)
    assert sorted(name for _, held_out in cuts for name in held_out) == sorted(NAMES)
    for kept, held_out in cuts:
        assert [name for name in NAMES if name not in held_out] == kept
        assert len(held_out) in (3, 4)
    for fold, folds, message in (
        (0, 24, "folds: expected 2 to 23, the number of classes, got 24"),
        (4, 4, "fold: expected 0 to 3, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            validation_fold(NAMES, fold, folds)
