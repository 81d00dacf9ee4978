"""Batches: PML's sampler as a function of seed and step."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.samplers import MPerClassSampler

from benchmarks.settings import ConfigError, Data
from benchmarks.training import batches
from benchmarks.training.batches import StepSampler
from tests.support.counting import calls


def sampler(
    sizes: list[int], steps: int = 12, seed: int = 0, **data: Any
) -> tuple[StepSampler, torch.Tensor]:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    data = {"batch_size": 6, "samples_per_class": 2, **data}
    return StepSampler(labels, Data(**data), steps=steps, seed=seed), labels


@settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=12),
    samples=st.integers(1, 4),
    seed=st.integers(0, 99),
    every_class=st.booleans(),
)
def test_every_batch_has_p_classes_of_m_images(
    sizes: list[int], samples: int, seed: int, every_class: bool
) -> None:
    data = {"batch_size": 3 * samples, "samples_per_class": samples, "every_class": every_class}
    made, labels = sampler(sizes, seed=seed, **data)
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


def test_a_batch_draws_no_further_ones() -> None:
    """An epoch of a million images would take minutes before the first step."""
    made, _ = sampler([4] * 600)
    with calls(10_000) as counted:
        made.batch(3)
    assert counted["MPerClassSampler.__iter__"] == 4


def test_a_pass_shows_every_class_once() -> None:
    made, labels = sampler([4] * 10, every_class=True)
    for epoch in range(3):
        seen = [labels[i].item() for step in range(3) for i, _ in made.batch(3 * epoch + step)[::2]]
        assert len(seen) == len(set(seen)) == 9  # the tenth does not fill a batch


def test_shuffled_epochs_show_every_image_once() -> None:
    made, _ = sampler([5, 5], steps=10, batch_size=4, samples_per_class=None)
    indices = [index for batch in made for index, _ in batch]
    assert [len(batch) for batch in made] == [4] * 10
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
    indices, seeds = (
        [{key[part] for batch in drawn for key in batch} for drawn in draws[:3]] for part in (0, 1)
    )
    assert len(set.union(*seeds)) == sum(map(len, seeds)) == 3 * 12 * 6
    assert all(len(of) > 20 for of in indices)
    firsts = [tuple(i for i, _ in drawn[0]) for drawn in draws[:3]]
    assert len({*firsts}) == 3


def test_the_batches_of_a_seed_are_still_those_of_earlier_versions() -> None:
    for data, indices in (({}, [7, 1, 34, 35, 6, 12]), (HOW[2], [4, 22, 16, 26, 28, 0])):
        made, _ = sampler([4] * 9, seed=7, **data)
        assert [index for index, _ in made.batch(13)] == indices
        assert made.batch(13)[0][1] == 8415577853749286163


@pytest.mark.parametrize("data", [*HOW, {"batch_draw": 3}])
def test_resumes_where_it_was_and_draws_nothing_from_global_generators(
    data: dict[str, Any],
) -> None:
    made, _ = sampler([3] * 5, **data)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    whole = list(made)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    other, _ = sampler([3] * 5, **data)
    other.step = 7
    assert len(other) == 5
    assert list(other) == whole[7:]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, r"data\.batch_size: 6 images.*need 3 classes.*are 2"),
        ({"samples_per_class": None, "batch_size": 9}, "9 images, but there are 8"),
    ],
)
def test_too_few(data: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        sampler([4, 4], **data)
