"""Datasets of PML: their lists of images, and their downloads."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.console.printing import reason
from benchmarks.datasets.listing import DatasetError

Images = list[tuple[str, int]]
"""Paths below a dataset's folder, and numbers of classes, from 1."""


def pml_images(dataset: str, folder: Path, *lists: str, archive: str | None = None) -> Images:
    """All images of a class of `pytorch_metric_learning.datasets`, in its order.

    Args:
        lists: Files that it reads, for the error.
        archive: The name that it expects of the folder.
    """
    from pytorch_metric_learning import datasets  # imports torch

    place = folder.absolute()
    if archive is not None and place.name != archive:
        place = place.resolve()  # a link may have any name
        if place.name != archive:
            raise DatasetError(f"{folder}: expected the name {archive}, as unpacked; rename it")
    root = place if archive is None else place.parent
    try:
        images = getattr(datasets, dataset)(str(root))
    except Exception as error:  # damaged lists make it raise almost any error
        raise DatasetError(
            f"{folder}: {' or '.join(lists)}: cannot be read ({type(error).__name__}: {reason(error)}); restore it"
        ) from error
    paths = [path.removeprefix(f"{place}/") for path in images.paths]
    return list(zip(paths, images.labels, strict=True))


def download(dataset: str, root: Path) -> None:
    """Download a dataset of PML into a folder: whole, or not at all."""
    from pytorch_metric_learning import datasets

    print(f"{root}: PML downloads {dataset} into it", file=sys.stderr)
    with TemporaryDirectory(prefix=".download-", dir=root) as folder:
        new = Path(folder, "new")
        try:
            getattr(datasets, dataset)(str(new), download=True)
        except Exception as error:  # of the network, the archive, the disk
            raise DatasetError(
                f"{root}: {dataset} cannot be downloaded ({type(error).__name__}: {reason(error)}); try again, "
                "or unpack the archive there by hand (docs/datasets.md)"
            ) from error
        for path in sorted(new.iterdir()):
            if (place := root / path.name).exists():
                raise DatasetError(f"{place}: is in the way of a download; name another data.root")
            path.rename(place)
