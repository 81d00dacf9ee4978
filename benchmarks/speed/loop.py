"""Measures the runner's images per second beside those of a bare loop in plain torch over the same batches.

    python -m benchmarks.speed.loop [--recipe PAPER/TABLE/ROW] [--rounds R] [--steps N] [--any.setting value]
    python -m benchmarks.speed.loop --synthetic M --recipe images/resnet50/binomial --model.trunk_args {} \\
        --model.batch_norm train

The runner trains and records as usual, and pauses at every N-th step, where it would draw a point of its curves.
Then the bare loop takes N steps with the same network, loss, optimizer and scheduler. It reads the same images with
a plain `DataLoader` that has as many workers and knows all batches beforehand. While one loop runs, the workers of
the other fetch some batches ahead. The first turns do not count; evaluations and checkpoints are left out.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import building
from benchmarks.console import at_least, command_parser, ignore_signals, workers_dismissed
from benchmarks.datasets import DatasetError
from benchmarks.records import NonFiniteError
from benchmarks.run import OngoingRun
from benchmarks.settings import ConfigError, parse
from benchmarks.speed.measuring import synchronize, table
from benchmarks.training import start

RECIPE = "glyphs/compare/binomial_horde"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("speed.loop", __doc__)
    parser.add_argument("--recipe", default=RECIPE, help="default: %(default)s")
    parser.add_argument("--rounds", type=at_least(1), default=7, metavar="R", help="default: 7")
    parser.add_argument("--steps", type=at_least(1), default=40, metavar="N", help="default: 40")
    text = "train on M generated JPEG files of 500 x 375 pixels"
    parser.add_argument("--synthetic", type=at_least(1), metavar="M", help=text)
    options, settings = parser.parse_known_args(argv)

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
            *("--protocol=paper", "--diagnose_every=0"),
            *("--evaluation.descriptor=false", "--evaluation.parts=null"),  # nothing is tested
        ]
        try:
            command = parse(settings)
            if command.experiment.precision == "fp16":
                raise ConfigError("precision: the bare loop scales no gradients; give bf16")
            run = OngoingRun(command, settings, start(command.experiment))
            with closing(run.record):
                turns = measure(run, options.steps)
        except (ConfigError, NonFiniteError, DatasetError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        if run.state.stopped_by is not None:
            return 128 + run.state.stopped_by
        print(f"{options.recipe}, {run.num_workers} workers; {turns.table(run.sampler.batch_size)}")
    return 0


def write_synthetic(root: Path, images: int) -> None:
    """Write JPEG files with the contours and the grain of photographs, about 60 kB each, one folder per class."""
    generator, classes = np.random.default_rng(0), 40  # half of them train
    for number in range(-(-images // classes) * classes):
        shapes = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        pixels = np.asarray(shapes.resize((500, 375))).astype(np.int16)  # CUB-200-2011's usual size
        pixels += generator.integers(-12, 13, pixels.shape, dtype=np.int16)
        path = root / f"{number % classes:02}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def bare_steps(run: OngoingRun) -> Generator[Tensor]:
    """Train in a bare loop from the run's initial weights, and yield the loss of each step."""
    experiment, device = run.experiment, run.accelerator.device
    model = building.build_model(experiment.model, experiment.data)
    loss: nn.Module = building.build_loss(experiment, model, run.datasets.train.num_classes)
    for own, other in ((model, run.state.model), (loss, run.state.loss)):
        own.load_state_dict(run.accelerator.unwrap_model(other).state_dict())
        own.to(device, run.state.dtype)
    optimizer, scheduler = building.build_optimizer(experiment.optimization, model, loss)
    loader = DataLoader(
        run.images.train,
        batch_sampler=[run.sampler.batch(step) for step in range(run.sampler.steps)],
        num_workers=run.num_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_signals,
    )
    half = experiment.precision == "bf16"

    def steps() -> Generator[Tensor]:
        for images, labels, _ in loader:
            images, labels = (part.to(device, non_blocking=True) for part in (images, labels))
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                embeddings = model(images.to(run.state.dtype))
            value = loss(embeddings, labels)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            yield value.detach()

    return steps()


class Turns:
    """Seconds of the bare loop and of the runner, which alternate after each `steps` steps."""

    def __init__(self, bare: Iterator[Tensor], steps: int) -> None:
        self.bare, self.steps = bare, steps
        self.seconds: dict[str, list[float]] = {"bare loop": [], "runner": []}  # of each turn
        self.waiting = [0.0]  # of the runner for its data loader, in each turn
        self.losses: list[Tensor] = []  # of the bare loop
        self._begun = 0.0

    def end(self, step: int) -> None:
        """End the runner's turn, let the bare loop take its turn, and begin the runner's next one."""
        if step > 0:
            synchronize()
            ended = time.perf_counter()
            self.losses += [next(self.bare) for _ in range(self.steps)]
            synchronize()
            self.seconds["bare loop"].append(time.perf_counter() - ended)
            self.seconds["runner"].append(ended - self._begun)
            self.waiting.append(0.0)
        self._begun = time.perf_counter()

    def watched(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The same batches; adds up the time until each arrives."""
        asked = time.perf_counter()
        for batch in loader:
            self.waiting[-1] += time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()

    def table(self, batch_size: int) -> str:
        """The measured times in words and as a Markdown table; the first turns do not count."""
        seconds = {name: times[1:] for name, times in self.seconds.items()}
        speed = batch_size * self.steps / statistics.median(seconds["runner"])
        waited = sum(self.waiting[1:-1]) / sum(seconds["runner"])
        size = (
            f"{self.steps} steps of {batch_size} images; the runner: {speed:.1f} images/s, {waited:.1%} of its "
            "time waiting for its data loader"
        )
        return table(size, seconds, {})


def measure(run: OngoingRun, steps: int) -> Turns:
    """Train both by turns, to the run's last step."""
    run.open_images()
    with closing(bare_steps(run)) as bare:
        turns = Turns(bare, steps)
        run.train(evaluate=turns.end, watch=turns.watched)
    return turns


if __name__ == "__main__":
    sys.exit(main())
