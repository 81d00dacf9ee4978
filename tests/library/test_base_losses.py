"""The papers' base losses that PML lacks, against their equations."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import reducers
from torch import Tensor

from pml_regularizers import BinomialDevianceLoss, CosineContrastiveLoss, DenseNPairsLoss
from tests.oracles import base_losses as oracle
from tests.oracles.binomial_deviance import anchor_losses, binomial_deviance
from tests.support.tolerances import assert_close

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3])  # 2 and 3 are singletons


def vectors(count: int = len(LABELS), dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64).to(dtype)


def anchors(embeddings: Tensor, **settings: Any) -> np.ndarray:
    """Binomial deviance of each anchor, by the oracle."""
    return np.array(anchor_losses(embeddings.double().numpy(), LABELS.tolist(), **settings))


def test_values_made_by_hand() -> None:
    """Two images of one class at a right angle, and one of another class on top of the first."""
    x = torch.tensor([[3.0, 0.0], [0.0, 0.1], [2.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1])
    # Positives at a right angle: (1 - 0)^2 / 2. Active negatives: both ways between images 0 and 2.
    assert_close(CosineContrastiveLoss()(x, labels), 0.5 + 0.25)
    # Image 0: log(1 + e^6), image 1: log(1 + e^0).
    assert_close(DenseNPairsLoss()(x, labels), np.log1p(np.exp(6)) + np.log(2))
    positive, above, below = (math.log1p(math.exp(power)) for power in (1, 25, -25))
    by_anchor = [positive + above, positive + below, (above + below) / 2]
    assert_close(BinomialDevianceLoss()(x, labels), sum(by_anchor))


def test_pairs_of_equal_images_count_in_the_mean() -> None:
    """An average of the non-zero ones would forget them."""
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert_close(CosineContrastiveLoss()(x, torch.zeros(3, dtype=torch.long)), 4 / 6 / 2)


OURS = {
    "contrastive": (CosineContrastiveLoss, oracle.horde_contrastive),
    "n_pairs": (DenseNPairsLoss, oracle.ecaml_n_pair),
    "binomial": (BinomialDevianceLoss, binomial_deviance),
    "binomial_sum": (lambda: BinomialDevianceLoss(balanced=False), oracle.ecaml_binomial),
}


@pytest.mark.parametrize(("make", "exact"), OURS.values(), ids=OURS)
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


@pytest.mark.parametrize(
    ("alpha", "beta", "C"), [(2.0, 0.5, 25.0), (1.0, 0.0, 1.0), (4.0, -0.3, 9.0)]
)
def test_parameters_mean_what_the_equation_says(alpha: float, beta: float, C: float) -> None:
    x = vectors()
    loss = BinomialDevianceLoss(alpha=alpha, beta=beta, negative_weight=C)
    assert_close(loss(x, LABELS), anchors(x, alpha=alpha, beta=beta, C=C).sum())


def test_steep_parts_are_exact() -> None:
    """alpha * C * (s - beta) = 20.7 lies where torch's softplus, left alone, drops exp(-20.7)."""
    s = 0.914
    x = torch.tensor([[1.0, 0.0], [s, math.sqrt(1 - s * s)]], dtype=torch.float64)
    value = BinomialDevianceLoss()(x, torch.tensor([0, 1]))
    assert_close(value, 2 * math.log1p(math.exp(50 * (s - 0.5))))


def test_every_anchor_is_returned_by_the_reducer_that_does_nothing() -> None:
    x = vectors()
    result = BinomialDevianceLoss(reducer=reducers.DoNothingReducer())(x, LABELS)["loss"]
    assert result["reduction_type"] == "element"
    assert result["indices"].tolist() == list(range(len(LABELS)))
    assert_close(result["losses"], anchors(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_reference_set_takes_the_place_of_the_batch(dtype: torch.dtype) -> None:
    x, references = vectors(dtype=dtype), vectors(5, dtype=dtype)
    labels = torch.tensor([0, 0, 1, 3, 4])
    value = BinomialDevianceLoss()(x, LABELS, ref_emb=references, ref_labels=labels)
    exact = anchors(x, references=(references.double().numpy(), labels.tolist()))
    assert_close(value, exact.sum())
