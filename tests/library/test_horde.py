"""HORDE against the paper in loops, finite differences, and every contract a PML loss keeps."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from sklearn.decomposition import PCA
from torch import Tensor, nn

from pml_regularizers import DistributedLoss, HORDELoss, MissingFeaturesError
from tests.library.expected import orders as expected_orders
from tests.library.test_moments import sample
from tests.oracles import horde as oracle
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


@every_variant
def test_gradient_by_finite_differences(variant: str) -> None:
    loss = build(variant, moment_dim=3).double()
    embeddings, features = batch()
    names = [name for name, _ in loss.named_parameters()]

    def value(embeddings: Tensor, features: Tensor, *state: Tensor) -> Tensor:
        parameters = dict(zip(names, state, strict=True))
        result: Tensor = torch.func.functional_call(
            loss, parameters, (embeddings, LABELS), {"features": features}
        )
        return result

    inputs = [embeddings, features[:, :, :1], *(p.detach() for p in loss.parameters())]
    inputs = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(value, inputs, fast_mode=True)


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


@pytest.mark.parametrize("projections", ["random", "sketch"])
@pytest.mark.parametrize(
    "make",
    [
        *PROXY_LOSSES.values(),
        lambda width: losses.CosFaceLoss(3, width),
        lambda width: losses.ProxyNCALoss(3, width),
        lambda width: losses.SoftTripleLoss(3, width),
    ],
)
def test_proxies_of_the_embeddings_width_with_fixed_projections(
    make: Callable[[int], nn.Module], projections: str
) -> None:
    """They fit no order of width d: the orders are embedded, and copies and embeddings are trained."""
    base = make(WIDTH).double()
    loss = build(base=base, projections=projections).double()
    embeddings, features = batch()
    embeddings.requires_grad_(), features.requires_grad_()
    orders = [torch.from_numpy(order) for order in expected_orders(loss, features.detach())]
    assert {order.shape for order in orders} == {(len(LABELS), WIDTH)}
    value = loss(embeddings, LABELS, features=features)
    assert_close(value, sum(base(v, LABELS) for v in [embeddings, *orders]))
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    before = copy.deepcopy(loss.state_dict())
    value.backward()
    optimizer.step()
    assert features.grad is not None and features.grad.abs().max() > 0
    changed = {name for name, saved in before.items() if not saved.equal(loss.state_dict()[name])}
    copies = {
        f"losses.order_{k}.{n}" for k in range(1, ORDER + 1) for n, _ in base.named_parameters()
    }
    assert changed == copies | {f"embeddings.order_{k}.weight" for k in range(2, ORDER + 1)}
    again = build(base=make(WIDTH), projections=projections).double()
    again.load_state_dict(loss.state_dict())
    assert again(embeddings, LABELS, features=features) == loss(
        embeddings, LABELS, features=features
    )


@pytest.mark.parametrize("projections", ["random", "sketch"])
def test_with_fixed_projections_only_a_loss_that_needs_it_is_embedded(projections: str) -> None:
    """Also on the meta device, where no call shows what fits."""
    for device in ("cpu", "meta"):
        with torch.device(device):
            for base, embedded in (
                (losses.ContrastiveLoss(), False),
                (losses.MarginLoss(learn_beta=True), False),
                (losses.ProxyAnchorLoss(3, WIDTH), True),
                (losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH), True),
            ):
                loss = build(base=base, projections=projections)
                assert isinstance(loss.embeddings["order_2"], nn.Linear) == embedded, base
            first = build(
                base=losses.ProxyAnchorLoss(3, DIM),
                projections=projections,
                first_loss=losses.ProxyAnchorLoss(3, WIDTH),
            )
            assert isinstance(first.embeddings["order_2"], nn.Identity)


@pytest.mark.parametrize(
    "base",
    [
        losses.AngularLoss(),
        losses.CircleLoss(),
        losses.CosFaceLoss(3, WIDTH),
        losses.FastAPLoss(),
        losses.GeneralizedLiftedStructureLoss(),
        losses.IntraPairVarianceLoss(),
        losses.MarginLoss(learn_beta=True),
        losses.MarginLoss(learn_beta=True, num_classes=3),
        losses.MultiSimilarityLoss(),
        losses.NCALoss(),
        losses.NormalizedSoftmaxLoss(3, WIDTH),
        losses.NPairsLoss(),
        losses.NTXentLoss(),
        losses.ProxyNCALoss(3, WIDTH),
        losses.SignalToNoiseRatioContrastiveLoss(),
        losses.SoftTripleLoss(3, WIDTH),
        losses.SubCenterArcFaceLoss(num_classes=3, embedding_size=WIDTH),
        losses.SupConLoss(),
        losses.TupletMarginLoss(),
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


@pytest.mark.parametrize(
    "make",
    [
        *PROXY_LOSSES.values(),
        lambda _: losses.MarginLoss(learn_beta=True, triplets_per_anchor=2),  # draws its triplets
    ],
)
def test_construction_and_call_leave_the_global_generators_alone(
    make: Callable[[int], nn.Module],
) -> None:
    base = make(WIDTH)
    torch.manual_seed(3)
    build(base=losses.ContrastiveLoss())
    after_drawing_matrices = torch.get_rng_state()
    torch.manual_seed(3)
    states = random.getstate(), str(np.random.get_state())  # noqa: NPY002
    build(base=base)
    assert torch.equal(torch.get_rng_state(), after_drawing_matrices)
    embeddings, features = batch()
    loss = build()
    before_call = torch.get_rng_state()
    loss(embeddings, LABELS, features=features)
    loss.descriptor(embeddings, features)
    loss.fit_pca(loss.descriptor(embeddings, features), 2)
    assert torch.equal(torch.get_rng_state(), before_call)
    assert states == (random.getstate(), str(np.random.get_state()))  # noqa: NPY002


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"reducer": reducers.SumReducer()}, r"reducer: .*\(ContrastiveLoss\(reducer="),
        ({"distance": distances.CosineSimilarity()}, r"distance: .*\(ContrastiveLoss\(distance="),
        ({"order": 1}, "order: expected at least 2, got 1"),
        ({"embedding_size": 0}, "embedding_size: expected at least 1"),
        ({"order_weights": "max"}, 'order_weights: expected "sum", "mean", a number or 3 of them'),
        (
            {"order_weights": [1.0, 1.0]},
            "order_weights: expected 3 numbers, for orders 2 to 4, got 2",
        ),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**kwargs)


@pytest.mark.parametrize(
    ("base", "kwargs", "message"),
    [
        (lambda: "contrastive", {}, "loss: expected a PML loss, got str"),
        (
            lambda: losses.SelfSupervisedLoss(losses.ContrastiveLoss()),
            {},
            "loss: expected a loss of embeddings and labels, got SelfSupervisedLoss.* the ContrastiveLoss in it",
        ),
        (lambda: build(), {}, "HORDELoss reads features itself"),
        (lambda: losses.MultipleLosses([build()]), {}, "HORDELoss reads features itself"),
        (
            lambda: losses.ContrastiveLoss(reducer=reducers.DoNothingReducer()),
            {},
            "returns one number, got one with DoNothingReducer",
        ),
        (
            lambda: PROXY_LOSSES["arcface"](WIDTH + 1),
            {},
            f"embeddings of width {WIDTH} in two",
        ),
        (
            lambda: PROXY_LOSSES["arcface"](WIDTH),
            {"embed_orders": False},
            rf"embeddings of width {DIM} in two classes failed[\s\S]*pass {WIDTH}, and embed_orders=True",
        ),
        (
            lambda: losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH + 3),
            {},
            f"CrossBatchMemory with 8 embeddings of width {WIDTH} in two",
        ),
    ],
)
def test_base_losses_that_cannot_serve(
    base: Callable[[], Any], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(base=base(), **kwargs)


def test_order_1_may_have_a_loss_of_its_own() -> None:
    first = losses.ArcFaceLoss(3, WIDTH).double()
    loss = build(first_loss=first, embed_orders=False).double()  # which fits no order but the first
    embeddings, features = batch()
    base = losses.ContrastiveLoss()
    exact = first(embeddings, LABELS) + sum(
        base(order, LABELS) for order in loss.order_embeddings(features)
    )
    assert_close(loss(embeddings, LABELS, features=features), exact)
    assert isinstance(first.W, nn.Parameter) and first.W is not loss.losses["order_1"].W
    assert not [name for name, _ in loss.losses.named_parameters() if "order_1" not in name]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (losses.ContrastiveLoss, "first_loss: expected a PML loss, got type"),
        (losses.ArcFaceLoss(3, WIDTH + 1), "first_loss: a trial call of ArcFaceLoss"),
        (DistributedLoss(losses.ContrastiveLoss()), "first_loss: DistributedLoss goes around"),
    ],
)
def test_first_losses_that_cannot_serve(first: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(first_loss=first)


def test_calls_that_do_not_fit() -> None:
    loss = build()
    embeddings, features = batch()
    with pytest.raises(MissingFeaturesError, match=r"pass features=.* or call loss.attach"):
        loss(embeddings, LABELS)
    with pytest.raises(
        ValueError, match=r"features: expected those of the 6 embeddings, got shape \(5, "
    ):
        loss(embeddings, LABELS, features=features[:5])
    with pytest.raises(ValueError, match="ref_emb: HORDELoss compares the samples of one batch"):
        loss(embeddings, LABELS, ref_emb=embeddings, ref_labels=LABELS, features=features)
    with pytest.raises(ValueError, match="features: expected a tensor or a tuple"):
        loss(embeddings, LABELS, features=[features])
    with pytest.raises(ValueError, match=r"pass in_channels=\.\.\. to match the trunk"):
        loss(embeddings, LABELS, features=features[:, :3])
    with pytest.raises(MissingFeaturesError, match="only while the loss is being called"):
        _ = loss.features


# Degenerate batches


@pytest.mark.parametrize("faint", [0.0, 1e-35, 1e-25, 1e-18, 1e-12])
def test_dead_and_faint_maps_are_harmless(faint: float) -> None:
    loss = build()
    embeddings = torch.randn(6, WIDTH, requires_grad=True)
    features = torch.randn(6, CHANNELS, 2, 2)
    features[:2] *= faint
    features.requires_grad_()
    value = loss(embeddings, LABELS, features=features)
    value.backward()
    assert value.isfinite()
    for tensor in (embeddings, features, *loss.parameters()):
        assert tensor.grad is not None and tensor.grad.isfinite().all()


# The descriptor of the dagger rows


@every_variant
def test_descriptor_is_all_orders_at_length_one(variant: str) -> None:
    loss = build(variant)
    embeddings, features = batch()
    descriptor = loss.descriptor(embeddings.requires_grad_(), features)
    assert not descriptor.requires_grad
    vectors = [embeddings.detach().numpy(), *expected_orders(loss, features)]
    expected = [
        np.concatenate([oracle.unit(v) for v in image]) for image in zip(*vectors, strict=True)
    ]
    assert descriptor.shape[1] == sum(order.shape[1] for order in vectors)
    assert_close(descriptor, torch.from_numpy(np.stack(expected)))


@pytest.mark.parametrize(("count", "size"), [(200, None), (200, 7), (9, 3), (12, 11)])
def test_pca_equals_sklearn(count: int, size: int | None) -> None:
    loss = build()
    images = torch.randn(count, 16, dtype=torch.float64) @ torch.randn(16, 16).double() + 3
    test_images = torch.randn(5, 16, dtype=torch.float64)
    loss.fit_pca(images, size)
    exact = PCA(size or WIDTH, svd_solver="full").fit(images.numpy())
    reduced, expected = (
        loss.reduce(test_images),
        torch.from_numpy(exact.transform(test_images.numpy())),
    )
    signs = (reduced * expected).sum(dim=0).sign()
    assert_close(reduced * signs, expected)
    assert loss.pca_components.shape == (16, size or WIDTH)


def test_embeddings_of_another_width() -> None:
    embeddings, features = batch()
    wide = torch.cat([embeddings, embeddings], dim=1)
    for call in (
        lambda: build()(wide, LABELS, features=features),
        lambda: build().descriptor(wide),
    ):
        with pytest.raises(ValueError, match=rf"embeddings: expected \(N, {WIDTH}\), got"):
            call()


def test_a_base_that_cannot_be_called_is_refused_at_once() -> None:
    for base in (losses.VICRegLoss(), nn.CrossEntropyLoss(), nn.Identity()):
        with pytest.raises(ValueError, match=f"a trial call of {type(base).__name__}"):
            build(base=base)
    with pytest.raises(
        ValueError, match=r"DistributedLoss goes around, as in DistributedLoss.HORDELoss"
    ):
        build(base=DistributedLoss(losses.ContrastiveLoss()))


def test_a_memory_takes_no_tuples_of_the_batch() -> None:
    memory = losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, memory_size=20)
    loss = build(base=memory)
    embeddings, features = batch(torch.float32)
    tuples = miners.BatchHardMiner()(embeddings, LABELS)
    with pytest.raises(ValueError, match="give it the miner"):
        loss(embeddings, LABELS, tuples, features=features)
    assert loss(embeddings, LABELS, features=features).isfinite()


def test_pca_is_the_same_for_the_same_images_in_another_order() -> None:
    loss, images = build(), torch.randn(50, 16, dtype=torch.float64)
    loss.fit_pca(images)
    components = loss.pca_components
    loss.fit_pca(images.flip(0))
    assert_close(loss.pca_components, components)
    # An eigenvector has no sign of its own: its largest entry is made positive.
    assert (components.amax(dim=0) == components.abs().amax(dim=0)).all()


def test_pca_arguments() -> None:
    loss = build()
    with pytest.raises(ValueError, match="reduce: no PCA is fitted; call fit_pca"):
        loss.reduce(torch.randn(3, 16))
    for shape, size in (((3, 16), 4), ((16, 3), 4), ((16,), 4), ((16, 16), 0)):
        with pytest.raises(ValueError, match=rf"descriptors: expected a matrix .*size={size}"):
            loss.fit_pca(torch.randn(*shape), size)


# Life outside the call


def fitted(**kwargs: Any) -> HORDELoss:
    loss = build(**kwargs)
    loss.fit_pca(torch.randn(30, ORDER * WIDTH))
    return loss


def same_behaviour(one: HORDELoss, other: HORDELoss) -> bool:
    embeddings, features = batch(torch.float32)
    same = torch.equal(
        one(embeddings, LABELS, features=features), other(embeddings, LABELS, features=features)
    )
    if one.pca_mean is None or other.pca_mean is None:
        return same and one.pca_mean is other.pca_mean
    descriptor = one.descriptor(embeddings, features)
    return same and torch.equal(one.reduce(descriptor), other.reduce(descriptor))


@pytest.mark.parametrize("base", PROXY_LOSSES)
def test_state_dict_carries_the_fitted_pca_and_its_absence(base: str) -> None:
    loss, fresh = fitted(base=PROXY_LOSSES[base](WIDTH)), build(base=PROXY_LOSSES[base](WIDTH))
    unfitted = copy.deepcopy(fresh.state_dict())
    assert not same_behaviour(loss, fresh)
    fresh.load_state_dict(loss.state_dict())
    assert same_behaviour(loss, fresh)
    loss.fit_pca(torch.randn(30, ORDER * WIDTH), size=2)  # another size than the loaded one's
    fresh.load_state_dict(loss.state_dict())
    assert same_behaviour(loss, fresh) and fresh.pca_components.shape == (ORDER * WIDTH, 2)
    fresh.load_state_dict(unfitted)
    assert fresh.pca_mean is None and fresh.pca_components is None
    assert set(fresh.state_dict()) == set(unfitted)
    with pytest.raises(ValueError, match="no PCA is fitted"):
        fresh.reduce(torch.randn(3, ORDER * WIDTH))


@pytest.mark.parametrize(
    ("damage", "came"),
    [
        (lambda state: state.update(pca_mean=state["pca_mean"][:1]), r"\(1,\) torch.float32"),
        (lambda state: state.update(pca_mean=state["pca_mean"][0]), r"\(\) torch.float32"),
        (
            lambda state: state.update(pca_components=state["pca_components"][:, 0]),
            r"\(16,\) torch.float32",
        ),
        (lambda state: state.update(pca_components=state["pca_components"].int()), "torch.int32"),
        (lambda state: state.pop("pca_components"), "and nothing"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_pca_is_refused(damage: Callable[[Any], Any], came: str, strict: bool) -> None:
    """Most of these would be broadcast or rounded, and `reduce` would give other numbers."""
    state, fresh = fitted().state_dict(), build()
    damage(state)
    with pytest.raises(
        RuntimeError, match=rf"0\.pca_mean, pca_components: expected .* got .*{came}"
    ):
        nn.Sequential(fresh).load_state_dict(
            {f"0.{name}": value for name, value in state.items()}, strict=strict
        )
    assert fresh.pca_mean is None and fresh.pca_components is None


@pytest.mark.parametrize(
    "make",
    [
        lambda _: losses.TripletMarginLoss(),
        *PROXY_LOSSES.values(),
        lambda width: losses.ProxyNCALoss(3, width),  # made on the CPU all the same
        lambda _: losses.DynamicSoftMarginLoss(),
    ],
)
def test_built_at_full_size_on_the_meta_device(make: Callable[[int], nn.Module]) -> None:
    with torch.device("meta"):
        loss = HORDELoss(make(512), 2048, 512)
    own = [*loss.moments.parameters(), *loss.embeddings.parameters()]
    assert {parameter.device.type for parameter in own} == {"meta"}
    # Five matrices (2048, 8192) and four embeddings (8192, 512).
    assert sum(p.numel() for p in own) == 5 * 2048 * 8192 + 4 * 8192 * 512
