"""Settings of the images and batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.datasets.catalogue import Augmentation, DatasetName, Interpolation
from benchmarks.datasets.splits import Stage
from benchmarks.settings.errors import idle
from benchmarks.settings.types import AtLeast2, NonNegativeInt, Pixels, PositiveInt, Rate

VIEWS = ("resize", "keep_aspect", "augmentation", "interpolation")
"""Settings of `ImageViews` whose default is there or comes from the trunk."""


@dataclass
class Data:
    """Images and batches.

    Args:
        dataset: Name of the dataset; "folder" is one of your own, ROOT/CLASS/IMAGE at any depth, and "table" one
            that a table describes.
        root: Folder of the dataset, or of its cache.
        download: Only for "cub", "cars" and "sop": let PML download the dataset into the root if it is not there,
            which binds you to its owners' terms.
        table: Only for "table": a CSV or Parquet file with a row for each image, whose columns docs/datasets.md
            describes. Paths in it start from the root.
        split: Classes to test on: the "test" classes, after training on all training classes, or a
            "validation" part of the training classes, after training on the others; "all" trains on all
            classes, for use, and tests on the same ones.
        fold: Which part of the training classes is "validation".
        folds: Number of parts; a stage has its own.
        stage: Only for Glyphs: "pretraining" trains on 750 of the training classes, unperturbed, and validates on
            the others; "fine_tuning" trains on 100 of those others, drawn for each seed and fold, and validates
            on the rest. Default: by folds.
        test_classes: Only for "folder", and a "table" without a column `split`: a file that names the test classes,
            one per line, or their fraction of all classes. Default: half of them.
        known_classes: Only for "table": allow test classes that are also trained on, by other photographs.
        camera: Only for "table": the column of the cameras. Images of a query's class and camera leave its ranking,
            as in re-identification (Market-1501, VeRi). An empty cell is no camera.
        sequence: Only for "table": the column of the sequences, or sessions. All images of a query's sequence leave
            its ranking, of any class. An empty cell is no sequence.
        class_level: Only for "folder": the first so many folders of an image's path below the root are its class,
            or the "last" one alone. Default: all of them, so that each folder that holds images is a class.
        image_size: Pixels per side of the image that the network sees; default: 32 for Glyphs, else the trunk's
            own size.
        resize: Pixels per side of the whole image before it is cropped; default: see
            `benchmarks.datasets.transforms.ImageViews`, as for the augmentation.
        keep_aspect: Resize by the shorter side and keep the aspect; default: as the trunk was trained.
        augmentation: How training views are cropped.
        interpolation: Filter for resizing; default: the trunk's.
        batch_size: Images per step, over all processes.
        samples_per_class: Images per class in a batch; null: plain shuffled batches of any classes.
        every_class: Show every class once before any is shown again, as papers that count epochs do. Default: as
            PML, which draws the classes of each batch independently.
        batch_draw: Draw other batches of the same seed, 1 for the first such draw and so on. All else that the
            seed decides stays as it is: two runs that differ only here show how much a result varies by chance.
        train_classes: Train on at most this many classes, the first ones; default: all. CUB and Cars have few
            (100 and 98), which a network overfits.
        draw_classes: Let the run's seed draw these classes, from all classes that may train.
        max_classes: Train and test on only the first classes, for a quick trial; default: all.
        cached_views: Train on this many fixed views of each image, drawn from the run's seed: the outputs of the
            frozen stages (`Model.frozen_stages`) for them are computed once and kept in `cache`. Default: a new
            view each time.
        cache: Folder of these outputs; runs of one seed share them, and you may delete it after the training.
        cache_gib: Most GiB that they may take on the disk for one run.
        decoded_gib: Decode all photographs once, in at most so many GiB, and cut their views on the training's GPU,
            or without one in its process: for images that workers read more slowly than the network learns from
            them. A view shows the same as before; on a GPU few of its pixels differ, by rounding (by
            clipping, too, under bicubic and Lanczos filters). Default: read and
            decode an image whenever it is shown.
        num_workers: Data-loader processes for each training process; 0 loads in the process itself. Default: 0 for
            Glyphs and decoded images, else one for each processor, up to 8.
    """

    dataset: DatasetName = "glyphs"
    root: Path = Path("data")
    download: bool | None = None
    table: Path | None = None
    split: Literal["test", "validation", "all"] = "test"
    fold: NonNegativeInt = 0
    folds: AtLeast2 = 4
    stage: Stage | None = None
    test_classes: float | Path | None = None
    known_classes: bool | None = None
    camera: str | None = None
    sequence: str | None = None
    class_level: PositiveInt | Literal["last"] | None = None
    image_size: Pixels | None = None
    resize: PositiveInt | None = None
    keep_aspect: bool | None = None
    augmentation: Augmentation | None = None
    interpolation: Interpolation | None = None
    batch_size: AtLeast2 = 80
    samples_per_class: PositiveInt | None = 4
    every_class: bool = False
    batch_draw: PositiveInt | None = None
    train_classes: AtLeast2 | None = None
    draw_classes: bool | None = None
    max_classes: AtLeast2 | None = None
    cached_views: PositiveInt | None = None
    cache: Path = Path("cache")
    cache_gib: Rate = 8
    decoded_gib: Rate | None = None
    num_workers: NonNegativeInt | None = None

    def faults(self) -> Iterator[str]:
        """Lines on settings that do not go together."""
        name, downloads, own = self.dataset, ("cub", "cars", "sop"), ("folder", "table")
        of_table = ["table", "known_classes", "camera", "sequence"]
        stage = f"data.stage {self.stage} has its own classes to train and to validate on"
        shuffled = "shuffled batches (data.samples_per_class: null) have no passes over classes"
        published = (
            f"{name} has its published classes and split, as all except a folder and a table"
        )
        drawn = "draws as many classes as data.train_classes, which is not set"
        once = "data.cached_views needs no image twice"
        yield from idle(
            *("data", self),
            (name == "glyphs", VIEWS, "Glyphs has its own perturbation"),
            (name == "glyphs", ["decoded_gib"], "Glyphs are in memory as they are"),
            (self.cached_views is not None, ["decoded_gib"], once),
            (name != "glyphs", ["stage"], f"{name} has no stages"),
            (name not in own, ["test_classes"], published),
            (name not in downloads, ["download"], f"PML downloads no {name}"),
            (name != "folder", ["class_level"], f"{name} names its classes"),
            (name != "table", of_table, f"{name} has no table"),
            (self.stage is not None, ["folds", "draw_classes"], stage),
            (self.train_classes is None, ["draw_classes"], drawn),
            (self.samples_per_class is None, ["every_class"], shuffled),
        )
        if self.dataset == "table" and self.table is None:
            yield "data.table: expected the table's file, as data.dataset is table, got none"
        if self.fold >= self.folds:
            yield f"data.fold: expected 0 to {self.folds - 1}, one of data.folds ({self.folds}), got {self.fold}"
        excess = self.batch_size % (self.samples_per_class or 1)
        if excess:
            yield (
                f"data.batch_size: expected a multiple of data.samples_per_class ({self.samples_per_class}), got "
                f"{self.batch_size}; {self.batch_size - excess + self.samples_per_class} fits"
            )

    @property
    def in_chans(self) -> int:
        """Channels of an image."""
        return 1 if self.dataset == "glyphs" else 3


def num_workers(data: Data, processes: int) -> int:
    """Data-loader processes of each of the training processes of this machine."""
    if data.num_workers is not None:
        return int(data.num_workers)
    if data.dataset == "glyphs" or data.decoded_gib is not None:
        return 0
    import joblib  # imported late, for a quick start

    return min(8, int(joblib.cpu_count()) // processes)
