"""Properties of every reader: the published numbers, harmless differences of index files, and damaged ones."""

import os
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.datasets import IMAGE_DATASETS, load
from benchmarks.datasets.listing import DatasetError
from tests.support.counting import calls
from tests.support.fake_trees import cars, cub, inshop, sop


class Reader(NamedTuple):
    write: Any
    """Writes a small tree into a folder, and returns the folder that holds the index files."""
    full: Any
    """One of the published size, without images."""
    header: int
    """Lines before the first row of an index file."""
    files: Sequence[str]


READERS = {
    "cub": Reader(
        cub.write,
        lambda root: cub.write(root, cub.FULL, pictures=False),
        0,
        ["images.txt", "image_class_labels.txt", "bounding_boxes.txt", "classes.txt"],
    ),
    "sop": Reader(
        sop.write,
        lambda root: sop.write(root, sop.FULL, pictures=False),
        1,
        ["Ebay_train.txt", "Ebay_test.txt"],
    ),
    "cars": Reader(
        partial(cars.write, layout="kaggle"),
        lambda root: cars.write(root, "kaggle", cars.all_cars(), pictures=False),
        0,
        ["anno_train.csv", "anno_test.csv", "names.csv"],
    ),
    "inshop": Reader(
        inshop.write,
        lambda root: inshop.write(root, inshop.all_photos(), pictures=False),
        2,
        ["Eval/list_eval_partition.txt", "Anno/list_bbox_inshop.txt"],
    ),
}
EVERY = pytest.mark.parametrize("name", READERS)
EVERY_FILE = pytest.mark.parametrize(
    ("name", "file"), [(name, file) for name, reader in READERS.items() for file in reader.files]
)


def rows(listing):
    columns = (listing.paths, listing.classes, listing.parts, listing.boxes)
    return sorted(zip(*(column for column in columns if column is not None), strict=True))


@EVERY
def test_at_full_size_the_numbers_are_the_published_ones_and_a_row_costs_few_calls(name, tmp_path):
    READERS[name].full(tmp_path)
    rows = sum(images for images, _ in IMAGE_DATASETS[name].counts.values())
    with calls(30 * rows) as counted:
        listing = load(IMAGE_DATASETS[name], tmp_path)
    assert len(READERS[name].files) <= counted["open"] < 5
    assert counted["stat"] < 20, "no image is looked for"
    assert listing.counts() == IMAGE_DATASETS[name].counts
    with pytest.raises(DatasetError, match=r"[\d,]+ of [\d,]+ images are missing, the first is"):
        _ = listing.fingerprint


@EVERY
def test_a_small_tree_is_not_the_published_dataset(name, tmp_path):
    READERS[name].write(tmp_path, pictures=False)
    with pytest.raises(DatasetError, match=rf"lists .*, but {name} has train"):
        load(IMAGE_DATASETS[name], tmp_path)


@EVERY_FILE
def test_the_order_of_rows_does_not_matter(name, file, tmp_path):
    path = READERS[name].write(tmp_path, pictures=False) / file
    before = IMAGE_DATASETS[name].read(tmp_path)
    if file == "names.csv":  # its lines are the classes in their order
        return
    lines = path.read_text().splitlines()
    head, tail = lines[: READERS[name].header], lines[READERS[name].header :]
    random.shuffle(tail)
    path.write_text("\n".join([*head, *tail]))
    after = IMAGE_DATASETS[name].read(tmp_path)
    assert rows(after) == rows(before)
    assert after == before or name in ("cars", "inshop")  # the others have ids to go by


@EVERY
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.rstrip(),
        lambda text: text + "\n\n",
    ],
    ids=["Windows line ends", "BOM", "no last line end", "blank lines"],
)
def test_harmless_differences_of_the_text(name, change, tmp_path):
    folder = READERS[name].write(tmp_path, pictures=False)
    before = IMAGE_DATASETS[name].read(tmp_path)
    for file in READERS[name].files:
        (folder / file).write_bytes(change((folder / file).read_text()).encode())
    assert IMAGE_DATASETS[name].read(tmp_path) == before


@EVERY_FILE
def test_a_name_that_is_not_utf_8_is_named_by_its_line(name, file, tmp_path):
    path = READERS[name].write(tmp_path, pictures=False) / file
    lines = path.read_bytes().splitlines()
    lines[3] = b"\xe9" + lines[3]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DatasetError, match=rf"{file}: cannot be read .'utf-8' codec can't"):
        IMAGE_DATASETS[name].read(tmp_path)


@EVERY_FILE
def test_a_missing_index_file_is_named(name, file, tmp_path):
    (READERS[name].write(tmp_path, pictures=False) / file).unlink()
    if "bbox" in file:  # boxes are optional
        assert IMAGE_DATASETS[name].read(tmp_path).boxes is None
        return
    with pytest.raises(DatasetError, match=rf"{file}: cannot be read|found no {Path(file).name}"):
        IMAGE_DATASETS[name].read(tmp_path)


@EVERY_FILE
def test_an_index_file_that_never_ends_is_not_waited_for(name, file, tmp_path):
    path = READERS[name].write(tmp_path, pictures=False) / file
    path.unlink()
    os.mkfifo(path)
    if "bbox" in file:
        assert IMAGE_DATASETS[name].read(tmp_path).boxes is None
        return
    with pytest.raises(DatasetError, match=r"it is a pipe or a device|found no"):
        IMAGE_DATASETS[name].read(tmp_path)


OUTSIDE = {
    "cub": [
        ("images.txt", "001.Species_1/", "../../secret/"),
    ],
    "sop": [("Ebay_train.txt", "bicycle_final/", "../")],
    "cars": [("anno_train.csv", "00001.jpg", path) for path in ("../../../x.jpg", "/etc/x.jpg")],
    "inshop": [
        ("Eval/list_eval_partition.txt", "img/WOMEN/", path)
        for path in ("img/../", "/img/", "img//")
    ],
}


@pytest.mark.parametrize(
    ("name", "file", "old", "new"), [(name, *case) for name in OUTSIDE for case in OUTSIDE[name]]
)
def test_no_index_file_leads_out_of_the_folder(name, file, old, new, tmp_path):
    folder = READERS[name].write(tmp_path, pictures=False)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    if name == "cub":  # a class of this name as well
        names = folder / "classes.txt"
        names.write_text(names.read_text().replace(old[:-1], new[:-1]))
    # In-Shop's boxes have the old name.
    expected = "expected a path below this folder, got '|bbox_inshop.txt: cannot be read .KeyError"
    with pytest.raises(DatasetError, match=expected):
        IMAGE_DATASETS[name].read(tmp_path)


@pytest.mark.parametrize("class_name", ["..", ""])
def test_no_class_of_cars_leads_out_of_the_folder(class_name, tmp_path):
    names = READERS["cars"].write(tmp_path, pictures=False) / "names.csv"
    names.write_text("\n".join([class_name, *names.read_text().splitlines()[1:]]))
    with pytest.raises(DatasetError, match="expected a path below this folder, got '"):
        IMAGE_DATASETS["cars"].read(tmp_path)


@EVERY
def test_missing_images_are_counted(name, tmp_path):
    READERS[name].write(tmp_path)
    listing = IMAGE_DATASETS[name].read(tmp_path)
    for path in (listing.paths[4], listing.paths[7]):
        (listing.root / path).unlink()
    message = rf"2 of {len(listing)} images are missing, the first is {listing.paths[4]}; unpack"
    with pytest.raises(DatasetError, match=message):
        _ = listing.fingerprint


@EVERY
def test_a_folder_without_the_dataset_is_named(name, tmp_path):
    (tmp_path / "Another").mkdir()
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DatasetError, match=f"{root}: (found no|cannot be read as a folder)"):
            IMAGE_DATASETS[name].read(root)
