"""The losses of an attention-based ensemble against loops, finite differences and PML's conventions."""

from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch.nn import functional as F

from pml_regularizers import BinomialDevianceLoss, DivergenceLoss, EnsembleLoss, HORDELoss
from pml_regularizers.features.feature_tap import FeatureTap
from pml_regularizers.heads.attention_ensemble import between_heads, split_heads
from tests.library.test_ensemble import (
    HEADS,
    LABELS,
    REDUCED,
    WIDTH,
    ensemble,
    images,
    vectors,
)
from tests.support.tolerances import assert_close

# --- the divergence ---------------------------------------------------------------------------------------


def test_a_divergence_by_hand() -> None:
    """Two images, two heads: cosines 0.8 and 0 within the images, 1 and 0.6 across them."""
    embeddings = torch.tensor([[1.0, 0, 0.8, 0.6], [0, 1, 1, 0]], dtype=torch.float64)
    assert_close(DivergenceLoss(2, images="same")(embeddings), 0.3)
    assert_close(DivergenceLoss(2)(embeddings), (0.3 + 0.5 + 0.1) / 3)
    assert_close(DivergenceLoss(2, reducer=reducers.MeanReducer())(embeddings), 0.9 / 4)


@pytest.mark.parametrize(
    "distance",
    [
        distances.CosineSimilarity(),
        distances.DotProductSimilarity(normalize_embeddings=False),
        distances.LpDistance(power=2),
        distances.LpDistance(p=1, normalize_embeddings=False),
        distances.SNRDistance(),
    ],
    ids=lambda distance: type(distance).__name__,
)
def test_heads_of_one_image_are_compared_alone(distance: Any) -> None:
    """Value, gradient and records are those of the whole matrix, the cost is not."""
    margin, reducer = 0.5 if distance.is_inverted else 3.0, reducers.SumReducer()
    made = DivergenceLoss(HEADS, margin, images="same", distance=distance, reducer=reducer)
    embeddings = vectors().requires_grad_()
    heads = split_heads(embeddings, HEADS).flatten(0, 1)
    distance.collect_stats = True
    blocks = between_heads(distance(heads), HEADS).diagonal(dim1=1, dim2=2)
    norms = distance.initial_avg_query_norm, distance.final_avg_query_norm
    expected = distance.margin(margin, blocks).relu().sum()
    distance.initial_avg_query_norm = distance.final_avg_query_norm = -1.0
    value = made(embeddings)
    assert (distance.initial_avg_query_norm, distance.final_avg_query_norm) == norms
    distance.collect_stats = False
    assert_close(value, expected)
    for found, exact in zip(
        torch.autograd.grad(value, embeddings),
        torch.autograd.grad(expected, embeddings),
        strict=True,
    ):
        assert_close(found, exact)


# --- the loss of the heads --------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [False, True])
def test_errors_that_no_width_explains_pass(state: bool) -> None:
    class Fails(losses.ContrastiveLoss):
        def forward(self, *args: Any) -> Any:
            raise torch.cuda.OutOfMemoryError("full") if state else RuntimeError("full")

    loss = Fails()
    if state:
        loss.register_buffer("memory", torch.zeros(1))
    with pytest.raises(RuntimeError, match="full"):
        EnsembleLoss(loss, HEADS)(vectors(), LABELS)


def test_mined_tuples_serve_every_head() -> None:
    embeddings = vectors()
    mined = miners.BatchHardMiner()(embeddings, LABELS)
    base = losses.TripletMarginLoss()
    exact = [base(head, LABELS, mined) for head in split_heads(embeddings, HEADS).unbind(1)]
    value = EnsembleLoss(base, HEADS)(embeddings, LABELS, mined)
    assert_close(value, sum(exact) / HEADS)
    assert not torch.isclose(value, EnsembleLoss(base, HEADS)(embeddings, LABELS))


def test_a_memory_for_each_head() -> None:
    base = losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, memory_size=20)
    loss = EnsembleLoss(base, HEADS)
    first, second = (F.normalize(vectors(dtype=torch.float32)) for _ in range(2))
    fresh = EnsembleLoss(losses.ContrastiveLoss(), HEADS)
    assert_close(loss(first, LABELS), fresh(first, LABELS))
    assert not torch.isclose(loss(second, LABELS), fresh(second, LABELS))
    with pytest.raises(ValueError, match="indices_tuple: CrossBatchMemory would take"):
        loss(first, LABELS, miners.BatchHardMiner()(first, LABELS))


# --- HORDE on an ensemble ---------------------------------------------------------------------------------


def test_horde_reads_the_map_of_the_heads() -> None:
    first = EnsembleLoss(
        BinomialDevianceLoss(),
        HEADS,
        embedding_regularizer=DivergenceLoss(HEADS),
        embedding_reg_weight=0.5,
    )
    made, x, base = ensemble(), images(), BinomialDevianceLoss()
    settings: Any = {"moment_dim": 7, "projections": "cascaded", "collect_stats": True}
    loss = HORDELoss(base, REDUCED, HEADS * WIDTH, embedding_loss=first, **settings).double()
    tap = FeatureTap({"feature_map": made.feature_map})
    embeddings = made(x)
    expected = loss(embeddings, LABELS, features=tap.take(embeddings)["feature_map"])
    value = loss.attach(made)(made(x), LABELS)
    assert_close(value, expected.item())
    assert_close(value, loss.order_1_loss + loss.order_2_loss + loss.order_3_loss)
    value.backward()
    for name, parameter in (*made.named_parameters(), *loss.named_parameters()):
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
