"""Stanford Online Products: the archive's tree, complete and broken."""

import pytest

from benchmarks.datasets import sop
from benchmarks.datasets.listing import DatasetError, check_counts
from tests.support.fake_trees import sop as tree


@pytest.fixture
def folder(tmp_path):
    return tree.write(tmp_path, pictures=False)


def edit(path, line, text):
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("".join(f"{each}\n" for each in lines))


def test_images_come_by_id_with_class_and_part(folder):
    listing = sop.read(folder)
    assert (listing.name, listing.root, listing.layout) == (
        "sop",
        folder,
        "Stanford_Online_Products",
    )
    assert listing.paths[0] == "cabinet_final/111085000001_0.JPG"
    assert listing.paths[-1] == "stapler_final/111085011325_2.JPG"
    assert (listing.classes[0], listing.classes[-1]) == ("00001", "11325")
    assert listing.parts == ["train"] * 34 + ["test"] * 21
    assert listing.counts() == {"train": (34, 12), "test": (21, 7)}
    assert listing.boxes is None


@pytest.mark.parametrize("nested", [False, True], ids=["its parent", "packed twice"])
def test_the_folder_is_found(tmp_path, nested):
    tree.write(tmp_path / "Stanford_Online_Products" if nested else tmp_path, pictures=False)
    assert len(sop.read(tmp_path)) == 55


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (3, "2 1 2", "line 3: expected 4 words, got 3; restore"),
        (3, "2 1 2 cabinet_final/my 0.JPG", "line 3: expected 4 words, got 5; restore"),
        (3, "two 1 2 cabinet_final/1_1.JPG", "cannot be read .ValueError: .*'two'.; restore"),
    ],
)
def test_a_wrong_line_is_named(folder, line, text, message):
    edit(folder / "Ebay_train.txt", line, text)
    with pytest.raises(DatasetError, match=rf"Ebay_train.txt: {message}"):
        sop.read(folder)


@pytest.mark.parametrize(
    ("file", "line", "text"),
    [
        ("train", 3, "1 1 2 cabinet_final/1_1.JPG"),
        ("test", 3, "1 11319 4 coffee_maker_final/1_1.JPG"),
        ("train", 3, "2 11319 2 cabinet_final/1_1.JPG"),
        ("test", 3, "36 22635 4 fan_final/1_1.JPG"),
    ],
    ids=["twice", "in both parts", "class of the other part", "unknown class"],
)
def test_a_wrong_number_shows_in_the_counts(folder, file, line, text):
    expected = sop.read(folder).counts()
    edit(folder / f"Ebay_{file}.txt", line, text)
    with pytest.raises(DatasetError, match=r"; restore the dataset's own|; the index files are"):
        check_counts(sop.read(folder), expected)
