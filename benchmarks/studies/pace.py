"""The time of a study, before it starts: the parts of a training are timed on its images."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import psutil
import torch

from benchmarks.settings import parse
from benchmarks.studies.jobs import Job
from benchmarks.training import TrainingState, build_parts, start

STEPS = 4


class Pace(NamedTuple):
    """Seconds until a run's first step, for a kept view, a step and a test image, and the numbers of images."""

    start: float
    view: float
    step: float
    image: float
    train_images: int
    test_images: int

    def seconds(self, jobs: Sequence[Job]) -> float:
        """The time of trainings one by one; those of one seed and the same classes share their views."""
        total, kept = 0.0, set[Any]()
        for job in jobs:
            experiment = job.command.experiment
            data, steps = experiment.data, experiment.optimization.steps
            part = 1 / data.folds if data.split == "validation" else 0.0
            points = experiment.evaluation.every and steps // experiment.evaluation.every + 1
            unseen = self.train_images * part if part else self.test_images
            tested = unseen * (1 if part else 2) + points * 2 * self.test_images
            total += self.start + steps * self.step + tested * self.image
            if data.cached_views is not None:  # and the test views of all images
                trained = self.train_images * (1 - part) * (data.cached_views + 1)
                classes = data.test_classes, data.split, data.fold
                views = {("test", classes): unseen, (job.seed, classes): trained}
                total += self.view * sum(n for of, n in views.items() if of not in kept)
                kept |= set(views)
        return total


def measure(job: Job) -> Pace:
    """Take a few steps of a training, in a process of its own; nothing is written."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measure, [*job.settings, f"--output={job.folder}"]).result()


def _measure(settings: Sequence[str]) -> Pace:
    experiment = parse(settings).experiment
    accelerator = start(experiment)
    model, (train, test, _), loss, sampler = build_parts(experiment, accelerator)
    state = TrainingState(accelerator, experiment, model, loss)
    begun = time.time() - psutil.Process().create_time()

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        since = time.perf_counter()
        found = work()
        torch.ones((), device=accelerator.device).item()  # waits for a GPU
        return time.perf_counter() - since, found

    read, items = timed(lambda: [train[key] for key in sampler.batch(0)])
    inputs = torch.stack([item[0] for item in items]).to(accelerator.device, state.dtype)
    labels = torch.tensor([int(item[1]) for item in items], device=accelerator.device)
    with torch.no_grad(), accelerator.autocast():
        state.model(inputs)  # the first one allocates
        view = 0.0
        if experiment.data.cached_views is not None:
            below, inputs = timed(lambda: model.frozen_stages.lower(inputs))
            view, read = read + below, 0.0
        image = read + timed(lambda: state.model(inputs))[0]

    def step() -> None:
        accelerator.backward(state.loss(state.model(inputs), labels))
        state.optimizer.step()
        state.optimizer.zero_grad()

    state.model.train()
    step()
    steps = [timed(step)[0] for _ in range(STEPS)]
    n, whole = len(items), read + sum(steps) / STEPS
    return Pace(begun, view / n, whole, image / n, len(train), len(test))
