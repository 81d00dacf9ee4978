"""Binomial deviance against loops, finite differences and PML's conventions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import miners, reducers
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor

from pml_regularizers import BinomialDevianceLoss
from tests.oracles.binomial_deviance import anchor_losses
from tests.support.tolerances import assert_close

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3])  # 2 and 3 are singletons


def vectors(count: int = len(LABELS), dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64).to(dtype)


def expected(embeddings: Tensor, labels: Tensor = LABELS, **kwargs: Any) -> np.ndarray:
    """One value per anchor, by the oracle."""
    return np.array(anchor_losses(embeddings.double().numpy(), labels.tolist(), **kwargs))


@pytest.mark.parametrize(
    ("alpha", "beta", "C"), [(2.0, 0.5, 25.0), (1.0, 0.0, 1.0), (4.0, -0.3, 9.0)]
)
def test_parameters_mean_what_the_equation_says(alpha: float, beta: float, C: float) -> None:
    embeddings = vectors()
    loss = BinomialDevianceLoss(alpha=alpha, beta=beta, negative_weight=C)
    exact = expected(embeddings, alpha=alpha, beta=beta, C=C).sum()
    assert_close(loss(embeddings, LABELS), exact)


def test_a_value_made_by_hand() -> None:
    """Two images of one class at a right angle, and one of another class on top of the first."""
    embeddings = torch.tensor([[3.0, 0.0], [0.0, 0.1], [2.0, 0.0]], dtype=torch.float64)
    positive, above, below = (
        math.log(1 + math.e),
        math.log(1 + math.exp(25)),
        math.log(1 + math.exp(-25)),
    )
    anchors = [positive + above, positive + below, (above + below) / 2]
    value = BinomialDevianceLoss()(embeddings, torch.tensor([0, 0, 1]))
    assert_close(value, sum(anchors))


def test_steep_parts_are_exact() -> None:
    """alpha * C * (s - beta) = 20.7 lies where torch's softplus, left alone, drops exp(-20.7)."""
    s = 0.914
    embeddings = torch.tensor([[1.0, 0.0], [s, math.sqrt(1 - s * s)]], dtype=torch.float64)
    value = BinomialDevianceLoss()(embeddings, torch.tensor([0, 1]))
    assert_close(value, 2 * math.log(1 + math.exp(50 * (s - 0.5))))


def test_every_anchor_is_returned_by_the_reducer_that_does_nothing() -> None:
    embeddings = vectors()
    loss = BinomialDevianceLoss(reducer=reducers.DoNothingReducer())
    result = loss(embeddings, LABELS)["loss"]
    assert result["reduction_type"] == "element"
    assert result["indices"].tolist() == list(range(len(LABELS)))
    assert_close(result["losses"], expected(embeddings))


def test_mined_pairs_are_the_only_ones_that_count() -> None:
    embeddings = vectors()
    mined = miners.PairMarginMiner(pos_margin=0.9, neg_margin=1.2)(embeddings, LABELS)
    a1, p, a2, n = (indices.tolist() for indices in mined)
    pairs = {*zip(a1, p, strict=True), *zip(a2, n, strict=True)}
    everything = lmu.get_all_pairs_indices(LABELS)
    assert 2 < len(pairs) < len(everything[0]) + len(everything[2])
    value = BinomialDevianceLoss()(embeddings, LABELS, mined)
    assert_close(value, expected(embeddings, pairs=pairs).sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_reference_set_takes_the_place_of_the_batch(dtype: torch.dtype) -> None:
    embeddings, references = vectors(dtype=dtype), vectors(5, dtype=dtype)
    labels = torch.tensor([0, 0, 1, 3, 4])
    value = BinomialDevianceLoss()(embeddings, LABELS, ref_emb=references, ref_labels=labels)
    exact = expected(embeddings, references=(references.double().numpy(), labels.tolist()))
    assert_close(value, exact.sum())
