"""Stanford Online Products: 120,053 photographs of 22,634 products from eBay offers.

Products 1-11,318 train and the others test. A product has few photographs, five on average.
"""

from pathlib import Path
from typing import Literal

from benchmarks.datasets.listing import (
    Archive,
    DatasetInfo,
    Listing,
    find_folder,
    read_rows,
    reading,
)

FOLDER = "Stanford_Online_Products"
COLUMNS = 4  # image_id, class_id, super_class_id, path


def read(root: Path) -> Listing:
    """List the images in the order of their ids, whatever the order of the lines.

    Args:
        root: The folder `Stanford_Online_Products`, or one that holds it.

    Raises:
        DatasetError: if an index file is missing or damaged.
    """
    folder = find_folder(root, FOLDER, "Ebay_train.txt")
    images: dict[int, tuple[Literal["train", "test"], int, str]] = {}
    parts: tuple[Literal["train", "test"], ...] = ("train", "test")
    for part in parts:
        file = folder / f"Ebay_{part}.txt"
        with reading(file):
            for image, label, _, path in read_rows(file, COLUMNS, skip=1):
                images[int(image)] = part, int(label), path
    ordered = [images[image] for image in sorted(images)]
    return Listing(
        name="sop",
        root=folder,
        layout=FOLDER,
        paths=[path for _, _, path in ordered],
        classes=[f"{label:05}" for _, label, _ in ordered],  # also when sorted as text
        parts=[part for part, _, _ in ordered],
    )


INFO = DatasetInfo(
    name="sop",
    title="Stanford Online Products",
    read=read,
    counts={"train": (59_551, 11_318), "test": (60_502, 11_316)},
    layouts=[
        "Stanford_Online_Products/Ebay_train.txt, Ebay_test.txt, bicycle_final/*.JPG and eleven more such folders"
    ],
    archive=Archive(
        # Stanford's own server speaks FTP. The authors' copy, as PML's StanfordOnlineProducts fetches it.
        url=(
            "https://drive.usercontent.google.com/download"
            "?id=1TclrpQOF_ullUP99wk_gjGN8pKvtErG8&export=download&authuser=0&confirm=t"
        ),
        name="Stanford_Online_Products.zip",
        size=3_083_860_082,
        sha256="b04fa78210e69fab050ce73939550e1cd0f96890bdd98ec9fee732c3b756ef48",
    ),
    licence="Not stated by its owners; the photographs were shown at eBay and belong to their authors.",
    citation=(
        "H. Oh Song, Y. Xiang, S. Jegelka, S. Savarese: Deep Metric Learning via Lifted Structured Feature "
        "Embedding. CVPR 2016."
    ),
)
