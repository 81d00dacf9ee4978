"""CUB-200-2011: the archive's tree, complete and broken."""

import shutil

import pytest

from benchmarks.datasets import cub
from benchmarks.datasets.listing import DatasetError
from tests.support.fake_trees import cub as tree

INDEX_FILES = ["images.txt", "image_class_labels.txt", "bounding_boxes.txt", "classes.txt"]


@pytest.fixture
def folder(tmp_path):
    return tree.write(tmp_path, pictures=False)


def edit(path, line, text):
    """Replace a line, counted from 1; None removes it."""
    lines = path.read_text().splitlines()
    lines[line - 1 : line] = [] if text is None else [text]
    path.write_text("".join(f"{each}\n" for each in lines))


def test_images_come_by_id_with_class_part_and_box(folder):
    listing = cub.read(folder)
    assert (listing.name, listing.root, listing.layout) == ("cub", folder, "CUB_200_2011")
    assert len(listing) == 53
    assert listing.paths[:2] == [f"images/001.Species_1/Species_1_000{i}.jpg" for i in (0, 1)]
    assert listing.classes[:6] == ["001.Species_1"] * 5 + ["002.Species_2"]
    assert listing.boxes[:2] == [(1.0, 1.0, 31.0, 26.0), (2.0, 2.0, 32.0, 27.0)]
    assert listing.counts() == {"train": (33, 8), "test": (20, 5)}
    assert {
        c for c, part in zip(listing.classes, listing.parts, strict=True) if part == "test"
    } == {f"{label}.Species_{label}" for label in range(101, 106)}


def test_class_100_trains_and_class_101_tests(tmp_path):
    listing = cub.read(tree.write(tmp_path, {100: 1, 101: 1}, pictures=False))
    assert listing.parts == ["train", "test"]


def test_every_listed_picture_is_there_and_no_apple_double_file_is_listed(tmp_path):
    listing = cub.read(tree.write(tmp_path))
    assert listing.fingerprint
    files = {path.relative_to(listing.root).as_posix() for path in listing.root.rglob("*.jpg")}
    (double,) = files - set(listing.paths)
    assert double == "images/001.Species_1/._Species_1_0000.jpg"


@pytest.mark.parametrize("depth", ["the folder itself", "its parent", "packed twice"])
def test_the_folder_is_found(tmp_path, depth):
    folder = tree.write(tmp_path, pictures=False)
    root = {"the folder itself": folder, "its parent": tmp_path}.get(depth)
    if root is None:
        root = tmp_path / "outer"
        shutil.copytree(tmp_path / "CUB_200_2011", root / "CUB_200_2011" / "CUB_200_2011")
    listing = cub.read(root)
    assert (listing.root / "images.txt").is_file()
    assert len(listing) == 53


def test_the_official_split_for_classification_is_not_read(folder):
    before = cub.read(folder)
    (folder / "train_test_split.txt").unlink()
    assert cub.read(folder) == before


@pytest.mark.parametrize(
    ("file", "line", "text", "message"),
    [
        *((file, 2, "5", r"line 2: expected \d words, got 1; restore") for file in INDEX_FILES),
        ("images.txt", 2, "x y", "cannot be read .ValueError: .*'x'.*; restore the file"),
        ("classes.txt", 2, "x y", "cannot be read .ValueError: .*'x'.*; restore the file"),
        ("image_class_labels.txt", 7, None, "cannot be read .KeyError: 7.; restore"),
        ("bounding_boxes.txt", 7, None, "cannot be read .KeyError: 7.; restore"),
        ("image_class_labels.txt", 3, "3 201", "cannot be read .KeyError: 201.; restore"),
        ("image_class_labels.txt", 3, "3 x", "cannot be read .ValueError: .*'x'.*; restore"),
        ("bounding_boxes.txt", 4, "4 1.0 1.0 wide 9.0", "cannot be read .*'wide'.*; restore"),
        ("bounding_boxes.txt", 4, "4 1.0 nan 9.0 9.0", "cannot be read .*not finite.; restore"),
        ("bounding_boxes.txt", 4, "4 1.0 1.0 inf 9.0", "cannot be read .*not finite.; restore"),
    ],
)
def test_a_damaged_file_is_named(folder, file, line, text, message):
    edit(folder / file, line, text)
    with pytest.raises(DatasetError, match=rf"{file}: {message}"):
        cub.read(folder)
