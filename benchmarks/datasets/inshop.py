"""In-Shop Clothes Retrieval of DeepFashion: 52,712 images of 7,982 items.

`list_eval_partition.txt` gives for every image the item that it shows, and its part: train, query or gallery.
Queries are searched in the gallery. No item both trains and tests, and queries and gallery have the same items.

The images come in two sizes with the same names below `img` and `img_highres`; the choice changes results. The
benchmark's README describes `img`, centred and resized to 256 x 256, so `img` is read if both are there. To read
the other, name the folder `img_highres` itself as the root.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from benchmarks.datasets.listing import DatasetInfo, Listing, Part, find, read_lines, reading

LAYOUTS = ("img", "img_highres")  # names of folders
PARTITION = "list_eval_partition.txt"
COLUMNS = ["image_name", "item_id", "evaluation_status"]


def read(root: Path) -> Listing:
    """List the images in a folder.

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
    folder, marker = find(root, [f"Eval/{PARTITION}", PARTITION], _is_ours)
    choices = [f"{above}{layout}" for layout in layouts for above in ("Img/", "")]
    above, images = find(folder, choices, Path.is_dir)
    place, layout = (above / images).parent, (above / images).name
    with reading(folder / marker):
        rows = map(str.split, read_lines(folder / marker)[2:])
        names, items, statuses = zip(*rows, strict=True)
    return Listing(
        name="inshop",
        root=place,
        layout=layout,
        paths=[f"{layout}{name.removeprefix('img')}" for name in names],
        classes=items,
        parts=cast(Sequence[Part], statuses),
    )


def _is_ours(partition: Path) -> bool:
    """True if the file is In-Shop's: DeepFashion's other benchmarks and CelebA have files of the same name."""
    return partition.is_file() and "".join(read_lines(partition)[1:2]).split() == COLUMNS


INFO = DatasetInfo(
    name="inshop",
    read=read,
    counts={"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)},
    by_hand="""\
The owners hand it out by Google Drive, and the password of the larger images on request:
https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html. Put into data.root:

- Eval/list_eval_partition.txt;
- Img/img.zip, unpacked to Img/img (or Img/img_highres.zip, unpacked to Img/img_highres).""",
)
