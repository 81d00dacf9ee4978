"""The readers of the four datasets: every layout in circulation, and damaged index files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pytorch_metric_learning.datasets import CUB, Cars196, StanfordOnlineProducts

from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.datasets.listing import DatasetError, Listing, load
from tests.support.fake_trees import cars, cub, inshop, sop

SMALL: dict[str, tuple[str, Callable[..., Path]]] = {
    "CUB_200_2011": ("cub", cub.write),
    "Stanford_Online_Products": ("sop", sop.write),
    **{layout: ("cars", partial(cars.write, layout=layout)) for layout in cars.LAYOUTS},
    "img": ("inshop", inshop.write),
}
FILES = {
    "CUB_200_2011": "images.txt",
    "Stanford_Online_Products": "Ebay_train.txt Ebay_test.txt",
    "devkit": "devkit/cars_meta.mat devkit/cars_train_annos.mat cars_test_annos_withlabels.mat",
    "combined": "cars_annos.mat",
    "kaggle": "anno_train.csv anno_test.csv names.csv",
    "img": "Eval/list_eval_partition.txt",
}


def read(layout: str, root: Path) -> Listing:
    return IMAGE_DATASETS[SMALL[layout][0]].read(root)


def rows(listing: Listing) -> list[tuple[str, str, str]]:
    return list(zip(listing.paths, listing.classes, listing.parts, strict=True))


@pytest.mark.parametrize("layout", SMALL)
def test_a_small_tree_has_all_files_but_is_not_the_published_dataset(layout, tmp_path):
    """The root may be a folder above."""
    name, write = SMALL[layout]
    folder = write(tmp_path / "a")
    (tmp_path / "1 another dataset").mkdir()
    listing = read(layout, tmp_path)
    assert rows(listing) == rows(read(layout, folder))
    assert (listing.name, listing.layout) == (name, layout)
    assert listing.fingerprint
    with pytest.raises(DatasetError, match=rf"lists .*, but {name} has train"):
        load(IMAGE_DATASETS[name], tmp_path)


def test_rows_of_cub(tmp_path):
    folder = cub.write(tmp_path, {1: 5, 100: 1, 101: 1})
    listing = read("CUB_200_2011", tmp_path)
    assert listing.paths[:2] == [f"images/001.Species_1/Species_1_000{i}_1.jpg" for i in (4, 3)]
    names = [f"{number:03}.Species_{number}" for number in (1, 100, 101)]
    assert listing.classes == [names[0]] * 5 + names[1:]
    assert listing.parts == ["train"] * 6 + ["test"]
    # A mark, line ends of Windows, blank lines at the end.
    lines = (folder / "images.txt").read_text().splitlines()
    (folder / "images.txt").write_bytes(("\ufeff" + "\r\n".join([*lines, "", ""])).encode())
    assert read("CUB_200_2011", tmp_path) == listing


@pytest.mark.parametrize(
    ("layout", "paths"),
    [
        ("devkit", ["cars_train/00001.jpg", "cars_test/00001.jpg"]),
        ("combined", ["car_ims/000002.jpg", "car_ims/000001.jpg"]),
        (
            "kaggle",
            [
                "car_data/car_data/train/Ram C-V Cargo Van Minivan 2012/00001.jpg",
                "car_data/car_data/test/Maker 099 Sedan 2012/00001.jpg",
            ],
        ),
    ],
)
def test_rows_of_cars(layout, paths, tmp_path):
    """The classes are split, not the owners' folders."""
    few = [cars.Car("train", 1, 174), cars.Car("test", 1, 98)]
    expected = [
        (paths[0], "174 Ram C/V Cargo Van Minivan 2012", "test"),
        (paths[1], "098 Maker 099 Sedan 2012", "train"),
    ]
    found = rows(read(layout, cars.write(tmp_path, layout, few)))
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("images", "flat"), [(["img"], True), (["img_highres"], False), (["img_highres", "img"], False)]
)
def test_rows_of_inshop(images, flat, tmp_path):
    """Where a folder has the images in both sizes, the smaller ones are read."""
    photos = inshop.few_photos()
    listing = read("img", inshop.write(tmp_path, photos, flat=flat, images=images))
    size = images[-1]
    assert rows(listing) == [(f"{size}/{p.path}", p.item_id, p.status) for p in photos]
    assert (listing.layout, listing.root) == (size, tmp_path / ("" if flat else "Img"))
    assert listing.fingerprint


def test_what_pml_fetches_is_read_as_pml_reads_it(tmp_path):
    fetched = {"CUB_200_2011": CUB, "kaggle": Cars196}
    fetched["Stanford_Online_Products"] = StanfordOnlineProducts
    for layout, dataset in fetched.items():
        SMALL[layout][1](tmp_path / layout)
        listing = read(layout, tmp_path / layout)
        for split in ("train", "test"):
            ours = [str(listing.root / path) for path, _, part in rows(listing) if part == split]
            assert dataset(str(tmp_path / layout), split).paths == ours


@pytest.mark.parametrize("layout", FILES)
def test_an_index_file_that_cannot_be_read_is_named(layout, tmp_path):
    folder = SMALL[layout][1](tmp_path)
    for file in FILES[layout].split():
        whole = (folder / file).read_bytes()
        (folder / file).unlink()
        missing = rf"{file}: cannot be read .FileNotFoundError: .*No such file|found no .*{file}"
        with pytest.raises(DatasetError, match=missing):
            read(layout, tmp_path)
        (folder / file).write_bytes(b"<html><title>404 \xe9 Not Found</title></html>" * 10)
        with pytest.raises(DatasetError, match=rf"{file}(: cannot be read|, line 1: is not UTF-8)"):
            read(layout, tmp_path)
        (folder / file).write_bytes(whole)


def test_a_folder_without_the_dataset_is_named(tmp_path):
    for info in IMAGE_DATASETS.values():
        with pytest.raises(DatasetError, match=f"{tmp_path}: found no .*; name the folder"):
            info.read(tmp_path)
    inshop.write(tmp_path, images=["elsewhere"])
    with pytest.raises(DatasetError, match=r"found no Img/img or img or Img/img_highres"):
        read("img", tmp_path)
