"""Trees that look like Cars-196, in every layout in circulation; the devkit has the lists of its owners."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import savemat

from tests.support.fake_trees import write_pictures

CLASSES = 196

# Neither in the alphabet's order, as the owners' are not, nor all fit to name a folder.
CLASS_NAMES = [f"Maker {CLASSES - i:03d} Sedan 2012" for i in range(CLASSES)]
CLASS_NAMES[173] = "Ram C/V Cargo Van Minivan 2012"


@dataclass(frozen=True)
class Car:
    """One image: of the owners' folder "train" or "test", its number there, and its class; both from 1."""

    part: str
    number: int
    class_id: int

    @property
    def file(self) -> str:
        return f"{self.number:05d}.jpg"


def few_cars(class_ids: Sequence[int] = (1, 14, 98, 99, 174, 196)) -> list[Car]:
    """Two images of each class in each of the owners' two folders, in which classes alternate."""
    return [
        Car(part, number, class_id)
        for part in ("train", "test")
        for number, class_id in enumerate([*class_ids] * 2, start=1)
    ]


def write(root: Path, layout: str, cars: Sequence[Car] | None = None) -> Path:
    """Write a tree in one of `LAYOUTS`, by default of `few_cars`; returns its folder, root."""
    root.mkdir(parents=True, exist_ok=True)
    write_pictures(root, LAYOUTS[layout](root, few_cars() if cars is None else cars))
    return root


def _write_devkit(root: Path, cars: Sequence[Car]) -> list[str]:
    index = root / "devkit"
    index.mkdir()
    savemat(index / "cars_meta.mat", {"class_names": cells(CLASS_NAMES)})
    for part, place, labels in (("train", index, ""), ("test", root, "_withlabels")):
        rows = [{"class": car.class_id, "fname": car.file} for car in cars if car.part == part]
        savemat(place / f"cars_{part}_annos{labels}.mat", {"annotations": structs(rows)})
    names = [{"fname": row["fname"]} for row in rows]
    savemat(index / "cars_test_annos.mat", {"annotations": structs(names)})
    return [f"cars_{car.part}/{car.file}" for car in cars]


def _write_combined(root: Path, cars: Sequence[Car]) -> list[str]:
    """Write the combined layout in the order of the classes, like the real one."""
    cars = sorted(cars, key=lambda car: (car.class_id, car.part, car.number))
    paths = [f"car_ims/{number:06d}.jpg" for number in range(1, len(cars) + 1)]
    rows = [
        {"relative_im_path": path, "class": car.class_id}
        for path, car in zip(paths, cars, strict=True)
    ]
    savemat(
        root / "cars_annos.mat", {"annotations": structs(rows), "class_names": cells(CLASS_NAMES)}
    )
    return paths


def _write_kaggle(root: Path, cars: Sequence[Car]) -> list[str]:
    (root / "names.csv").write_text("".join(f"{name}\n" for name in CLASS_NAMES))
    lines = {"train": "", "test": ""}
    paths = []
    for car in cars:
        lines[car.part] += f"{car.file},39,116,569,375,{car.class_id}\n"
        name = CLASS_NAMES[car.class_id - 1].replace("/", "-")
        paths.append(f"car_data/car_data/{car.part}/{name}/{car.file}")
    for part, text in lines.items():
        (root / f"anno_{part}.csv").write_text(text)
    return paths


LAYOUTS = {"devkit": _write_devkit, "combined": _write_combined, "kaggle": _write_kaggle}


def structs(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """MATLAB's array of structs, (1, n)."""
    array = np.empty((1, len(rows)), dtype=[(field, object) for field in rows[0]])
    for column, row in enumerate(rows):
        array[0, column] = tuple(row.values())
    return array


def cells(names: Sequence[str]) -> np.ndarray:
    """MATLAB's cell array of strings, (1, n)."""
    array = np.empty((1, len(names)), dtype=object)
    array[0] = names
    return array
