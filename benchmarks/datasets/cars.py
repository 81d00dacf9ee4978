"""Reader of Cars-196: 16,185 photographs of 196 models of cars, in each layout that is in circulation.

PML reads the layout that it downloads from Kaggle; the owners' two are read here. For classification, the owners
split the images of every class into a training and a test folder. For retrieval, both folders are read and the
classes are split: 1-98 train, 99-196 test (Oh Song et al., CVPR 2016). A class is named by its id and name ("014
Audi TTS Coupe 2012"), so that sorted names follow the ids.
"""

from pathlib import Path
from typing import Any

from benchmarks.datasets.listing import Listing, find, read_lines, reading
from benchmarks.datasets.pml_datasets import Images, pml_images


def read(root: Path) -> Listing:
    """List the images in a folder. Of several layouts the first of `LAYOUTS` is read: the owners' own."""
    folder, marker = find(root, LAYOUTS)
    layout, read_layout = LAYOUTS[marker]
    images, names = read_layout(folder)
    with reading(folder):
        classes = [f"{class_id:03d} {names[class_id - 1]}" for _, class_id in images]
    paths = [path for path, _ in images]
    parts = ["train" if class_id <= 98 else "test" for _, class_id in images]
    return Listing("cars", folder, layout, paths, classes, parts)


def _devkit(folder: Path) -> tuple[Images, list[str]]:
    """Read the owners' annotations, with a file and a folder of images for each of their parts."""
    index = folder / "devkit"
    images = _annotated(index / "cars_train_annos.mat", "fname", "cars_train/")
    # A download of its own: the devkit's list of these images has no classes.
    images += _annotated(folder / "cars_test_annos_withlabels.mat", "fname", "cars_test/")
    return images, list(_variable(index / "cars_meta.mat", "class_names"))


def _combined(folder: Path) -> tuple[Images, list[str]]:
    file = folder / "cars_annos.mat"
    return _annotated(file, "relative_im_path"), list(_variable(file, "class_names"))


def _kaggle(folder: Path) -> tuple[Images, list[str]]:
    """Read what PML downloads; its names of folders have no "/"."""
    names = [name.strip() for name in read_lines(folder / "names.csv")]
    return pml_images("Cars196", folder, "anno_train.csv", "anno_test.csv"), names


LAYOUTS = {
    "cars_train": ("devkit", _devkit),
    "car_ims": ("combined", _combined),
    "car_data": ("kaggle", _kaggle),
}
"""By the folder that only this layout has."""


def _annotated(file: Path, name_field: str, above: str = "") -> Images:
    """Read the paths and classes of a .mat file's structs `annotations`."""
    with reading(file):
        annotations = _variable(file, "annotations")
        rows = zip(annotations[name_field], annotations["class"], strict=True)
        return [(f"{above}{name}", int(class_id)) for name, class_id in rows]


def _variable(file: Path, name: str) -> Any:
    """A variable of a .mat file, without the dimensions of length one that MATLAB gives to every scalar."""
    from scipy.io import loadmat  # takes a while to import

    # SciPy would not say that a file is missing; `squeeze_me` turns a single row into a scalar.
    with reading(file), file.open("rb") as opened:
        return loadmat(opened, variable_names=[name], squeeze_me=True)[name].reshape(-1)
