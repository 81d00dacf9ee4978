"""The four datasets: every layout in circulation, damaged lists, downloads."""

import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from pytorch_metric_learning import datasets

from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.datasets.listing import DatasetError, Listing
from tests.support.fake_trees import cars, cub, inshop, sop

SMALL: dict[str, tuple[str, Callable[..., Path]]] = {
    "CUB_200_2011": ("cub", cub.write),
    "Stanford_Online_Products": ("sop", sop.write),
    **{layout: ("cars", partial(cars.write, layout=layout)) for layout in cars.LAYOUTS},
    "img": ("inshop", inshop.write),
}
FILES = {
    "CUB_200_2011": "images.txt image_class_labels.txt",
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
        IMAGE_DATASETS[name].load(tmp_path)


def test_rows_of_cub(tmp_path):
    cub.write(tmp_path, {1: 5, 100: 1, 101: 1})
    listing = read("CUB_200_2011", tmp_path)
    assert listing.paths[:2] == [f"images/001.Species_1/Species_1_000{i}_1.jpg" for i in (4, 3)]
    names = [f"{number:03}.Species_{number}" for number in (1, 100, 101)]
    assert listing.classes == [names[0]] * 5 + names[1:]
    assert listing.parts == ["train"] * 6 + ["test"]


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
    listed = rows(read(layout, cars.write(tmp_path, layout, few)))
    assert sorted(listed) == sorted(expected)


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


PML = {
    "CUB_200_2011": datasets.CUB,
    "kaggle": datasets.Cars196,
    "Stanford_Online_Products": datasets.StanfordOnlineProducts,
}


@pytest.mark.parametrize("layout", PML)
def test_the_halves_are_those_of_pml(layout, tmp_path):
    SMALL[layout][1](tmp_path)
    listing = read(layout, tmp_path)
    for split in ("train", "test"):
        paths = [str(listing.root / path) for path, _, part in rows(listing) if part == split]
        assert PML[layout](str(tmp_path), split).paths == paths != []


def test_the_folder_of_an_archive_keeps_its_name_or_is_linked(tmp_path):
    folder = cub.write(tmp_path)
    expected = rows(read("CUB_200_2011", folder))
    (tmp_path / "link").symlink_to(folder)
    assert rows(read("CUB_200_2011", tmp_path / "link")) == expected
    folder.rename(tmp_path / "birds")
    with pytest.raises(DatasetError, match=r"birds: expected the name CUB_200_2011, .* rename it"):
        read("CUB_200_2011", tmp_path / "birds")


def pack(layout, folder):
    """The archive that PML downloads."""
    SMALL[layout][1](folder / "unpacked")
    if layout != "CUB_200_2011":
        return Path(shutil.make_archive(str(folder / "data"), "zip", folder / "unpacked"))
    with tarfile.open(folder / "CUB_200_2011.tgz", "w:gz") as file:
        file.add(folder / "unpacked" / layout, layout)
    return folder / "CUB_200_2011.tgz"


@pytest.fixture
def address(tmp_path, monkeypatch):
    """That of a server of the folder's files."""
    monkeypatch.setenv("no_proxy", "*")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")  # in PML
@pytest.mark.parametrize("layout", PML)
def test_pml_downloads_what_the_user_asks_for_once(layout, address, tmp_path, monkeypatch):
    """Into a folder that may hold other files; a broken download leaves nothing of itself."""
    archive, info = pack(layout, tmp_path), IMAGE_DATASETS[SMALL[layout][0]]
    monkeypatch.setattr(PML[layout], "DOWNLOAD_URL", f"{address}/{archive.name}")
    (root := tmp_path / "data").mkdir()
    (root / "other.npz").touch()
    with pytest.raises(DatasetError, match=r"found no .*, or set data.download to true"):
        info.listing(root)
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=rf"{root}: \w+ cannot be downloaded \(.*; try again"):
        info.listing(root, fetch=True)
    assert sorted(path.name for path in root.iterdir()) == [".download.lock", "other.npz"]
    archive.write_bytes(whole)
    fetched = info.listing(root, fetch=True)
    assert rows(fetched) == rows(read(layout, tmp_path / "unpacked"))
    archive.unlink()
    assert rows(info.listing(root, fetch=True)) == rows(fetched)


@pytest.mark.parametrize("layout", FILES)
def test_an_index_file_that_cannot_be_read_is_named(layout, tmp_path):
    folder = SMALL[layout][1](tmp_path)
    for file in FILES[layout].split():
        whole = (folder / file).read_bytes()
        (folder / file).unlink()
        missing = rf"{file}.*: cannot be read .*No such file|found no .*{file}"
        with pytest.raises(DatasetError, match=missing):
            read(layout, tmp_path)
        (folder / file).write_bytes(b"<html><title>404 \xe9 Not Found</title></html>" * 10)
        with pytest.raises(DatasetError, match=rf"{file}(.*: cannot be read|, line 1: is not UTF)"):
            read(layout, tmp_path)
        (folder / file).write_bytes(whole)


def test_a_folder_without_the_dataset_is_named(tmp_path):
    for info in IMAGE_DATASETS.values():
        with pytest.raises(DatasetError, match=f"{tmp_path}: found no .*; name the folder"):
            info.read(tmp_path)
    inshop.write(tmp_path, images=["elsewhere"])
    with pytest.raises(DatasetError, match=r"found no Img/img or img or Img/img_highres"):
        read("img", tmp_path)
