"""Turns of the runner and of a bare loop in plain torch, over the same batches."""

import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import building
from benchmarks.console import ignore_signals
from benchmarks.run import BenchmarkRun
from benchmarks.settings import ConfigError, Experiment
from benchmarks.speed.measuring import synchronize

TARGET = 0.95


def check(experiment: Experiment) -> None:
    """Raise a ConfigError for a setting that the bare loop lacks."""
    refused = {
        "precision": experiment.precision == "fp16",
        "model.compile": experiment.model.compile,
        "optimization.chunk_size": experiment.optimization.chunk_size is not None,
    }
    if keys := [key for key, given in refused.items() if given]:
        raise ConfigError(f"{keys[0]}: the bare loop does not support it; leave it out")


def bare_steps(run: BenchmarkRun) -> Generator[Tensor, None, None]:
    """Train in a bare loop from the run's initial weights, and yield the loss of each step."""
    experiment, device = run.experiment, run.accelerator.device
    optimization = experiment.optimization
    model = building.build_model(experiment.model, experiment.data)
    loss: nn.Module = building.build_loss(experiment, model, run.datasets.train.num_classes)
    for own, other in ((model, run.state.model), (loss, run.state.loss)):
        own.load_state_dict(run.accelerator.unwrap_model(other).state_dict())
        own.to(device, run.state.dtype)
    optimizer, scheduler = building.build_optimizer(optimization, model, loss)
    parameters = [*model.parameters(), *loss.parameters()]
    loader = DataLoader(
        run.datasets.train,
        batch_sampler=[run.sampler.batch(step) for step in range(run.sampler.steps)],
        num_workers=run.num_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_signals,
    )
    half = experiment.precision == "bf16"

    def steps() -> Generator[Tensor, None, None]:
        for images, labels, _ in loader:
            images, labels = (part.to(device, non_blocking=True) for part in (images, labels))
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                embeddings = model(images.to(run.state.dtype))
            value = loss(embeddings, labels)
            value.backward()
            if optimization.max_gradient_norm is not None:
                nn.utils.clip_grad_norm_(parameters, optimization.max_gradient_norm)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            yield value.detach()

    return steps()


@dataclass
class Turns:
    """Times the runner and the bare loop, which alternate after each `steps` steps."""

    bare: Iterator[Tensor]
    steps: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"runner": [], "bare": []})
    waiting: list[float] = field(default_factory=list)
    """Seconds that the runner waited for its data loader, by turn."""
    losses: list[Tensor] = field(default_factory=list)
    """Losses of the bare loop."""

    def rows(self, batch_size: int) -> list[tuple[str, str, str]]:
        """The rows to print; the first turns do not count."""
        runner, bare = (self.seconds[name][1:] for name in ("runner", "bare"))
        images = batch_size * self.steps
        ratios = [b / r for r, b in zip(runner, bare, strict=True)]
        ratio = statistics.median(ratios)
        waited = sum(self.waiting[1:]) / sum(runner)
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        return [
            ("bare loop", f"{images / statistics.median(bare):.1f} images/s", ""),
            ("runner", f"{images / statistics.median(runner):.1f} images/s", ""),
            ("waiting", f"{waited:.1%}", "of the runner's time, for its data loader"),
            ("ratio", f"{ratio:.3f}", f"{spread}, {len(ratios)} rounds of {self.steps} steps"),
            ("target", f"{TARGET}", "met" if ratio >= TARGET else "missed"),
        ]

    def begin(self) -> None:
        self._waited = 0.0
        synchronize()
        self._begun = time.perf_counter()

    def end(self, step: int) -> None:
        """End the runner's turn, let the bare loop take its turn, and begin the runner's next one."""
        if step > 0:
            self._lap("runner")
            self.waiting.append(self._waited)
            self.losses += [next(self.bare) for _ in range(self.steps)]
            self._lap("bare")
        self.begin()

    def watched(self, loader: Any) -> Iterator[Any]:
        """The same batches; adds up the time until each arrives."""
        batches = iter(loader)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def _lap(self, name: str) -> None:
        synchronize()
        now = time.perf_counter()
        self.seconds[name].append(now - self._begun)
        self._begun = now


def measure(run: BenchmarkRun, steps: int) -> Turns:
    """Train both by turns, to the run's last step."""
    with closing(bare_steps(run)) as bare:
        turns = Turns(bare, steps)
        turns.begin()
        run.train(evaluate=turns.end, watch=turns.watched)
    return turns
