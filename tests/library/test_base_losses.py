"""The papers' base losses that PML lacks, against their equations."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning.reducers import SumReducer
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


def test_pairs_of_equal_images_count_in_the_mean() -> None:
    """An average of the non-zero ones would forget them."""
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert_close(CosineContrastiveLoss()(x, torch.zeros(3, dtype=torch.long)), 4 / 6 / 2)


OURS = {
    "contrastive": (CosineContrastiveLoss, oracle.horde_contrastive),
    "n_pairs": (lambda: DenseNPairsLoss(reducer=SumReducer()), oracle.ecaml_n_pair),
    "binomial": (lambda: BinomialDevianceLoss(reducer=SumReducer()), binomial_deviance),
    "binomial_sum": (
        lambda: BinomialDevianceLoss(balanced=False, reducer=SumReducer()),
        oracle.ecaml_binomial,
    ),
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
    twice = tuple(indices.repeat(2) for indices in mined)
    for tuples in (mined, twice):
        assert_close(make()(x, LABELS, tuples), expected)


def test_parameters_mean_what_the_equation_says() -> None:
    x, loss = vectors(), BinomialDevianceLoss(alpha=4.0, beta=-0.3, negative_weight=9.0)
    assert_close(loss(x, LABELS), anchors(x, alpha=4.0, beta=-0.3, C=9.0).mean())


def test_steep_parts_are_exact() -> None:
    """alpha * C * (s - beta) = 20.7 lies where torch's softplus, left alone, drops exp(-20.7)."""
    s = 0.914
    x = torch.tensor([[1.0, 0.0], [s, math.sqrt(1 - s * s)]], dtype=torch.float64)
    value = BinomialDevianceLoss()(x, torch.tensor([0, 1]))
    assert_close(value, math.log1p(math.exp(50 * (s - 0.5))))


def test_a_reference_set_takes_the_place_of_the_batch() -> None:
    x, references = vectors(dtype=torch.bfloat16), vectors(5, dtype=torch.bfloat16)
    labels = torch.tensor([0, 0, 1, 3, 4])
    value = BinomialDevianceLoss()(x, LABELS, ref_emb=references, ref_labels=labels)
    exact = anchors(x, references=(references.double().numpy(), labels.tolist()))
    assert_close(value, exact.mean())
