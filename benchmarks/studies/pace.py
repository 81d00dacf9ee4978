"""The time of a study, before it starts: the parts of a training are measured once, on its images."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import psutil
import torch

from benchmarks.settings import parse
from benchmarks.studies.jobs import Job
from benchmarks.training import TrainingState, build_parts, start

STEPS = 4


@dataclass(frozen=True)
class Pace:
    """Seconds of the parts of a training, and its images.

    Args:
        start: Until the first step.
        view: A kept view of an image; 0 if none are kept.
        step: A step.
        image: The embedding of a test image.
    """

    start: float
    view: float
    step: float
    image: float
    train_images: int
    test_images: int

    def seconds(self, jobs: Sequence[Job]) -> float:
        """The time of trainings, one after the other; those of one seed and the same classes share their views."""
        total, kept = 0.0, set()
        for job in jobs:
            experiment = job.command.experiment
            data, steps, every = experiment.data, job.steps, experiment.evaluation.every
            part = 1 / data.folds if data.split == "validation" else 0.0
            tested = self.train_images * part if part else 2 * self.test_images
            points = steps // every + 1 if every else 0
            tested += points * 2 * self.test_images
            total += self.start + steps * self.step + tested * self.image
            if (views := (job.seed, data.split, data.fold)) not in kept:
                kept.add(views)
                total += self.view * (data.cached_views or 0) * self.train_images * (1 - part)
        return total


def measure(job: Job) -> Pace:
    """Take a few steps of a training, in a process of its own; nothing is written.

    Raises:
        ConfigError: if it cannot be built.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measure, [*job.settings, f"--output={job.folder}"]).result()


def _measure(settings: Sequence[str]) -> Pace:
    experiment = parse(settings).experiment
    accelerator = start(experiment)
    model, (train, test, _), loss, sampler = build_parts(experiment, accelerator)
    state = TrainingState.prepare(accelerator, experiment, model, loss)
    begun = time.time() - psutil.Process().create_time()

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        since = time.perf_counter()
        with accelerator.autocast():
            found = work()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - since, found

    read, items = timed(lambda: [train[key] for key in sampler.batch(0)])
    count, view = len(items), 0.0
    images = torch.stack([item[0] for item in items]).to(accelerator.device, state.dtype)
    labels = torch.tensor([int(item[1]) for item in items], device=accelerator.device)
    with torch.no_grad():
        timed(lambda: state.model(images))  # the first one allocates
        image = (read + timed(lambda: state.model(images))[0]) / count
    inputs, cached, loading = images, {}, read
    if experiment.data.cached_views is not None:
        below, inputs = timed(lambda: model.frozen_stages.lower(images).detach())
        view, cached, loading = (read + below) / count, {"cached": True}, 0.0

    def step() -> None:
        accelerator.backward(state.loss(state.model(inputs, **cached), labels))
        state.optimizer.step()
        state.optimizer.zero_grad()

    state.model.train()
    timed(step)
    steps = [timed(step)[0] for _ in range(STEPS)]
    return Pace(begun, view, loading + sum(steps) / STEPS, image, len(train), len(test))


def in_words(seconds: float) -> str:
    """E.g. "about 40 minutes"."""
    minutes = seconds / 60
    if minutes > 90:
        return f"about {minutes / 60:.1f} hours"
    return "about a minute" if minutes < 1.5 else f"about {minutes:.0f} minutes"
