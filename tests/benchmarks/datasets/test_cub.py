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
    assert listing.super_classes is None
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


@pytest.mark.parametrize("file", ["image_class_labels.txt", "bounding_boxes.txt"])
def test_ids_that_only_one_list_has(folder, file):
    edit(folder / file, 7, None)
    with pytest.raises(DatasetError, match=rf"{file}: image 7 of images.txt is missing; restore"):
        cub.read(folder)
    edit(folder / "images.txt", 7, None)
    edit(folder / "images.txt", 7, None)
    with pytest.raises(DatasetError, match=r"images.txt: image \d of .*\.txt is missing; restore"):
        cub.read(folder)


@pytest.mark.parametrize("file", INDEX_FILES)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5", r"line 2: expected \d words, got 1"),
        ("", r"line 2: expected \d words, got 0"),
        ("x y", "line 2: expected numbers, got 'x y'; restore"),
        ("1 1", "line 2: id 1 appears twice; restore"),
    ],
)
def test_a_damaged_line_is_named(folder, file, line, message):
    if file == "bounding_boxes.txt" and " " in line:
        line += " 1 1 1"
        message = message.replace("'x y'", "'x y 1 1 1'")
    edit(folder / file, 2, line)
    with pytest.raises(DatasetError, match=rf"{file}: {message}"):
        cub.read(folder)


@pytest.mark.parametrize(
    ("file", "line", "text", "message"),
    [
        (
            "image_class_labels.txt",
            3,
            "3 201",
            "image 3 is of class 201, which classes.txt does not name",
        ),
        ("image_class_labels.txt", 3, "3 0", "image 3 is of class 0, which classes.txt does not"),
        (
            "image_class_labels.txt",
            3,
            "3 2",
            "image 3 is of class 002.Species_2, expected 002.Species_2/NAME.jpg, got 001.Species_1/",
        ),
        (
            "images.txt",
            1,
            "1 001.Species_1/._Species_1_0000.jpg",
            "image 1 is of class 001.Species_1, .* got 001.Species_1/._Species",
        ),
        ("images.txt", 53, "53 105.Species_105/Species_105_0003.j", "image 53 .*_0003.j; restore"),
        ("bounding_boxes.txt", 4, "4 1.0 1.0 0.0 9.0", "box of image 4 is 0.0 wide and 9.0 high"),
        ("bounding_boxes.txt", 4, "4 1.0 1.0 9.0 -1", "box of image 4 is 9.0 wide and -1.0 high"),
        ("bounding_boxes.txt", 4, "4 1.0 nan 9.0 9.0", "box of image 4 is 9.0 wide"),
        ("bounding_boxes.txt", 4, "4 1.0 1.0 inf 9.0", "box of image 4 is inf wide"),
        ("bounding_boxes.txt", 4, "4 1.0 1.0 wide 9.0", "line 4: expected numbers, got '4 1.0"),
    ],
)
def test_a_wrong_value_is_named(folder, file, line, text, message):
    edit(folder / file, line, text)
    with pytest.raises(DatasetError, match=rf"({file}|images\.txt): .*{message}"):
        cub.read(folder)
