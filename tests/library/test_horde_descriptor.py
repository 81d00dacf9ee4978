"""HORDE's descriptor of all orders, its PCA, and what is saved of it."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses
from sklearn.decomposition import PCA
from torch import nn

from pml_regularizers import HORDELoss
from tests.library.expected import orders as expected_orders
from tests.library.test_horde import LABELS, ORDER, PROXY_LOSSES, WIDTH, batch, build, every_variant
from tests.oracles import horde as oracle
from tests.support.tolerances import assert_close

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


def test_pca_is_the_same_for_the_same_images_in_another_order() -> None:
    loss, images = build(), torch.randn(50, 16, dtype=torch.float64)
    loss.fit_pca(images)
    components = loss.pca_components
    loss.fit_pca(images.flip(0))
    assert_close(loss.pca_components, components)
    # An eigenvector has no sign of its own: its largest entry is made positive.
    assert (components.amax(dim=0) == components.abs().amax(dim=0)).all()


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
