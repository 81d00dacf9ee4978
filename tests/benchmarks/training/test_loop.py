"""Batches and other draws as functions of seed and step."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed
from pytorch_metric_learning.samplers import MPerClassSampler

from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError
from benchmarks.training import batches
from benchmarks.training.batches import StepSampler
from benchmarks.training.loop import seed_generators


def sampler(
    sizes: list[int], steps: int = 12, seed: int = 0, **data: Any
) -> tuple[StepSampler, torch.Tensor]:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    data = {"batch_size": 6, "samples_per_class": 2, **data}
    return StepSampler(labels, Data(**data), steps=steps, seed=seed), labels


@pytest.mark.parametrize("every_class", [False, True])
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_every_batch_has_p_classes_of_m_images(samples: int, every_class: bool) -> None:
    data = {"batch_size": 3 * samples, "samples_per_class": samples, "every_class": every_class}
    sizes = [1, 9, 2, 4, 3, 5, 1]
    made, labels = sampler(sizes, **data)
    for batch in made:
        indices = torch.tensor([index for index, _ in batch]).view(3, samples)
        classes = labels[indices]
        assert (classes == classes[:, :1]).all()
        assert len(classes[:, 0].unique()) == 3
        for label, images in zip(classes[:, 0], indices, strict=True):
            if sizes[label] >= samples:
                assert len(images.unique()) == samples


def test_an_epoch_is_pmls() -> None:
    """Batch by batch what PML draws from the same generator."""
    made, labels = sampler([4] * 9)
    expected = MPerClassSampler(labels, 2, 6, len(labels))
    for epoch in (1, 0, 1):  # whatever was drawn before
        bits = np.random.MT19937(np.random.SeedSequence((0, 0, epoch)))
        expected.labels.sort()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches.c_f, "NUMPY_RANDOM", np.random.RandomState(bits))
            drawn = list(expected)
        found = (made.batch(6 * epoch + step) for step in range(6))
        assert [index for batch in found for index, _ in batch] == drawn


def test_a_pass_shows_every_class_once() -> None:
    made, labels = sampler([4] * 10, every_class=True)
    for epoch in range(3):
        seen = [labels[i].item() for step in range(3) for i, _ in made.batch(3 * epoch + step)[::2]]
        assert len(seen) == len(set(seen)) == 9  # the tenth does not fill a batch


def test_shuffled_epochs_show_every_image_once() -> None:
    made, _ = sampler([5, 5], steps=10, batch_size=4, samples_per_class=None)
    indices = [index for batch in made for index, _ in batch]
    epochs = [indices[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


HOW = [{}, {"every_class": True}, {"samples_per_class": None}]


@pytest.mark.parametrize("data", HOW)
def test_other_batches_of_a_seed(data: dict[str, Any]) -> None:
    """They differ from each other, as those of another seed do."""
    draws = [list(sampler([4] * 9, batch_draw=draw, **data)[0]) for draw in (None, 1, 2, 1)]
    assert list(sampler([4] * 9, seed=1, **data)[0]) not in draws
    assert draws[1] == draws[3]
    seeds = {seed for drawn in draws[:3] for batch in drawn for _, seed in batch}
    assert len(seeds) == 3 * 12 * 6
    firsts = {tuple(i for i, _ in drawn[0]) for drawn in draws[:3]}
    assert len(firsts) == 3


def test_the_batches_of_a_seed_are_still_those_of_earlier_versions() -> None:
    for data, indices in (({}, [7, 1, 34, 35, 6, 12]), (HOW[2], [4, 22, 16, 26, 28, 0])):
        made, _ = sampler([4] * 9, seed=7, **data)
        assert [index for index, _ in made.batch(13)] == indices
        assert made.batch(13)[0][1] == 8415577853749286163


@pytest.mark.parametrize("data", [*HOW, {"batch_draw": 3}])
def test_resumes_where_it_was_and_draws_nothing_from_global_generators(data):
    made, _ = sampler([3] * 5, **data)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    whole = list(made)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    other, _ = sampler([3] * 5, **data)
    other.step = 7
    assert len(other) == 5
    assert list(other) == whole[7:]


def test_too_few_classes_or_images() -> None:
    for data, line in (
        ({}, r"data\.batch_size: 6 images.*need 3 classes.*are 2"),
        ({"samples_per_class": None, "batch_size": 9}, "9 images, but there are 8"),
    ):
        with pytest.raises(ConfigError, match=line):
            sampler([4, 4], **data)


def test_a_step_draws_what_accelerate_would_seed() -> None:
    drawn = []
    for seed in (partial(seed_generators, device=torch.device("cpu")), set_seed):
        torch.rand(3)
        seed(2**32 - 1)
        drawn.append((random.random(), np.random.random(), torch.rand(()).item()))  # noqa: NPY002
    assert drawn[0] == drawn[1]
