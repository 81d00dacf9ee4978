"""In-Shop Clothes Retrieval: its nestings, its two sizes of images, and possible faults of its lists."""

import re

import pytest

from benchmarks.datasets import inshop
from benchmarks.datasets.listing import DatasetError, check_counts
from tests.support.fake_trees import inshop as fake

PARTITION = "Eval/list_eval_partition.txt"
BOXES = "Anno/list_bbox_inshop.txt"


def rows(listing):
    columns = (listing.paths, listing.classes, listing.parts, listing.boxes)
    return list(zip(*columns, strict=True))


def edit(path, change):
    """Write the lines of a file again after `change` was made to them."""
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("".join(f"{line}\n" for line in lines))


def replace(number, old, new):
    def change(lines):
        assert old in lines[number - 1]
        lines[number - 1] = lines[number - 1].replace(old, new)

    return change


@pytest.mark.parametrize("flat", [False, True])
def test_every_row_is_read(tmp_path, flat):
    photos = fake.few_photos()
    listing = inshop.read(fake.write(tmp_path, photos, flat=flat))
    assert rows(listing) == [(f"img/{p.path}", p.item_id, p.status, p.corners) for p in photos]
    assert (listing.name, listing.layout) == ("inshop", "img")
    assert listing.root == tmp_path / ("" if flat else "Img")
    assert listing.fingerprint  # all files are there


def test_a_row_as_the_owners_wrote_it(tmp_path):
    fake.write(tmp_path, pictures=False)
    name = "img/WOMEN/Dresses/id_00000002/02_1_front.jpg"
    padded = f"{name}                           id_00000002 train      "
    fake.write_table(tmp_path / PARTITION, [padded])
    fake.write_table(tmp_path / BOXES, [f"{name}    3 1 065 045 233 252"], "names of seven columns")
    listing = inshop.read(tmp_path)
    assert rows(listing) == [(name, "id_00000002", "train", (65, 45, 233, 252))]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("up", [1, 0])
def test_the_root_may_be_one_folder_above(tmp_path, flat, up):
    folder = fake.write(tmp_path / fake.BENCHMARK, flat=flat)
    for other in ("Another Benchmark", "In-shop"):
        (tmp_path / other / "Eval").mkdir(parents=True)
        header = "1\nimage_name evaluation_status\nimg/a.jpg train\n"
        (tmp_path / other / PARTITION).write_text(header)
    assert inshop.read(tmp_path if up else folder) == inshop.read(folder)


@pytest.mark.parametrize("flat", [False, True])
def test_the_larger_images_have_the_same_rows_but_no_boxes(tmp_path, flat):
    small = inshop.read(fake.write(tmp_path / "small", flat=flat))
    large = inshop.read(fake.write(tmp_path / "large", flat=flat, images=["img_highres"]))
    assert large.layout == "img_highres"
    assert large.boxes is None
    assert list(large.paths) == [path.replace("img/", "img_highres/") for path in small.paths]
    assert large.classes == small.classes
    assert large.parts == small.parts
    assert large.fingerprint


@pytest.mark.parametrize("flat", [False, True])
def test_of_both_sizes_the_root_chooses_and_the_smaller_comes_first(tmp_path, flat):
    folder = fake.write(tmp_path / "data", flat=flat, images=["img", "img_highres"], pictures=False)
    place = folder if flat else folder / "Img"
    for root, layout in (
        (folder, "img"),
        (tmp_path, "img"),
        (place / "img", "img"),
        (place / "img_highres", "img_highres"),
    ):
        listing = inshop.read(root)
        assert (listing.layout, listing.root) == (layout, place)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (PARTITION, replace(5, "train", ""), "line 5: expected 3 words, got 2; restore"),
        (PARTITION, replace(5, "train", "train 1"), "line 5: expected 3 words, got 4; restore"),
        (BOXES, replace(4, " 3 1 ", " 3 "), "line 4: expected 7 words, got 6; restore"),
        (BOXES, replace(4, " 3 1 0", " 3 1 x"), "cannot be read .ValueError: .*'x.*; restore"),
        (BOXES, replace(4, "02_1_front", "09_1_front"), "cannot be read .KeyError: .*02_1_front"),
        (BOXES, list.clear, "cannot be read .KeyError: .*; restore"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, file, change, message):
    folder = fake.write(tmp_path)
    edit(folder / file, change)
    with pytest.raises(DatasetError, match=rf"{file}: {message}"):
        inshop.read(folder)


@pytest.mark.parametrize(
    "change", [list.pop, replace(5, "train", "val"), replace(16, "gallery", "query")]
)
def test_a_wrong_part_shows_in_the_counts(tmp_path, change):
    folder = fake.write(tmp_path)
    expected = inshop.read(folder).counts()
    edit(folder / PARTITION, change)
    with pytest.raises(DatasetError, match=r"; restore the dataset|; the index files are"):
        check_counts(inshop.read(folder), expected)


@pytest.mark.parametrize("broken", ["no list", "other columns", "empty list", "a folder"])
def test_a_folder_without_the_list_is_named(tmp_path, broken):
    path = fake.write(tmp_path) / PARTITION
    if broken == "other columns":
        edit(path, replace(2, "item_id", "pair_id"))
    elif broken == "empty list":
        path.write_bytes(b"")
    else:
        path.unlink()
    if broken == "a folder":
        path.mkdir()
    with pytest.raises(DatasetError, match=f"{re.escape(str(tmp_path))}: found no list_eval_part"):
        inshop.read(tmp_path)


def test_a_tree_without_images_is_named(tmp_path):
    fake.write(tmp_path, images=["elsewhere"])
    with pytest.raises(DatasetError, match=r"found no folder img or img_highres, .* or in Img"):
        inshop.read(tmp_path)


def test_what_is_known_of_it():
    assert inshop.INFO.name == "inshop"
    assert inshop.INFO.archive is None
    assert [line.partition(":")[0] for line in inshop.INFO.layouts] == [*inshop.LAYOUTS]
    for file in ("Eval/list_eval_partition.txt", "Img/img.zip", "Anno/list_bbox_inshop.txt"):
        assert file in inshop.INFO.by_hand
