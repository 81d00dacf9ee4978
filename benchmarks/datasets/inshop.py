"""In-Shop Clothes Retrieval of DeepFashion: 52,712 images of 7,982 items.

Ziwei Liu, Ping Luo, Shi Qiu, Xiaogang Wang and Xiaoou Tang, "DeepFashion: Powering Robust Clothes Recognition and
Retrieval with Rich Annotations", CVPR 2016. Its `list_eval_partition.txt` gives for every image the item that it
shows, and its part: train, query or gallery. Queries are searched in the gallery. No item both trains and tests,
and queries and gallery have the same items.

The images come in two sizes with the same names below `img` and `img_highres`; the choice changes results. The
benchmark's README describes `img`, centred and resized to 256 x 256, so `img` is read if both are there. To read
the other, name the folder `img_highres` itself as the root.

Boxes are in pixels of `img`, so `img_highres` has none. Their corners are used unchanged: the README does not say
whether they count from 0 or 1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from benchmarks.datasets.listing import (
    Box,
    DatasetError,
    DatasetInfo,
    Listing,
    Part,
    folders_below,
    read_lines,
    read_rows,
    reading,
)

LAYOUTS = ("img", "img_highres")  # names of folders
PARTITION = "list_eval_partition.txt"
COLUMNS = ["image_name", "item_id", "evaluation_status"]
BOXES = "list_bbox_inshop.txt"


def read(root: Path) -> Listing:
    """List the images in a folder, or in the first of its folders that has them.

    Args:
        root: The folder of the benchmark, or one above it; or its folder `img` or `img_highres`.

    Raises:
        DatasetError: if there are no images; or, naming the index file, for one that is missing or wrong.
    """
    layouts: Sequence[str] = LAYOUTS
    root = root.absolute()
    if root.name in LAYOUTS:
        layouts = [root.name]
        root = root.parent.parent if root.parent.name == "Img" else root.parent
    for folder in folders_below(root):
        for partition in (folder / "Eval" / PARTITION, folder / PARTITION):
            if _is_ours(partition):
                return _read(folder, partition, layouts)
    raise DatasetError(
        f"{root}: found no {PARTITION} with the columns {', '.join(COLUMNS)}, here, in Eval "
        "or in the folders here; name the folder that holds Eval"
    )


def _is_ours(partition: Path) -> bool:
    """True if the file is In-Shop's: DeepFashion's other benchmarks and CelebA have files of the same name."""
    return partition.is_file() and "".join(read_lines(partition)[1:2]).split() == COLUMNS


def _read(folder: Path, partition: Path, layouts: Sequence[str]) -> Listing:
    places = [
        (layout, place)
        for layout in layouts
        for place in (folder / "Img", folder)
        if (place / layout).is_dir()
    ]
    if not places:
        raise DatasetError(
            f"{folder}: found no folder {' or '.join(layouts)}, here or in Img; unpack the images there"
        )
    layout, place = places[0]
    with reading(partition):
        names, items, statuses = zip(*read_rows(partition, len(COLUMNS), skip=2), strict=True)
    return Listing(
        name="inshop",
        root=place,
        layout=layout,
        paths=[f"{layout}{name.removeprefix('img')}" for name in names],
        classes=items,
        parts=cast(Sequence[Part], statuses),
        boxes=_boxes(folder, names) if layout == "img" else None,
    )


def _boxes(folder: Path, names: Sequence[str]) -> list[Box] | None:
    """The box of each named image; None if there is no file of boxes."""
    for path in (folder / "Anno" / BOXES, folder / BOXES):
        if path.is_file():
            with reading(path):
                rows = read_rows(path, 7, skip=2)
                boxes = {name: tuple(map(int, corners)) for name, _, _, *corners in rows}
                return [cast(Box, boxes[name]) for name in names]
    return None


INFO = DatasetInfo(
    name="inshop",
    title="In-Shop Clothes Retrieval (DeepFashion)",
    read=read,
    counts={"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)},
    layouts=(
        "img: Eval/list_eval_partition.txt, Anno/list_bbox_inshop.txt, Img/img/WOMEN/..., or all side by side",
        "img_highres: the same with Img/img_highres/WOMEN/..., without boxes",
    ),
    by_hand="""\
The owners hand it out by Google Drive, and the password of the larger images on request:
https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html. Put into data.root:

- Eval/list_eval_partition.txt;
- Img/img.zip, unpacked to Img/img (or Img/img_highres.zip, unpacked to Img/img_highres);
- Anno/list_bbox_inshop.txt, if you need bounding boxes.""",
    licence="For non-commercial research and education only; its owners do not own the images.",
    citation="Ziwei Liu, Ping Luo, Shi Qiu, Xiaogang Wang and Xiaoou Tang, "
    '"DeepFashion: Powering Robust Clothes Recognition and Retrieval with Rich Annotations", CVPR, 2016',
)
