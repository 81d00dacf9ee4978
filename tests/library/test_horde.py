"""HORDE against the paper in loops, finite differences, and every contract a PML loss keeps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

from pml_regularizers import HORDELoss
from tests.library.expected import orders as expected_orders
from tests.library.test_moments import sample
from tests.support.tolerances import assert_close

CHANNELS, WIDTH, DIM, ORDER = 5, 4, 6, 4
LABELS = torch.tensor([0, 1, 0, 2, 1, 0])

VARIANTS: dict[str, dict[str, Any]] = {
    "cascaded": {},
    "cascaded_signs": {"init": "rademacher"},
    "cascaded_raw": {"embed_orders": False},
    "independent": {"projections": "independent"},
    "random": {"projections": "random"},
    "sketch": {"projections": "sketch"},
    "sketch_embedded": {"projections": "sketch", "embed_orders": True},
    "random_embedded": {"projections": "random", "embed_orders": True},
    "unnormalized": {"normalize": False},
    "random_unnormalized": {"projections": "random", "normalize": False},
    "mean": {"order_weights": "mean"},
    "weighted": {"order_weights": [0.5, 0.0, 2.0]},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str = "cascaded", base: nn.Module | None = None, **kwargs: Any) -> HORDELoss:
    settings = {
        "in_channels": CHANNELS,
        "embedding_size": WIDTH,
        "order": ORDER,
        "moment_dim": DIM,
        "projections": "cascaded",
        **VARIANTS[variant],
        **kwargs,
    }
    return HORDELoss(base or losses.ContrastiveLoss(), **settings)


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Embeddings and maps of the six images that LABELS names."""
    embeddings = torch.randn(len(LABELS), WIDTH, dtype=torch.float64)
    features = sample("map", images=len(LABELS))
    assert isinstance(features, Tensor)
    return embeddings.to(dtype), features.to(dtype)


# Value and gradient


@every_variant
def test_what_the_orders_see_equals_the_oracle(variant: str) -> None:
    """The losses above look at directions only: this is where lengths are compared."""
    loss, (_, features) = build(variant), batch()
    orders = loss.order_embeddings(features)
    assert len(orders) == ORDER - 1
    for vectors, exact in zip(orders, expected_orders(loss, features), strict=True):
        assert_close(vectors, exact)


def test_order_weights_weigh_the_orders() -> None:
    embeddings, features = batch()
    unit = build(order=4)
    parts = [
        losses.ContrastiveLoss()(vectors, LABELS)
        for vectors in [embeddings, *unit.order_embeddings(features)]
    ]
    for weights, expected in (
        ("sum", [1.0, 1.0, 1.0]),
        ("mean", [1 / 3, 1 / 3, 1 / 3]),
        ((3, 0.5, 0), [3.0, 0.5, 0.0]),
        (0.3, [0.3, 0.3, 0.3]),
        (2, [2.0, 2.0, 2.0]),
    ):
        loss = build(order_weights=weights)
        loss.load_state_dict(unit.state_dict())
        assert loss.order_weights == expected
        exact = parts[0] + sum(w * part for w, part in zip(expected, parts[1:], strict=True))
        assert_close(loss(embeddings, LABELS, features=features), exact)


# The base loss

PROXY_LOSSES: dict[str, Callable[[int], nn.Module]] = {
    "arcface": lambda width: losses.ArcFaceLoss(3, width),
    "proxy_anchor": lambda width: losses.ProxyAnchorLoss(3, width),
}


def test_the_orders_losses_draw_no_random_numbers() -> None:
    base = losses.ArcFaceLoss(num_classes=3, embedding_size=WIDTH)
    states = []
    for loss in (losses.ContrastiveLoss(), base):
        torch.manual_seed(3)
        build(base=loss)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("projections", ["cascaded", "independent", "random", "sketch"])
def test_trained_projections_are_embedded_and_fixed_ones_are_not(projections: str) -> None:
    for embed_orders in (None, True, False):
        loss = build(projections=projections, embed_orders=embed_orders)
        trained = projections in ("cascaded", "independent")
        expected = trained if embed_orders is None else embed_orders
        for embedding in loss.embeddings.values():
            assert isinstance(embedding, nn.Linear if expected else nn.Identity)


def test_the_default_is_the_sketch_that_helped() -> None:
    loss = HORDELoss(losses.ContrastiveLoss(), CHANNELS, WIDTH)
    assert (loss.order, loss.moment_dim, loss.moments.projections) == (3, 1024, "sketch")
    assert list(loss.parameters()) == []
    assert loss.order_weights == [1.0, 1.0]


@pytest.mark.parametrize(
    "base",
    [
        losses.AngularLoss(),  # of triplets
        losses.FastAPLoss(),  # of rows
        losses.MarginLoss(learn_beta=True, num_classes=3),
        losses.MultiSimilarityLoss(),  # of pairs
        losses.NormalizedSoftmaxLoss(3, WIDTH),
        losses.NPairsLoss(),
        losses.SoftTripleLoss(3, WIDTH),
        losses.SubCenterArcFaceLoss(num_classes=3, embedding_size=WIDTH),
    ],
    ids=lambda base: type(base).__name__,
)
def test_any_loss_serves_as_base(base: nn.Module) -> None:
    loss = build(base=base)
    embeddings, features = batch(torch.float32)
    expected = sum(base(v, LABELS) for v in [embeddings, *loss.order_embeddings(features)])
    value = loss(embeddings.requires_grad_(), LABELS, features=features)
    assert_close(value, expected)
    value.backward()
    for parameter in loss.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:__array_wrap__ must:DeprecationWarning")  # of scipy, in PML
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (losses.ArcFaceLoss, (3, WIDTH)),
        (losses.LargeMarginSoftmaxLoss, (3, WIDTH)),
        (losses.P2SGradLoss, (WIDTH, 3)),
        (losses.ProxyAnchorLoss, (3, WIDTH)),
        (losses.SoftTripleLoss, (3, WIDTH)),
    ],
)
def test_weights_for_another_width_say_what_to_do(kind: Any, sizes: tuple[int, int]) -> None:
    base = kind(*sizes)
    embeddings, features = batch(torch.float32)
    loss = build(base=base, projections="sketch")
    with pytest.raises(ValueError, match="that must be 6; embed_orders=True makes every order as"):
        loss(embeddings, LABELS, features=features)


def test_a_mined_tuple_serves_every_order() -> None:
    embeddings, features = batch()
    loss = build()
    for miner in (miners.TripletMarginMiner(margin=0.5), miners.PairMarginMiner(0.9, 1.1)):
        mined = miner(embeddings, LABELS)
        assert 0 < len(mined[0]) < 24
        vectors = [embeddings, *loss.order_embeddings(features)]
        expected = sum(losses.ContrastiveLoss()(v, LABELS, mined) for v in vectors)
        value = loss(embeddings, LABELS, mined, features=features)
        assert_close(value, expected)
        assert not torch.isclose(value, loss(embeddings, LABELS, features=features))


def test_every_order_remembers_its_own_vectors_with_cross_batch_memory() -> None:
    base = losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, memory_size=24)
    loss, alone = build(base=base), copy.deepcopy(base)
    kept: list[list[Tensor]] = [[] for _ in range(ORDER)]
    for _ in range(3):
        embeddings, features = batch(torch.float32)
        vectors = [embeddings, *loss.order_embeddings(features)]
        loss(embeddings, LABELS, features=features).backward()
        alone(embeddings, LABELS)
        for order, seen in zip(vectors, kept, strict=True):
            seen.append(order.detach())
    assert base.queue_idx == 0
    for memory, seen in zip(loss.losses.values(), kept, strict=True):
        assert memory.queue_idx == 18
        assert_close(memory.embedding_memory[:18], torch.cat(seen))
    assert torch.equal(loss.losses["order_1"].embedding_memory, alone.embedding_memory)
