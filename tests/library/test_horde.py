"""HORDE's orders, their losses and the descriptor; test_contract.py has its values."""

from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

from pml_regularizers import HighOrderMoments, HORDELoss
from tests.library.expected import orders as expected_orders
from tests.oracles import horde as oracle
from tests.support.tolerances import assert_close

CHANNELS, WIDTH, DIM, ORDER = 5, 4, 6, 4
LABELS = torch.tensor([0, 1, 0, 2, 1, 0])


def build(base: nn.Module | None = None, **kwargs: Any) -> HORDELoss:
    settings = {"order": ORDER, "moment_dim": DIM, "projections": "cascaded", **kwargs}
    return HORDELoss(base or losses.ContrastiveLoss(), CHANNELS, WIDTH, **settings)


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Embeddings and maps of the six images that LABELS names."""
    embeddings, features = torch.randn(6, WIDTH), torch.randn(6, CHANNELS, 2, 3)
    return embeddings.to(dtype), features.to(dtype)


@pytest.mark.parametrize("projections", ["cascaded", "independent", "random", "sketch"])
@pytest.mark.parametrize("embed_orders", [None, True, False])
def test_orders_that_are_not_normalised(projections: str, embed_orders: bool | None) -> None:
    """Losses look at directions only: this is where lengths are compared.

    Trained projections are embedded, fixed ones are not, unless `embed_orders` says otherwise.
    """
    loss = build(projections=projections, embed_orders=embed_orders, normalize=False)
    features = batch()[1]
    found, right = loss.order_embeddings(features), expected_orders(loss, features)
    for vectors, exact in zip(found, right, strict=True):
        assert_close(vectors, exact)
    trained = projections in ("cascaded", "independent")
    embedded = trained if embed_orders is None else embed_orders
    assert {order.shape[1] for order in found} == {WIDTH if embedded else DIM}


def test_the_moments_alone_have_the_defaults_of_the_loss() -> None:
    alone, loss = (signature(kind).parameters for kind in (HighOrderMoments, HORDELoss))
    shared = alone.keys() & loss.keys()
    assert len(shared) == 7 and all(alone[name].default == loss[name].default for name in shared)


def test_order_weights_weigh_the_orders() -> None:
    for given, expected in (
        ("sum", [1.0, 1.0, 1.0]),
        ("mean", [1 / 3, 1 / 3, 1 / 3]),
        ((3, 0.5, 0), [3.0, 0.5, 0.0]),
        (2, [2.0, 2.0, 2.0]),
    ):
        embeddings, features = batch()
        loss = build(order_weights=given)
        assert loss.order_weights == expected
        vectors = [embeddings, *loss.order_embeddings(features)]
        mined = miners.PairMarginMiner(0.9, 1.1)(embeddings, LABELS)
        assert 0 < len(mined[0]) < 24
        for tuples in (None, mined):  # which serve every order
            parts = [losses.ContrastiveLoss()(order, LABELS, tuples) for order in vectors]
            exact = sum(w * part for w, part in zip([1, *expected], parts, strict=True))
            assert_close(loss(embeddings, LABELS, tuples, features=features), exact)


@pytest.mark.parametrize(
    "base",
    [
        losses.AngularLoss(),  # of triplets
        losses.FastAPLoss(),  # of rows
        losses.MarginLoss(learn_beta=True, num_classes=3),
        losses.MultiSimilarityLoss(),  # of pairs
        losses.NormalizedSoftmaxLoss(3, WIDTH),  # whose num_classes is 0
        losses.ProxyNCALoss(3, WIDTH),
        losses.SoftTripleLoss(3, WIDTH),
    ],
    ids=lambda base: type(base).__name__,
)
def test_any_loss_serves_as_base(base: nn.Module) -> None:
    loss = build(base)
    embeddings, features = batch(torch.float32)
    expected = sum(base(v, LABELS) for v in [embeddings, *loss.order_embeddings(features)])
    value = loss(embeddings.requires_grad_(), LABELS, features=features.requires_grad_())
    assert_close(value, expected)
    value.backward()
    for parameter in loss.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


def test_every_order_remembers_its_own_vectors_with_cross_batch_memory() -> None:
    base = losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, memory_size=24)
    loss = build(base)
    seen: list[list[Tensor]] = []
    for _ in range(3):
        embeddings, features = batch(torch.float32)
        seen.append([embeddings, *loss.order_embeddings(features)])
        loss(embeddings, LABELS, features=features)
    assert loss.losses["order_1"] is base
    for memory, *vectors in zip(loss.losses.values(), *seen, strict=True):
        assert_close(memory.embedding_memory[:18], torch.cat(vectors))


@pytest.mark.parametrize("projections", ["cascaded", "sketch"])
def test_descriptor_is_all_orders_at_length_one(projections: str) -> None:
    loss, (embeddings, features) = build(projections=projections), batch()
    descriptor = loss.descriptor(embeddings.requires_grad_(), features)
    assert not descriptor.requires_grad
    vectors = [embeddings.detach().numpy(), *expected_orders(loss, features)]
    found = loss.split_orders(descriptor)
    assert list(found) == [f"order_{k}" for k in range(1, ORDER + 1)]
    assert torch.equal(torch.cat([*found.values()], dim=1), descriptor)
    for order, expected in zip(found.values(), vectors, strict=True):
        assert_close(order, np.stack([oracle.unit(vector) for vector in expected]))
