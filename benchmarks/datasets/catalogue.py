"""The datasets of the four papers: what is known of them before they are there, and readers of their index files.

Imports nothing heavy, since every start reads the names in it.
"""

from pathlib import Path
from typing import Literal

from benchmarks.datasets import cars
from benchmarks.datasets.listing import DatasetInfo, Listing, find, read_lines, reading

DatasetName = Literal["glyphs", "cub", "cars", "sop", "inshop", "folder", "table"]
Augmentation = Literal["multi_resolution", "random_crop", "random_resized_crop", "none"]
Interpolation = Literal["bilinear", "bicubic", "lanczos"]


def read_cub(root: Path) -> Listing:
    """Read Caltech-UCSD Birds-200-2011: 11,788 photographs of 200 species of birds.

    The first 100 species train and the others test, as since Oh Song et al. (CVPR 2016). The paths in `images.txt`
    name the classes: 001.Black_footed_Albatross/...
    """
    folder, index = find(root, ["images.txt"])
    with reading(folder / index):
        paths = [path for _, path in map(str.split, read_lines(folder / index))]
        classes = [path.partition("/")[0] for path in paths]
        parts = ["train" if int(name.partition(".")[0]) <= 100 else "test" for name in classes]
    paths = [f"images/{path}" for path in paths]
    return Listing("cub", folder, "CUB_200_2011", paths, classes, parts)


def read_sop(root: Path) -> Listing:
    """Read Stanford Online Products: 120,053 photographs of 22,634 products from eBay offers."""
    folder, _ = find(root, ["Ebay_train.txt"])
    paths, classes, parts = [], [], []
    for part in ("train", "test"):
        with reading(file := folder / f"Ebay_{part}.txt"):
            for _, label, _, path in map(str.split, read_lines(file)[1:]):
                paths.append(path)
                classes.append(f"{int(label):05}")  # also sorted by number when sorted as text
                parts.append(part)
    return Listing("sop", folder, "Stanford_Online_Products", paths, classes, parts)


def read_inshop(root: Path) -> Listing:
    """Read In-Shop Clothes Retrieval of DeepFashion: 52,712 images of 7,982 items.

    `list_eval_partition.txt` gives for every image the item that it shows, and its part: train, query or gallery.

    The images come in two sizes with the same names below `img` and `img_highres`; the choice changes results. The
    benchmark's README describes `img`, centred and resized to 256 x 256, so `img` is read if both are there.
    """
    partition = "list_eval_partition.txt"
    folder, index = find(root, [f"Eval/{partition}", partition])
    above, images = find(folder, ["Img/img", "img", "Img/img_highres", "img_highres"])
    layout = (above / images).name
    with reading(folder / index):
        rows = map(str.split, read_lines(folder / index)[2:])
        names, items, parts = zip(*rows, strict=True)
    paths = [f"{layout}{name.removeprefix('img')}" for name in names]
    return Listing("inshop", (above / images).parent, layout, paths, items, parts)


_INSHOP = {"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)}
_PUBLISHED = (
    DatasetInfo("cub", read_cub, {"train": (5_864, 100), "test": (5_924, 100)}),
    DatasetInfo("cars", cars.read, {"train": (8_054, 98), "test": (8_131, 98)}),
    DatasetInfo("sop", read_sop, {"train": (59_551, 11_318), "test": (60_502, 11_316)}),
    DatasetInfo("inshop", read_inshop, _INSHOP),
)
IMAGE_DATASETS = {info.name: info for info in _PUBLISHED}
