"""Stanford Online Products: the archive's tree, complete and broken."""

import pytest

from benchmarks.datasets import sop
from benchmarks.datasets.listing import DatasetError
from tests.support.fake_trees import sop as tree


@pytest.fixture
def folder(tmp_path):
    return tree.write(tmp_path, pictures=False)


def edit(path, line, text):
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("".join(f"{each}\n" for each in lines))


def test_images_come_by_id_with_class_part_and_super_class(folder):
    listing = sop.read(folder)
    assert (listing.name, listing.root, listing.layout) == (
        "sop",
        folder,
        "Stanford_Online_Products",
    )
    assert listing.paths[0] == "cabinet_final/111085000001_0.JPG"
    assert listing.paths[-1] == "stapler_final/111085011325_2.JPG"
    assert (listing.classes[0], listing.classes[-1]) == ("00001", "11325")
    assert (listing.super_classes[0], listing.super_classes[-1]) == ("cabinet", "stapler")
    assert listing.parts == ["train"] * 34 + ["test"] * 21
    assert listing.counts() == {"train": (34, 12), "test": (21, 7)}
    assert listing.boxes is None
    assert set(listing.super_classes) == set(tree.SUPER_CLASSES)


@pytest.mark.parametrize("nested", [False, True], ids=["its parent", "packed twice"])
def test_the_folder_is_found(tmp_path, nested):
    tree.write(tmp_path / "Stanford_Online_Products" if nested else tmp_path, pictures=False)
    assert len(sop.read(tmp_path)) == 55


@pytest.mark.parametrize(
    ("file", "line", "text", "message"),
    [
        (
            "train",
            1,
            "1 1 2 cabinet_final/1_0.JPG",
            "expected 'image_id class_id super_class_id path', got '1 1",
        ),
        ("train", 3, "2 1 2", "expected 4 words, got 3"),
        ("train", 3, "2 1 2 cabinet_final/my 0.JPG", "expected 4 words, got 5"),
        (
            "test",
            22,
            "55 11325 10 mug_final/1110850",
            "expected SUPERCLASS_final/NAME.JPG, got 'mug_",
        ),
        ("test", 3, "36 11319 4 mug_final/._1_1.JPG", "expected SUPERCLASS_final/NAME.JPG, got"),
        ("train", 3, "two 1 2 cabinet_final/1_1.JPG", "expected numbers, got 'two' and '1'"),
        ("train", 3, "1 1 2 cabinet_final/1_1.JPG", "image 1 is listed twice"),
        ("test", 3, "1 11319 4 coffee_maker_final/1_1.JPG", "image 1 is listed twice"),
        (
            "train",
            3,
            "2 11319 2 cabinet_final/1_1.JPG",
            r"expected a class in 1\.\.11318, got 11319",
        ),
        ("train", 3, "2 0 2 cabinet_final/1_1.JPG", r"expected a class in 1\.\.11318, got 0"),
        (
            "test",
            3,
            "36 11318 4 fan_final/1_1.JPG",
            r"expected a class in 11319\.\.22634, got 11318",
        ),
        (
            "test",
            3,
            "36 22635 4 fan_final/1_1.JPG",
            r"expected a class in 11319\.\.22634, got 22635",
        ),
        (
            "train",
            3,
            "2 1 3 cabinet_final/1_1.JPG",
            "super-class cabinet has id 3 here, but 2 in an earlier line",
        ),
    ],
)
def test_a_wrong_line_is_named(folder, file, line, text, message):
    edit(folder / f"Ebay_{file}.txt", line, text)
    with pytest.raises(DatasetError, match=rf"Ebay_{file}.txt: line {line}: {message}"):
        sop.read(folder)


def test_an_empty_index_file(folder):
    (folder / "Ebay_train.txt").write_text("")
    with pytest.raises(
        DatasetError, match=r"Ebay_train.txt: line 1: expected 'image_id .*', got ''"
    ):
        sop.read(folder)
