"""Trees that look like Cars-196, in every layout in circulation; the devkit has the lists of its owners."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import savemat

from tests.support.fake_trees import spread, write_pictures

LAYOUTS = ("devkit", "combined", "kaggle")
CLASSES = 196

# Neither in the alphabet's order, as the owners' are not, nor all fit to name a folder.
CLASS_NAMES = [f"Maker {CLASSES - i:03d} Sedan 2012" for i in range(CLASSES)]
CLASS_NAMES[173] = "Ram C/V Cargo Van Minivan 2012"

BOX = {"bbox_x1": 39, "bbox_y1": 116, "bbox_x2": 569, "bbox_y2": 375}


@dataclass(frozen=True)
class Car:
    """One image.

    Args:
        part: Of the owners' two folders, "train" or "test".
        number: Within that folder, from 1.
        class_id: From 1.
    """

    part: str
    number: int
    class_id: int

    @property
    def file(self) -> str:
        return f"{self.number:05d}.jpg"


def few_cars(class_ids: Sequence[int] = (1, 14, 98, 99, 174, 196), of_each: int = 2) -> list[Car]:
    """Equally many images of each class in each of the owners' two folders, in which classes alternate."""
    ids = [*class_ids] * of_each
    return [
        Car(part, number, class_id)
        for part in ("train", "test")
        for number, class_id in enumerate(ids, start=1)
    ]


def all_cars() -> list[Car]:
    """The published numbers of images: 8,144 and 8,041 in the owners' folders, 8,054 and 8,131 by classes."""
    sizes = spread(8_054, range(1, 99)) | spread(8_131, range(99, 197))
    ids = [class_id for class_id, size in sizes.items() for _ in range(size)]
    ids = ids[::2] + ids[1::2]  # both folders have images of all classes
    parts = {"train": ids[:8_144], "test": ids[8_144:]}
    return [
        Car(part, number, class_id)
        for part, of_part in parts.items()
        for number, class_id in enumerate(of_part, start=1)
    ]


def write(
    root: Path, layout: str, cars: Sequence[Car] | None = None, *, pictures: bool = True
) -> Path:
    """Write a tree in one of `LAYOUTS`, by default of `few_cars`; returns its folder, root."""
    cars = few_cars() if cars is None else cars
    images = _WRITERS[layout](root, cars)
    for folder in {(root / image).parent for image in images}:
        folder.mkdir(parents=True, exist_ok=True)
    if pictures:
        write_pictures(root, images)
    return root


def _write_devkit(root: Path, cars: Sequence[Car]) -> list[str]:
    index = root / "devkit"
    index.mkdir(parents=True)
    save(index / "cars_meta.mat", class_names=cells(CLASS_NAMES))
    for part, place, labels in (("train", index, ""), ("test", root, "_withlabels")):
        rows = [
            BOX | {"class": car.class_id, "fname": car.file} for car in cars if car.part == part
        ]
        save(place / f"cars_{part}_annos{labels}.mat", annotations=structs(rows))
    for row in rows:
        del row["class"]
    save(index / "cars_test_annos.mat", annotations=structs(rows))
    return [f"cars_{car.part}/{car.file}" for car in cars]


def _write_combined(root: Path, cars: Sequence[Car]) -> list[str]:
    """Write the combined layout in the order of the classes, like the real one."""
    root.mkdir(parents=True, exist_ok=True)
    cars = sorted(cars, key=lambda car: (car.class_id, car.part, car.number))
    rows = [
        {
            "relative_im_path": f"car_ims/{number:06d}.jpg",
            "class": car.class_id,
            "test": int(car.part == "test"),
        }
        for number, car in enumerate(cars, start=1)
    ]
    save(root / "cars_annos.mat", annotations=structs(rows), class_names=cells(CLASS_NAMES))
    return [row["relative_im_path"] for row in rows]


def _write_kaggle(root: Path, cars: Sequence[Car]) -> list[str]:
    root.mkdir(parents=True, exist_ok=True)
    (root / "names.csv").write_text("".join(f"{name}\n" for name in CLASS_NAMES))
    for part in ("train", "test"):
        lines = [
            f"{','.join(map(str, [car.file, *BOX.values(), car.class_id]))}\n"
            for car in cars
            if car.part == part
        ]
        (root / f"anno_{part}.csv").write_text("".join(lines))
    return [
        f"car_data/car_data/{car.part}/{CLASS_NAMES[car.class_id - 1].replace('/', '-')}/{car.file}"
        for car in cars
    ]


_WRITERS: dict[str, Callable[[Path, Sequence[Car]], list[str]]] = {
    "devkit": _write_devkit,
    "combined": _write_combined,
    "kaggle": _write_kaggle,
}


def structs(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """MATLAB's array of structs: (1, n), every number in it an array of its own, (1, 1), of 8 bits if it fits."""
    array = np.empty((1, len(rows)), dtype=[(field, object) for field in rows[0]])
    for column, row in enumerate(rows):
        array[0, column] = tuple(
            value
            if isinstance(value, str)
            else np.array([[value]], dtype=np.uint8 if value < 256 else np.uint16)
            for value in row.values()
        )
    return array


def cells(names: Sequence[str]) -> np.ndarray:
    """MATLAB's cell array of strings, (1, n)."""
    array = np.empty((1, len(names)), dtype=object)
    array[0] = names
    return array


def save(path: Path, **variables: np.ndarray) -> None:
    savemat(path, variables, do_compression=True)
