"""The measures of JRD's section 2 against loops and by hand; the ten parts and their intervals."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.evaluation.generalization_bound import (
    confidence_interval,
    h_divergence,
    ideal_joint_error,
    stratified_parts,
    training_mask,
)
from tests.oracles import generalization_bound as oracle


def domain(classes: int, per_class: int, first: int = 0, spread: float = 1.0) -> tuple[Any, Any]:
    """Images around the centres of their classes."""
    labels = torch.arange(first, first + classes).repeat(per_class)
    centres = torch.randn(classes, 5, dtype=torch.float64).repeat(per_class, 1)
    return centres + spread * torch.randn(len(labels), 5, dtype=torch.float64), labels


def divided(x: Tensor, labels: Tensor, mask: Tensor) -> tuple[list[Any], list[Any]]:
    """The fitted images and the tested ones."""
    unit = (x / x.norm(dim=1, keepdim=True)).numpy()
    both: tuple[list[Any], list[Any]] = ([], [])
    for i, label in enumerate(labels.tolist()):
        both[not mask[i]].append((unit[i], label))
    return both


def test_equal_the_oracle():
    seen, unseen = domain(4, 8), domain(3, 6, first=4)
    for seed in (0, 3):
        split = [divided(*part, training_mask(part[1], seed)) for part in (seen, unseen)]
        exact = oracle.ideal_joint_error(*split)
        assert 0 < exact < 2
        assert ideal_joint_error(*seen, *unseen, seed=seed) == pytest.approx(exact, abs=1e-12)
        exact, _ = oracle.h_divergence(*split)
        assert 0 < exact < 1
        assert h_divergence(*seen, *unseen, seed=seed) == pytest.approx(exact, abs=1e-12)


def test_numbers_of_the_published_rows_do_not_move():
    """As computed by the code of the published results, on halves of each class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40).repeat(10)
    x = torch.randn(40, 16, generator=generator)[labels]
    x = x + torch.randn(400, 16, generator=generator)
    seen = labels < 20
    data = x[seen], labels[seen], x[~seen], labels[~seen]
    assert ideal_joint_error(*data) == 0.76
    assert h_divergence(*data) == 0.815


def test_the_seed_decides_and_the_global_generators_are_left_alone():
    seen, unseen = domain(4, 20), domain(4, 20, first=4)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    by_seed = [h_divergence(*seen, *unseen, seed=seed) for seed in (0, 1, 2, 0)]
    assert by_seed[0] == by_seed[3] and len(set(by_seed)) > 1
    parts, again, other = (stratified_parts(seen[1], seed=seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, parts, again)) and not all(map(torch.equal, parts, other))
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()  # noqa: NPY002


def test_half_of_every_class_is_fitted_on():
    labels = torch.tensor([7] * 8 + [3] * 2 + [4] * 3 + [5] * 11)[torch.randperm(24)]
    fitted = labels[training_mask(labels, 0)]
    assert [int((fitted == name).sum()) for name in (7, 3, 4, 5)] == [4, 1, 2, 6]


def test_parts_are_disjoint_complete_and_stratified():
    labels = torch.tensor([c for c in range(7) for _ in range(10 + 3 * c)])[torch.randperm(133)]
    parts = stratified_parts(labels, seed=3)
    assert len(parts) == 10
    assert sorted(torch.cat(parts).tolist()) == list(range(133))
    assert {len(part) for part in parts} == {13, 14}
    for c in range(7):
        counts = [int((labels[part] == c).sum()) for part in parts]
        assert min(counts) >= 1 and max(counts) - min(counts) <= 1


X, Y = torch.randn(6, 2), torch.tensor([0, 0, 1, 1, 2, 2])


def test_invalid_arguments():
    for call, message in (
        (lambda: h_divergence(X, Y, X.log(), Y), "contains NaN"),
        (lambda: ideal_joint_error(X, Y, X, Y + 2), "unseen_labels: 1 classes .*, such as 2; give"),
        (lambda: h_divergence(X, Y, X, torch.arange(6)), "labels: class 0 has one image"),
        (lambda: stratified_parts(Y), "labels: class 0 has 2 images, too few for 10 parts"),
        (lambda: confidence_interval([1.0]), "values: expected at least 2 for an interval, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
