"""Batches: PML's sampler, made a function of the seed and the step.

A step's images and the seeds of their augmentation depend on (seed, draw, step) alone, so the next step is all the
state that a checkpoint needs, and data-loader workers may fetch as far ahead as they like.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from accelerate import Accelerator
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils import common_functions as c_f
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.console.stopping import ignore_signals
from benchmarks.datasets.decoded import DecodedImages
from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError

Key = tuple[int, int]
"""Request of a batch to the dataset: (index of the image, seed of its augmentation)."""


class StepSampler(Sampler[list[Key]]):
    """The batches of a training, from any step on: of PML's sampler, or of shuffled images, each once in an epoch.

    PML draws the classes of each batch independently, so an epoch with the dataset's number of images may show
    one class several times and another one never. With `data.every_class`, an epoch is one pass over all classes
    (PML's behaviour without a `batch_size`); the classes that do not fill a batch wait for the next epoch.

    Args:
        labels: (n,) integers, the class of each training image.
        data: Settings of a batch's composition, and `batch_draw`.
        steps: Batches in the whole training.
        seed: Seed of all draws here.

    Attributes:
        step: Where an iteration starts.
    """

    drop_last = True

    def __init__(self, labels: Tensor, data: Data, *, steps: int, seed: int) -> None:
        self.batch_size, self.steps, self.seed, self.step = data.batch_size, steps, seed, 0
        n, m, size = len(labels), data.samples_per_class, data.batch_size
        self._by_class: MPerClassSampler | None = None
        self._images_per_epoch = n
        if m is not None:
            classes = len(labels.unique())
            if classes * m < size:
                raise ConfigError(
                    f"data.batch_size: {size} images, {m} per class, need {size // m} classes, but there are "
                    f"{classes}; expected at most {m * classes}"
                )
            # One draw of PML's sampler: a pass over all classes, or a batch.
            draw = m * classes if data.every_class else size
            self._by_class = MPerClassSampler(labels, m, None if data.every_class else size, draw)
            self._images_per_epoch = (draw if data.every_class else max(n, size)) // size * size
        elif n < size:
            raise ConfigError(
                f"data.batch_size: {size} images, but there are {n}; expected at most so many"
            )
        # Never 0, which would add nothing to numpy's entropy.
        self._draw = () if data.batch_draw is None else (data.batch_draw,)
        # The images drawn of an epoch so far, and the draws to come.
        self._epoch: Callable[[int], tuple[list[int], Iterator[list[int]]]]
        self._epoch = lru_cache(maxsize=2)(lambda epoch: ([], self._draws(epoch)))

    def batch(self, step: int) -> list[Key]:
        """The batch of a step."""
        epoch, start = divmod(step * self.batch_size, self._images_per_epoch)
        indices = self._images(epoch, start, start + self.batch_size)
        if lacking := self.batch_size - len(indices):  # a shuffled epoch that ends inside the batch
            indices = indices + self._images(epoch + 1, 0, lacking)
        generator = np.random.default_rng((self.seed, 1, step, *self._draw))
        seeds = generator.integers(2**63, size=len(indices))
        return list(zip(indices, seeds.tolist(), strict=True))

    def _images(self, epoch: int, start: int, stop: int) -> list[int]:
        """Images of an epoch, drawn as far as they are asked for: all of many would take seconds."""
        drawn, draws = self._epoch(epoch)
        while len(drawn) < min(stop, self._images_per_epoch):
            drawn += next(draws)
        return drawn[start : min(stop, self._images_per_epoch)]

    def _draws(self, epoch: int) -> Iterator[list[int]]:
        """The draws of an epoch, one after the other: a function of (seed, epoch, draw)."""
        sequence = np.random.SeedSequence((self.seed, 0, epoch, *self._draw))
        generator = np.random.RandomState(np.random.MT19937(sequence))
        if self._by_class is None:
            yield generator.permutation(self._images_per_epoch).tolist()
            return
        # PML shuffles them in place, an array faster than a list.
        classes = np.sort(self._by_class.labels)
        while True:
            self._by_class.labels = classes
            others, c_f.NUMPY_RANDOM = c_f.NUMPY_RANDOM, generator
            try:
                images = [int(image) for image in self._by_class]
            finally:
                c_f.NUMPY_RANDOM = others
            yield images

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.step, self.steps):
            yield self.batch(step)

    def __len__(self) -> int:
        return self.steps - self.step


def training_loader(
    accelerator: Accelerator, dataset: Dataset[Any], sampler: StepSampler, num_workers: int
) -> Any:
    """Batches of (images, labels, indices), each process's part of them."""
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        # Decoded images are there already.
        pin_memory=accelerator.device.type == "cuda" and not isinstance(dataset, DecodedImages),
        worker_init_fn=ignore_signals,
    )
    return accelerator.prepare_data_loader(loader)
