"""The readers of the four datasets: published numbers, every layout in circulation, and damaged index files."""

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pytorch_metric_learning.datasets import CUB, Cars196, StanfordOnlineProducts

from benchmarks.datasets import IMAGE_DATASETS, load
from benchmarks.datasets.listing import DatasetError, Listing
from tests.support.counting import calls
from tests.support.fake_trees import cars, cub, inshop, sop

FULL: dict[str, Callable[[Path], Path]] = {
    "cub": partial(cub.write, sizes=cub.FULL, pictures=False),
    "sop": partial(sop.write, sizes=sop.FULL, pictures=False),
    "cars": partial(cars.write, layout="kaggle", cars=cars.all_cars(), pictures=False),
    "inshop": partial(inshop.write, photos=inshop.all_photos(), pictures=False),
}
SMALL: dict[str, tuple[str, Callable[..., Path]]] = {
    "CUB_200_2011": ("cub", cub.write),
    "Stanford_Online_Products": ("sop", sop.write),
    **{layout: ("cars", partial(cars.write, layout=layout)) for layout in cars.LAYOUTS},
    "img": ("inshop", inshop.write),
    "img_highres": ("inshop", partial(inshop.write, images=["img_highres"])),
}
FILES = {
    "CUB_200_2011": ["images.txt"],
    "Stanford_Online_Products": ["Ebay_train.txt", "Ebay_test.txt"],
    "devkit": [
        *("devkit/cars_meta.mat", "devkit/cars_train_annos.mat"),
        "cars_test_annos_withlabels.mat",
    ],
    "combined": ["cars_annos.mat"],
    "kaggle": ["anno_train.csv", "anno_test.csv", "names.csv"],
    "img": ["Eval/list_eval_partition.txt"],
}
LAYOUTS = pytest.mark.parametrize("layout", SMALL)


def read(layout: str, root: Path) -> Listing:
    return IMAGE_DATASETS[SMALL[layout][0]].read(root)


def rows(listing: Listing) -> list[tuple[str, str, str]]:
    return list(zip(listing.paths, listing.classes, listing.parts, strict=True))


@pytest.mark.parametrize("name", FULL)
def test_at_full_size_the_numbers_are_the_published_ones_and_a_row_costs_few_calls(name, tmp_path):
    FULL[name](tmp_path)
    count = sum(images for images, _ in IMAGE_DATASETS[name].counts.values())
    with calls(30 * count) as counted:
        listing = load(IMAGE_DATASETS[name], tmp_path)
    assert 0 < counted["open"] < 5
    assert counted["stat"] < 30, "no image is looked for"
    assert listing.counts() == IMAGE_DATASETS[name].counts
    if name == "cars":
        names = sorted(set(listing.classes))
        assert [int(name[:3]) for name in names] == list(range(1, 197))
        assert [name[4:] for name in names] == cars.CLASS_NAMES != sorted(cars.CLASS_NAMES)
        folders = Counter(path.split("/")[2] for path in listing.paths)
        assert folders == {"train": 8_144, "test": 8_041}  # the owners' numbers


@LAYOUTS
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
    listing = read("CUB_200_2011", cub.write(tmp_path, pictures=False))
    assert listing.paths[:2] == [f"images/001.Species_1/Species_1_000{i}_1.jpg" for i in (4, 3)]
    assert listing.classes[:6] == ["001.Species_1"] * 5 + ["002.Species_2"]
    assert listing.counts() == {"train": (33, 8), "test": (20, 5)}
    edge = cub.write(tmp_path / "edge", {100: 1, 101: 1}, pictures=False)
    assert read("CUB_200_2011", edge).parts == ["train", "test"]


def test_rows_of_sop(tmp_path):
    found = rows(read("Stanford_Online_Products", sop.write(tmp_path, pictures=False)))
    assert found[0] == ("cabinet_final/111085000001_0.JPG", "00001", "train")
    assert found[-1] == ("stapler_final/111085011325_2.JPG", "11325", "test")
    assert [part for _, _, part in found] == ["train"] * 34 + ["test"] * 21


@pytest.mark.parametrize("layout", cars.LAYOUTS)
def test_rows_of_cars(layout, tmp_path):
    few = [cars.Car("train", 1, 174), cars.Car("test", 1, 98)]
    folder = {"devkit": "cars_{}/00001.jpg", "combined": "car_ims/{}.jpg"}.get(layout)
    paths = [
        "car_data/car_data/train/Ram C-V Cargo Van Minivan 2012/00001.jpg",
        "car_data/car_data/test/Maker 099 Sedan 2012/00001.jpg",
    ]
    if folder:
        numbers = ("train", "test") if layout == "devkit" else ("000002", "000001")
        paths = [folder.format(number) for number in numbers]
    expected = [
        (paths[0], "174 Ram C/V Cargo Van Minivan 2012", "test"),
        (paths[1], "098 Maker 099 Sedan 2012", "train"),
    ]
    found = rows(read(layout, cars.write(tmp_path, layout, few, pictures=False)))
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("sizes", [*([size] for size in inshop.SIZES), inshop.SIZES])
def test_rows_of_inshop(flat, sizes, tmp_path):
    """Where a folder has the images in both sizes, the smaller ones are read."""
    photos = inshop.few_photos()
    listing = read("img", inshop.write(tmp_path, photos, flat=flat, images=sizes))
    size = sizes[0] if len(sizes) == 1 else "img"
    assert rows(listing) == [(f"{size}/{p.path}", p.item_id, p.status) for p in photos]
    assert (listing.layout, listing.root) == (size, tmp_path / ("" if flat else "Img"))
    assert listing.fingerprint


def test_of_several_layouts_of_cars_the_owners_comes_first(tmp_path):
    for layout in reversed(cars.LAYOUTS):
        cars.write(tmp_path, layout, pictures=False)
    assert read("devkit", tmp_path).layout == "devkit"
    # The devkit beside the combined images has no images of its own.
    (tmp_path / "cars_train").rename(tmp_path / "elsewhere")
    assert read("devkit", tmp_path).layout == "combined"


@pytest.mark.parametrize(
    ("layout", "fetched"),
    [
        ("CUB_200_2011", CUB),
        ("kaggle", Cars196),
        ("Stanford_Online_Products", StanfordOnlineProducts),
    ],
)
def test_what_pml_fetches_is_read_as_pml_reads_it(layout, fetched, tmp_path):
    SMALL[layout][1](tmp_path, pictures=False)
    listing = read(layout, tmp_path)
    for split in ("train", "test"):
        ours = [str(listing.root / path) for path, _, part in rows(listing) if part == split]
        assert fetched(str(tmp_path), split).paths == ours


@pytest.mark.parametrize("layout", ["CUB_200_2011", "Stanford_Online_Products", "kaggle", "img"])
def test_harmless_differences_of_the_text(layout, tmp_path):
    """A mark, line ends of Windows, the last one missing, blank lines at the end."""
    folder = SMALL[layout][1](tmp_path, pictures=False)
    before = read(layout, tmp_path)
    texts = {folder / file: (folder / file).read_text() for file in FILES[layout]}
    for start, line_end, last in (("\ufeff", "\r\n", ""), ("", "\n", "\n\n\n")):
        for file, text in texts.items():
            changed = start + text.rstrip().replace("\n", line_end) + last
            file.write_bytes(changed.encode())
        assert read(layout, tmp_path) == before


@pytest.mark.parametrize("layout", FILES)
def test_an_index_file_that_cannot_be_read_is_named(layout, tmp_path):
    folder = SMALL[layout][1](tmp_path, pictures=False)
    for file in FILES[layout]:
        whole = (folder / file).read_bytes()
        (folder / file).unlink()
        missing = rf"{file}: cannot be read .FileNotFoundError: .*No such file|found no .*{file}"
        with pytest.raises(DatasetError, match=missing):
            read(layout, tmp_path)
        (folder / file).write_bytes(b"<html><title>404 \xe9 Not Found</title></html>" * 10)
        with pytest.raises(DatasetError, match=rf"{file}(: cannot be read|, line 1: is not UTF-8)"):
            read(layout, tmp_path)
        (folder / file).write_bytes(whole)


def test_the_file_without_labels_under_the_name_of_the_other_is_refused(tmp_path):
    folder = cars.write(tmp_path, "devkit", pictures=False)
    shutil.move(folder / "devkit/cars_test_annos.mat", folder / "cars_test_annos_withlabels.mat")
    with pytest.raises(DatasetError, match=r"withlabels\.mat: .*no field of name class"):
        read("devkit", tmp_path)


def test_a_folder_without_the_dataset_is_named(tmp_path):
    for info in IMAGE_DATASETS.values():
        for root in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(DatasetError, match=f"{root}: found no .*; name the folder"):
                info.read(root)
    inshop.write(tmp_path, images=["elsewhere"])
    with pytest.raises(DatasetError, match=r"found no Img/img or img or Img/img_highres"):
        read("img", tmp_path)
