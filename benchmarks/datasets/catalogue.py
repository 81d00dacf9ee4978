"""Names of the datasets and of their settings' choices. Imports nothing heavy, since every start reads it."""

from typing import Literal

from benchmarks.datasets import cars, cub, inshop, sop
from benchmarks.datasets.listing import DatasetInfo

DatasetName = Literal["glyphs", "cub", "cars", "sop", "inshop", "folder"]
Augmentation = Literal["multi_resolution", "random_crop", "random_resized_crop", "none"]
Interpolation = Literal["bilinear", "bicubic", "lanczos"]

IMAGE_DATASETS: dict[str, DatasetInfo] = {
    info.name: info for info in (cub.INFO, cars.INFO, sop.INFO, inshop.INFO)
}
