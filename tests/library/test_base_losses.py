"""The papers' base losses that PML lacks, against their equations."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pml_regularizers import BinomialDevianceLoss, CosineContrastiveLoss, DenseNPairsLoss
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
