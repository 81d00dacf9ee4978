"""Stanford Online Products: 120,053 photographs of 22,634 products from eBay offers.

Products 1-11,318 train and the others test. A product has few photographs, five on average.
"""

from pathlib import Path

from benchmarks.datasets.listing import (
    Archive,
    DatasetInfo,
    Listing,
    Part,
    find,
    read_lines,
    reading,
)


def read(root: Path) -> Listing:
    """List the images in the order of the index files, of the training part first.

    Raises:
        DatasetError: if an index file is missing or damaged.
    """
    folder, _ = find(root, ["Ebay_train.txt"])
    paths: list[str] = []
    classes: list[str] = []
    parts: list[Part] = []
    both: tuple[Part, ...] = ("train", "test")
    for part in both:
        with reading(file := folder / f"Ebay_{part}.txt"):
            for _, label, _, path in map(str.split, read_lines(file)[1:]):
                paths.append(path)
                classes.append(f"{int(label):05}")  # also sorted by number when sorted as text
                parts.append(part)
    return Listing("sop", folder, "Stanford_Online_Products", paths, classes, parts)


INFO = DatasetInfo(
    name="sop",
    read=read,
    counts={"train": (59_551, 11_318), "test": (60_502, 11_316)},
    archive=Archive(
        # Stanford's own server speaks FTP. The authors' copy, as PML's StanfordOnlineProducts fetches it.
        url=(
            "https://drive.usercontent.google.com/download"
            "?id=1TclrpQOF_ullUP99wk_gjGN8pKvtErG8&export=download&authuser=0&confirm=t"
        ),
        name="Stanford_Online_Products.zip",
        sha256="b04fa78210e69fab050ce73939550e1cd0f96890bdd98ec9fee732c3b756ef48",
    ),
)
