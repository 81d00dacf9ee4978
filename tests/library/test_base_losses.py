"""The papers' base losses that PML lacks, against their equations."""

from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import reducers
from torch import Tensor

from pml_regularizers import (
    BinomialDevianceLoss,
    CosineContrastiveLoss,
    DenseNPairsLoss,
)
from tests.oracles import base_losses as oracle
from tests.support.tolerances import assert_close

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3])  # 2 and 3 are singletons
PAIRS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])  # ECAML's batches


def vectors(count: int = len(LABELS), dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------------------------- our own classes

OURS = {
    "contrastive": (CosineContrastiveLoss, oracle.horde_contrastive),
    "n_pairs": (DenseNPairsLoss, oracle.ecaml_n_pair),
    "binomial_sum": (
        lambda **kwargs: BinomialDevianceLoss(balanced=False, **kwargs),
        oracle.ecaml_binomial,
    ),
}
ours = pytest.mark.parametrize(("make", "exact"), OURS.values(), ids=OURS)


def test_values_made_by_hand() -> None:
    x = torch.tensor([[3.0, 0.0], [0.0, 0.1], [2.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1])
    # Positives at a right angle: (1 - 0)^2 / 2. Active negatives: both ways between images 0 and 2.
    assert_close(CosineContrastiveLoss()(x, labels), 0.5 + 0.25)
    # Image 0: log(1 + e^6), image 1: log(1 + e^0).
    assert_close(DenseNPairsLoss()(x, labels), np.log1p(np.exp(6)) + np.log(2))


def test_reducers_see_the_pairs() -> None:
    x = vectors()
    terms = oracle.n_pair_terms(x.numpy(), LABELS.tolist())
    by_anchor = [
        np.mean([v for (a, _), v in terms.items() if a == i]) for i in {a for a, _ in terms}
    ]
    values = np.array(list(terms.values()))
    threshold = float(np.median(values))
    for reducer, exact in (
        (reducers.MeanReducer(), values.mean()),
        (reducers.DivisorReducer(), values.sum() / len(LABELS)),
        (reducers.AvgNonZeroReducer(), values[values > 0].mean()),
        (reducers.ThresholdReducer(low=threshold), values[values > threshold].mean()),
        (reducers.PerAnchorReducer(reducers.SumReducer()), sum(by_anchor)),
    ):
        assert_close(DenseNPairsLoss(reducer=reducer)(x, LABELS), exact)


def test_reducers_see_both_sides_of_the_contrastive_loss() -> None:
    x = vectors()
    positive, negative = oracle.all_pairs(LABELS.tolist())
    near = np.array([(1 - oracle.cosine(*x[[i, j]].numpy())) ** 2 / 2 for i, j in positive])
    far = np.array([max(0, oracle.cosine(*x[[i, j]].numpy()) - 0.5) / 2 for i, j in negative])
    assert 0 < (far > 0).sum() < len(far)
    for reducer, exact in (
        (reducers.MeanReducer(), near.mean() + far.mean()),
        (reducers.SumReducer(), near.sum() + far.sum()),
        (reducers.AvgNonZeroReducer(), near.mean() + far[far > 0].mean()),
    ):
        assert_close(CosineContrastiveLoss(reducer=reducer)(x, LABELS), exact)
    raw = CosineContrastiveLoss(reducer=reducers.DoNothingReducer())(x, LABELS)
    assert [raw[name]["reduction_type"] for name in ("pos_loss", "neg_loss")] == [
        "pos_pair",
        "neg_pair",
    ]


def test_pairs_of_equal_images_count_in_the_mean() -> None:
    """An average of the non-zero ones would forget them."""
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert_close(CosineContrastiveLoss()(x, torch.zeros(3, dtype=torch.long)), 4 / 6 / 2)


@ours
def test_mined_pairs_are_the_only_ones_that_count(make: Any, exact: Any) -> None:
    """Pairs of only two classes give the loss of these two classes."""
    x, keep = vectors(), torch.tensor([0, 1, 2, 4, 5])
    positive, negative = oracle.all_pairs(LABELS[keep].tolist())
    mined = tuple(
        keep[list(side)] for pairs in (positive, negative) for side in zip(*pairs, strict=True)
    )
    expected = exact(x[keep].numpy(), LABELS[keep].tolist())
    loss = make()
    assert_close(loss(x, LABELS, mined), expected)
    twice = tuple(indices.repeat(2) for indices in mined)
    assert_close(loss(x, LABELS, twice), expected)


@ours
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_reference_set_takes_the_place_of_the_batch(
    make: Any, exact: Any, dtype: torch.dtype
) -> None:
    """An image against references is what it adds to them as one more image: its row of the pairs."""
    x, references = vectors(dtype=dtype), vectors(5, dtype=dtype)
    labels = torch.tensor([0, 0, 1, 3, 4])
    loss = make(reducer=reducers.SumReducer())
    expected = 0.0
    for image, label in zip(x.double(), LABELS.tolist(), strict=True):
        rows = torch.cat([image[None], references.double()]).numpy()
        classes = [label, *labels.tolist()]
        positive, negative = oracle.all_pairs(classes)
        first = [[pair for pair in side if pair[0] == 0] for side in (positive, negative)]
        expected += ROWS[exact](rows, classes, *first)
    assert_close(loss(x, LABELS, ref_emb=references, ref_labels=labels), expected)


def contrastive_row(x: np.ndarray, labels: Any, positive: Any, negative: Any) -> float:
    pulled = sum((1 - oracle.cosine(x[i], x[j])) ** 2 / 2 for i, j in positive)
    return pulled + sum(max(0, oracle.cosine(x[i], x[j]) - 0.5) / 2 for i, j in negative)


def n_pairs_row(x: np.ndarray, labels: Any, positive: Any, negative: Any) -> float:
    terms = oracle.n_pair_terms(x, labels)
    return sum(terms[pair] for pair in positive)


def binomial_row(x: np.ndarray, labels: Any, positive: Any, negative: Any) -> float:
    near = sum(oracle.softplus(-2 * (oracle.cosine(x[i], x[j]) - 0.5)) for i, j in positive)
    return near + sum(oracle.softplus(50 * (oracle.cosine(x[i], x[j]) - 0.5)) for i, j in negative)


ROWS = {
    oracle.horde_contrastive: contrastive_row,
    oracle.ecaml_n_pair: n_pairs_row,
    oracle.ecaml_binomial: binomial_row,
}
