"""Caltech-UCSD Birds-200-2011: 11,788 photographs of 200 species of birds.

The first 100 species train and the others test, as in the papers on metric learning since Oh Song et al. (CVPR
2016). The archive's own `train_test_split.txt` divides the images of every species and is not used here.
"""

from pathlib import Path

from benchmarks.datasets.listing import Archive, DatasetInfo, Listing, find, read_lines, reading

LAST_TRAINING_CLASS = 100


def read(root: Path) -> Listing:
    """List the images in the order of `images.txt`, whose paths name the classes: 001.Black_footed_Albatross/...

    Raises:
        DatasetError: if `images.txt` is missing or damaged.
    """
    folder, index = find(root, ["images.txt"])
    with reading(folder / index):
        paths = [path for _, path in map(str.split, read_lines(folder / index))]
        classes = [path.partition("/")[0] for path in paths]
        numbers = [int(name.partition(".")[0]) for name in classes]
    return Listing(
        name="cub",
        root=folder,
        layout="CUB_200_2011",
        paths=[f"images/{path}" for path in paths],
        classes=classes,
        parts=["train" if number <= LAST_TRAINING_CLASS else "test" for number in numbers],
    )


INFO = DatasetInfo(
    name="cub",
    read=read,
    counts={"train": (5_864, 100), "test": (5_924, 100)},
    archive=Archive(
        url="https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
        name="CUB_200_2011.tgz",
        sha256="0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
    ),
)
