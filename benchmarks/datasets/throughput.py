"""Images per second of a training pipeline, beside those of a bare Pillow loop over the same files.

    python -m benchmarks.datasets.throughput NAME --data.root DIR
    python -m benchmarks.datasets.throughput --synthetic

The bare loop opens, decodes and resizes one file after the other in one process and does nothing else; the pipeline
is the runner's, with data-loader workers. Both read files that the operating system has cached, in turns, and the
fastest of their passes counts: the ratio says what the pipeline adds and how well it uses the cores.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import joblib
import numpy as np
from PIL import Image
from torch.utils.data import DataLoader

from benchmarks.command_line import at_least
from benchmarks.datasets import IMAGE_DATASETS
from benchmarks.datasets.images import ImageSet
from benchmarks.datasets.listing import DatasetError, Listing, load
from benchmarks.datasets.transforms import Augmentation, ImageViews

BATCH_SIZE = 32
PASSES = 4  # of each loop
SYNTHETIC_SIZE = (500, 375)  # the usual one in CUB-200-2011


@dataclass(frozen=True)
class Throughput:
    """Images per second.

    Args:
        bare: Of the Pillow loop.
        pipeline: Of the training views.
    """

    bare: float
    pipeline: float


def measure(dataset: ImageSet, rows: Sequence[int], num_workers: int) -> Throughput:
    """Read images in both ways, by turns, after each image was read once.

    Args:
        rows: Which images of the dataset.
        num_workers: Data-loader processes; 0 loads in this one.

    Raises:
        DatasetError: if one of them cannot be read.
    """
    paths = [dataset.listing.root / dataset.name(row) for row in rows]
    size = (dataset.views.image_size, dataset.views.image_size)
    loader = DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        sampler=[(row, 0) for row in rows],
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )

    def bare() -> None:
        for path in paths:
            with Image.open(path) as file:
                file.convert("RGB").resize(size)

    def pipeline() -> None:
        for _ in loader:
            pass

    for row in rows:  # the system caches the files; one that cannot be decoded stops here
        dataset[row]
    pipeline()  # the workers start
    seconds = [(_seconds(bare), _seconds(pipeline)) for _ in range(PASSES)]
    return Throughput(*(len(rows) / np.min(seconds, axis=0)).tolist())


def _seconds(loop: Callable[[], None]) -> float:
    start = time.perf_counter()
    loop()
    return time.perf_counter() - start


def write_synthetic(root: Path, images: int) -> Listing:
    """JPEG files with the contours and the grain of photographs, about 60 kB each."""
    generator = np.random.default_rng(0)
    width, height = SYNTHETIC_SIZE
    paths = [f"{number:05}.jpg" for number in range(images)]
    for path in paths:
        shapes = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        pixels = np.asarray(shapes.resize(SYNTHETIC_SIZE)).astype(np.int16)
        pixels += generator.integers(-12, 13, (height, width, 3), dtype=np.int16)
        picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        picture.save(root / path, quality=90)
    return Listing("synthetic", root, "", paths, ["none"] * images, ["train"] * images)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; as argparse does, SystemExit for a usage error."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.synthetic and options.root is None:
        parser.error("--data.root: expected the folder of the dataset")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            if options.synthetic:
                listing = write_synthetic(Path(temporary), options.images)
            else:
                listing = load(IMAGE_DATASETS[options.name], options.root)
            show(listing, options)
        except (DatasetError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def show(listing: Listing, options: argparse.Namespace) -> None:
    """Measure and print."""
    views = ImageViews(
        image_size=options.image_size,
        augmentation=options.augmentation,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
    dataset = ImageSet(listing, "train", views=views)
    count = min(options.images, len(dataset))
    rows = np.linspace(0, len(dataset) - 1, count).round().astype(int).tolist()
    rates = measure(dataset, rows, options.num_workers)

    size = f"{views.image_size} x {views.image_size}"
    workers = f"{options.num_workers} workers on {joblib.cpu_count()} cores"
    table = (
        ("dataset", listing.name, f"{count} images"),
        ("Pillow loop", f"{rates.bare:.1f} images/s", f"open, decode, resize to {size}; 1 process"),
        ("pipeline", f"{rates.pipeline:.1f} images/s", f"{views.augmentation}; {workers}"),
        ("ratio", f"{rates.pipeline / rates.bare:.2f}", "pipeline / Pillow loop"),
    )
    for name, value, detail in table:
        print(f"{name:<12} {value:>16}   {detail}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.datasets.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("name", nargs="?", choices=IMAGE_DATASETS)
    source.add_argument("--synthetic", action="store_true", help="generated files instead")
    parser.add_argument("--data.root", dest="root", type=Path, metavar="DIR", help="where it lies")
    parser.add_argument(
        "--images", type=at_least(1), default=512, metavar="M", help="how many, spread evenly"
    )
    parser.add_argument(
        "--image_size", type=at_least(1), default=224, metavar="S", help="of a view"
    )
    parser.add_argument(
        "--num_workers",
        type=at_least(0),
        default=joblib.cpu_count(),
        metavar="N",
        help="default: one per core that this process may use; 0 loads in the process itself",
    )
    parser.add_argument(
        "--augmentation", choices=get_args(Augmentation), default="random_resized_crop"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
