"""The measures of JRD's section 2 against loops, by hand, and at chance."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pml_regularizers import (
    generalization_bound,
    h_divergence,
    ideal_joint_error,
    mean_interval,
    stratified_parts,
)
from tests.oracles import generalization_bound as oracle


def domain(classes: int, per_class: int, first: int = 0, spread: float = 1.0) -> tuple[Any, Any]:
    """Images around the centres of their classes."""
    labels = torch.arange(first, first + classes).repeat(per_class)
    centres = torch.randn(classes, 5, dtype=torch.float64).repeat(per_class, 1)
    return centres + spread * torch.randn(len(labels), 5, dtype=torch.float64), labels


def halves(x: Tensor, labels: Tensor, rows: Tensor) -> tuple[list[Any], list[Any]]:
    unit = (x / x.norm(dim=1, keepdim=True)).numpy()
    fitted = set(rows.tolist())
    both: tuple[list[Any], list[Any]] = ([], [])
    for i, label in enumerate(labels.tolist()):
        both[i not in fitted].append((unit[i], label))
    return both


@pytest.mark.parametrize("block", [1, 70, 2**24])
def test_equal_the_oracle(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generalization_bound, "BLOCK", block)
    seen, seen_labels = domain(4, 8)
    unseen, unseen_labels = domain(3, 6, first=4)
    rows = stratified_parts(seen_labels, 2)[0], stratified_parts(unseen_labels, 3)[0]
    data = (seen, seen_labels, unseen, unseen_labels)
    split = halves(seen, seen_labels, rows[0]), halves(unseen, unseen_labels, rows[1])

    exact = oracle.ideal_joint_error(*split)
    assert 0 < exact < 2
    assert ideal_joint_error(*data, labelled=rows) == pytest.approx(exact, abs=1e-12)
    pooled, balanced = oracle.h_divergence(*split)
    assert 0.5 < pooled < 1 and pooled != balanced
    assert h_divergence(*data, labelled=rows) == pytest.approx(pooled, abs=1e-12)
    assert h_divergence(*data, labelled=rows, balanced=True) == pytest.approx(balanced, abs=1e-12)
    proxy = h_divergence(*data, labelled=rows, form="proxy_a")
    assert proxy == pytest.approx(2 * (1 - 2 * (1 - pooled)), abs=1e-12)


def test_rows_may_be_a_mask() -> None:
    seen, unseen = domain(4, 8), domain(3, 6, first=4)
    rows = stratified_parts(seen[1], 2)[0], stratified_parts(unseen[1], 2)[0]
    masks = []
    for chosen, (x, _) in zip(rows, (seen, unseen), strict=True):
        mask = torch.zeros(len(x), dtype=torch.bool)
        mask[chosen] = True
        masks.append(mask)
    for measure in (ideal_joint_error, h_divergence):
        values = [measure(*seen, *unseen, labelled=given) for given in (rows, tuple(masks))]
        assert values[0] == values[1]


def test_known_by_hand() -> None:
    """Images on a line, the two labelled ones of each domain first."""
    seen, seen_labels = torch.tensor([[0.0], [10.0], [1.0], [12.0]]), torch.tensor([0, 1, 0, 0])
    unseen, unseen_labels = (
        torch.tensor([[20.0], [13.0], [21.0], [22.0]]),
        torch.tensor([2, 3, 2, 3]),
    )
    data = (seen, seen_labels, unseen, unseen_labels)
    first = torch.tensor([0, 1])
    arguments = {"labelled": (first, first), "normalize": False}
    # 1 -> 0 right; 12 -> 13, an unseen image: wrong; 21 -> 20 right; 22 -> 20 wrong.
    assert ideal_joint_error(*data, **arguments) == 0.5 + 0.5
    assert h_divergence(*data, **arguments) == 1 - 1 / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_autocast(dtype: torch.dtype) -> None:
    seen, unseen = domain(4, 8, spread=0.3), domain(3, 6, first=4, spread=0.3)
    low = [(x.to(dtype), y) for x, y in (seen, unseen)]
    high = [(x.double(), y) for x, y in low]
    for measure in (ideal_joint_error, h_divergence):
        with torch.autocast("cpu", torch.bfloat16):
            assert measure(*low[0], *low[1]) == measure(*high[0], *high[1])


def test_far_from_the_origin() -> None:
    """In float32, 1000 away, squared distances lose all digits of a unit, unless centred first."""
    seen, unseen = domain(4, 8), domain(3, 6, first=4)
    exact = ideal_joint_error(*seen, *unseen, normalize=False)
    moved = [(1e3 + x).float() for x, _ in (seen, unseen)]
    assert ideal_joint_error(moved[0], seen[1], moved[1], unseen[1], normalize=False) == exact


def test_the_seed_decides_and_the_global_generators_are_left_alone() -> None:
    seen, unseen = domain(4, 20), domain(4, 20, first=4)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for measure in (ideal_joint_error, h_divergence):
        by_seed = [measure(*seen, *unseen, seed=seed) for seed in (0, 1, 2, 0)]
        assert by_seed[0] == by_seed[3] and len(set(by_seed)) > 1
    stratified_parts(seen[1])
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()  # noqa: NPY002


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.99])
def test_a_share_of_every_class_is_labelled(share: float) -> None:
    labels = torch.tensor([7] * 8 + [3] * 2 + [5] * 11)[torch.randperm(21)]
    rows = generalization_bound._share(labels, share, 0, "labels")
    assert len(set(rows.tolist())) == len(rows)
    for name, size in ((7, 8), (3, 2), (5, 11)):
        exact = min(max(1, round(size * share)), size - 1)
        assert (labels[rows] == name).sum() == exact


# ------------------------------------------------------------------------------------------- ten parts


def test_parts_are_disjoint_complete_and_stratified() -> None:
    labels = torch.tensor([c for c in range(7) for _ in range(10 + 3 * c)])[torch.randperm(133)]
    parts = stratified_parts(labels, seed=3)
    assert len(parts) == 10
    assert sorted(torch.cat(parts).tolist()) == list(range(133))
    assert {len(part) for part in parts} == {13, 14}
    for c in range(7):
        counts = [int((labels[part] == c).sum()) for part in parts]
        assert min(counts) >= 1 and max(counts) - min(counts) <= 1
    again, other = stratified_parts(labels, seed=3), stratified_parts(labels, seed=4)
    assert all(map(torch.equal, parts, again)) and not all(map(torch.equal, parts, other))


def test_every_image_is_as_likely_in_every_part() -> None:
    """1,000 draws: each count of part 0 is binomial(1000, 1/2), within 5 standard deviations."""
    labels = torch.tensor([0, 0, 1, 1, 1, 1])
    counts = torch.zeros(6)
    for seed in range(1000):
        counts[stratified_parts(labels, 2, seed=seed)[0]] += 1
    assert (counts - 500).abs().max() < 5 * math.sqrt(1000 / 4)


def test_interval_by_hand() -> None:
    values = [0.1, 0.4, 0.4, 0.7]
    deviation = math.sqrt((0.09 + 0.09) / 3)
    mean, half_width = mean_interval(values)
    assert (mean, half_width) == pytest.approx((0.4, 1.96 * deviation / 2))
    # Quantile 3.18245 of Student's t with 3 degrees of freedom, 2.26216 with 9: any table.
    assert mean_interval(values, student=True).half_width == pytest.approx(
        3.18245 * deviation / 2, abs=1e-5
    )
    ten = [float(i) for i in range(10)]
    ratio = mean_interval(ten, student=True).half_width / mean_interval(ten).half_width
    assert ratio == pytest.approx(2.26216 / 1.96, abs=1e-5)


# ---------------------------------------------------------------------------------------------- errors

X, Y = torch.randn(6, 2), torch.tensor([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("measure", [ideal_joint_error, h_divergence])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seen": X[:5]}, r"seen: expected embeddings \(6, E\).*\(5, 2\)"),
        ({"seen_labels": Y[:, None]}, r"seen_labels: expected a vector.*\(6, 1\)"),
        ({"unseen": torch.randn(6, 3)}, r"unseen: expected embeddings 2 wide.*\(6, 3\)"),
        ({"unseen": X.log()}, "unseen: . of 6 embeddings hold NaN or infinity"),
        (
            {"unseen_labels": Y + 2},
            "unseen_labels: 1 classes are also in seen_labels, such as 2; give",
        ),
        ({"unseen_labels": torch.arange(10, 16)}, "unseen_labels: class 10 has one image"),
        ({"labelled": 1.0}, "labelled: expected a share between 0 and 1.*got 1.0"),
        (
            {"labelled": (torch.arange(6), torch.arange(2))},
            "labelled: expected some of the 6 rows of seen.*got 6",
        ),
        (
            {"labelled": (torch.ones(5, dtype=torch.bool), torch.arange(2))},
            r"labelled: expected 6 entries for seen, got shape \(5,\)",
        ),
        ({"unseen": X.numpy()}, "unseen: expected a tensor, got ndarray; pass torch.as_tensor"),
        (
            {"labelled": (torch.tensor([0, 6]), torch.arange(2))},
            "rows of seen, .* 0 to 5, got 0 to 6",
        ),
        (
            {"labelled": ([0, 2], torch.arange(2))},
            "labelled, rows of seen: expected a tensor, got list",
        ),
        ({"labelled": [0, 2]}, r"labelled: .* or a tuple of two tensors.*got \[0, 2\]"),
    ],
)
def test_errors(measure: Any, changes: dict[str, Any], message: str) -> None:
    good = {"seen": X, "seen_labels": Y, "unseen": X, "unseen_labels": Y + 10}
    assert measure(**good) >= 0
    with pytest.raises(ValueError, match=message):
        measure(**{**good, **changes})
