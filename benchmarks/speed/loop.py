"""Measures the runner's images per second beside those of a bare loop in plain torch over the same batches.

    python -m benchmarks.speed.loop [--recipe PAPER/TABLE/ROW] [--rounds R] [--steps N] [--any.setting value]
    python -m benchmarks.speed.loop --synthetic M --recipe images/resnet50/binomial --model.trunk_args {}

The runner trains and records as usual, and pauses at every N-th step, where it would draw a point of its curves.
Then the bare loop takes N steps with the same network, loss, optimizer and scheduler. It reads the same images with
a plain `DataLoader` that has as many workers and knows all batches beforehand. While one loop runs, the workers of
the other fetch some batches ahead. The first turns do not count; evaluations and checkpoints are left out.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.console import HelpFormatter, at_least, columns

RECIPE = "glyphs/compare/binomial_horde"

SYNTHETIC_CLASSES = 40  # half of them train


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options, settings = parser.parse_known_args(argv)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        parser.error("the bare loop runs on one process; start this without a launcher")

    from benchmarks.console import workers_dismissed  # not for --help
    from benchmarks.datasets import DatasetError
    from benchmarks.run import BenchmarkRun
    from benchmarks.settings import ConfigError, parse
    from benchmarks.speed.turns import check, measure
    from benchmarks.training import NonFiniteLossError, start

    with workers_dismissed(), tempfile.TemporaryDirectory() as temporary:
        if options.synthetic is not None:
            root = Path(temporary) / "images"
            write_synthetic(root, options.synthetic)
            settings += ["--data.dataset=folder", f"--data.root={root}"]
        steps = options.steps * (options.rounds + 1)
        settings = [
            f"--recipe={options.recipe}",
            *settings,
            f"--output={Path(temporary) / 'run'}",
            f"--optimization.steps={steps}",
            f"--evaluation.every={options.steps}",
            f"--checkpoint_every={steps}",
            *("--protocol=paper", "--diagnose_every=0", "--trackers=[]", "--report=false"),
            *("--evaluation.descriptor=false", "--evaluation.parts=null"),  # nothing is tested
        ]
        try:
            command = parse(settings)
            check(command.experiment)
            run = BenchmarkRun(command, settings, start(command.experiment))
            with closing(run.record):
                turns = measure(run, options.steps)
        except (ConfigError, NonFiniteLossError, DatasetError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        if run.state.progress.stopped_by is not None:
            return 128 + run.state.progress.stopped_by
        recipe = "recipe", options.recipe, f"{run.sampler.batch_size} images a step"
        workers = "workers", str(run.num_workers), ""
        print(columns([recipe, workers, *turns.rows(run.sampler.batch_size)]))
    return 0


def write_synthetic(root: Path, images: int) -> None:
    """Write JPEG files with the contours and the grain of photographs, about 60 kB each, one folder per class."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(-(-images // SYNTHETIC_CLASSES) * SYNTHETIC_CLASSES):
        shapes = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        pixels = np.asarray(shapes.resize((500, 375))).astype(np.int16)  # CUB-200-2011's usual size
        pixels += generator.integers(-12, 13, pixels.shape, dtype=np.int16)
        path = root / f"{number % SYNTHETIC_CLASSES:02}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.loop",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", default=RECIPE, help="default: %(default)s")
    parser.add_argument("--rounds", type=at_least(1), default=7, metavar="R", help="default: 7")
    text = "steps of a turn; default: 40"
    parser.add_argument("--steps", type=at_least(1), default=40, metavar="N", help=text)
    text = "train on M generated JPEG files of 500 x 375 pixels"
    parser.add_argument("--synthetic", type=at_least(1), metavar="M", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
