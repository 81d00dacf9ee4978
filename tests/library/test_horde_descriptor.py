"""HORDE's descriptor of all orders, and HORDE on the meta device."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses
from torch import nn

from pml_regularizers import HORDELoss
from tests.library.expected import orders as expected_orders
from tests.library.test_horde import LABELS, ORDER, PROXY_LOSSES, batch, build, every_variant
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
    found = loss.split_orders(descriptor)
    assert list(found) == [f"order_{k}" for k in range(1, ORDER + 1)]
    assert torch.equal(torch.cat([*found.values()], dim=1), descriptor)
    assert [x.shape[1] for x in found.values()] == [order.shape[1] for order in vectors]


# The meta device


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
        loss = HORDELoss(make(512), 2048, 512, projections="cascaded", order=5, moment_dim=8192)
    own = [*loss.moments.parameters(), *loss.embeddings.parameters()]
    assert {parameter.device.type for parameter in own} == {"meta"}
    # Five matrices (2048, 8192) and four embeddings (8192, 512).
    assert sum(p.numel() for p in own) == 5 * 2048 * 8192 + 4 * 8192 * 512


@every_variant
def test_state_without_values_is_refused(variant: str) -> None:
    """Torch's matrix products with a matrix on the meta device return uninitialised memory."""
    loss = build(variant)
    embeddings, features = batch(torch.float32)
    loss.moments.to("meta")
    for call in (
        lambda: loss(embeddings, LABELS, features=features),
        lambda: loss.descriptor(embeddings, features),
        lambda: loss.order_embeddings(features),
        lambda: loss.moments(features),
    ):
        with pytest.raises(ValueError, match="the projections are on the meta device"):
            call()
