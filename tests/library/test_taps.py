"""Taps: copies, checkpointing, compilation, threads, and what they leave in memory."""

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pml_regularizers import (
    BinomialDevianceLoss,
    EmbeddingHead,
    FeatureLoss,
    HORDELoss,
    MissingFeaturesError,
)
from pml_regularizers.features.feature_loss import already_reduced
from pml_regularizers.features.feature_tap import FeatureTap
from tests.library.test_features import attached, explicit, gradients
from tests.library.test_parameter_groups import horde
from tests.support.tolerances import assert_close
from tests.support.toys import WIDTH, Network, images, timm_model


class Segmented(nn.Module):
    """A network whose trunk, with the tapped head's map, is recomputed in the backward pass."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.network = Network()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            maps = self.stage(x)
        else:
            maps = checkpoint(self.stage, x, use_reentrant=self.use_reentrant)
        embeddings: Tensor = self.network.head._embed(maps.mean(dim=(2, 3)))
        return embeddings

    def stage(self, x: Tensor) -> Tensor:
        maps: Tensor = self.network.head.feature_map(self.network.trunk(x))
        return maps


def test_checkpointing_gives_the_exact_gradients() -> None:
    plain, (x, labels) = Segmented(None), images()
    recomputed = Segmented(False)
    recomputed.load_state_dict(plain.state_dict())
    one = attached(plain.network)
    other = attached(recomputed.network)
    other.load_state_dict(one.state_dict())
    for _ in range(3):  # what the recomputation leaves behind would show in the next step
        expected, value = one(plain(x), labels), other(recomputed(x), labels)
        assert torch.equal(value, expected)
        exact = gradients_by_backward(expected, plain, one)
        for ours, theirs in zip(
            gradients_by_backward(value, recomputed, other), exact, strict=True
        ):
            assert torch.equal(ours, theirs)


def gradients_by_backward(value: Tensor, *modules: nn.Module) -> list[Tensor]:
    for module in modules:
        module.zero_grad()
    value.backward()
    return [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]


def test_reentrant_checkpointing_is_refused() -> None:
    network, (x, labels) = Segmented(True), images()
    loss = attached(network.network)
    embeddings = network(x.requires_grad_())
    with pytest.raises(MissingFeaturesError, match="re-entrant activation checkpointing"):
        loss(embeddings, labels)
    embeddings.sum().backward()  # whose recomputation leaves no record
    with pytest.raises(MissingFeaturesError, match="not known to be those of these embeddings"):
        loss(torch.randn(8, WIDTH), labels)


def test_a_stage_that_checkpointing_bypasses_is_an_error_not_a_wrong_value() -> None:
    trunk = timm_model("test_resnet", num_classes=0, global_pool="").train()
    head = EmbeddingHead.for_trunk(trunk, WIDTH)
    loss = HORDELoss(BinomialDevianceLoss(), trunk.num_features, WIDTH, order=3, moment_dim=8)
    loss.attach(trunk.layer4)
    x, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 0, 1, 1])
    loss(head(trunk(x)), labels)
    trunk.set_grad_checkpointing()
    with pytest.raises(MissingFeaturesError, match="no features were recorded"):
        loss(head(trunk(x)), labels)


def test_a_compiled_network_gives_the_same_value_without_a_graph_break() -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    expected = loss(network(x), labels)
    exact = gradients(expected, network, loss)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        value = loss(compiled(x), labels)
        assert_close(value, expected)
        for ours, theirs in zip(gradients(value, network, loss), exact, strict=True):
            assert_close(ours, theirs)
    with torch.no_grad():
        assert_close(loss(compiled(x), labels), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_network_and_loss_copied_together_stay_connected(again: Callable[[Any], Any]) -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    network(x)  # a pending record is not copied
    new_network, new_loss = again((network, loss))
    loss.clear()
    with pytest.raises(MissingFeaturesError, match="no features were recorded"):
        new_loss(torch.randn(8, WIDTH), labels)
    for _ in range(2):
        expected = loss(network(x), labels)
        assert torch.equal(new_loss(new_network(x), labels), expected)
    with torch.no_grad():
        for parameter in new_network.parameters():
            parameter.mul_(1.5)
    assert_close(new_loss(new_network(x), labels), explicit(new_loss, new_network, x, labels))
    assert torch.equal(loss(network(x), labels), expected)  # the original goes on undisturbed


@pytest.mark.parametrize("again", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_a_loss_copied_alone_must_be_attached_again(again: Callable[[Any], Any]) -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    new_loss = again(loss)
    embeddings = network(x)
    with pytest.raises(MissingFeaturesError, match="attach again after copying or loading"):
        new_loss(embeddings, labels)
    expected = loss(embeddings, labels)
    new_loss.attach(network.head.feature_map)
    assert torch.equal(new_loss(network(x), labels), expected)


def test_a_pickled_loss_holds_neither_the_network_nor_its_records() -> None:
    network, (x, _) = Network(), images(64)
    loss = attached(network)
    size = len(pickle.dumps(horde()))
    network(x)
    assert len(pickle.dumps(loss)) < size + 500
    trunk = {id(p) for p in network.parameters()}
    assert not any(id(p) in trunk for p in loss.parameters())
    assert set(loss.state_dict()) == set(horde().state_dict())


def test_detach_and_attach_again() -> None:
    network, other, (x, labels) = Network(), Network(), images()
    loss = attached(network)
    hooks = network.head.feature_map._forward_hooks
    assert len(hooks) == 1
    loss.attach(network.head.feature_map)
    assert len(hooks) == 1
    loss.attach(other.head.feature_map)
    assert len(hooks) == 0
    network(x)
    assert_close(loss(other(x), labels), explicit(loss, other, x, labels))
    assert loss.detach() is loss and loss.tap is None
    assert len(other.head.feature_map._forward_hooks) == 0
    with pytest.raises(MissingFeaturesError, match="pass features="):
        loss(other(x), labels)
    loss.detach()  # twice is fine


def test_a_removed_tap_forgets_its_records() -> None:
    stage, x = nn.Identity(), torch.ones(3, 2, requires_grad=True)
    tap = FeatureTap({"pooled": stage})
    stage(x)
    tap.remove()
    with pytest.raises(MissingFeaturesError, match="no features were recorded"):
        tap.take(x)


# Threads


class Slow(FeatureLoss):
    """Reads its features when another call has come as far."""

    def __init__(self) -> None:
        super().__init__()
        self.together = threading.Barrier(2, timeout=120)

    def compute_loss(self, *args: Any) -> dict[str, Any]:
        self.together.wait()
        return {"loss": already_reduced(self.features.mean())}


@pytest.mark.parametrize("tapped", [False, True])
def test_a_loss_is_called_from_two_threads_at_once(tapped: bool) -> None:
    loss, stage, embedder = Slow(), nn.Identity(), nn.Identity()
    if tapped:
        loss.attach(stage, embedder=embedder)

    def step(number: int) -> float:
        features = torch.full((3, 2), float(number))
        with torch.no_grad():
            given = {} if tapped else {"features": features}
            stage(features)
            loss.together.wait()
            value = loss(embedder(torch.zeros(3, 2)), torch.arange(3), **given)
        return float(value)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(step, [1, 2])) == [1, 2]


def test_features_of_another_thread_are_not_taken() -> None:
    stage = nn.Identity()
    loss = Slow().attach(stage)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(stage, torch.ones(3, 2)).result()
    with pytest.raises(MissingFeaturesError, match="in the same thread"):
        loss(torch.zeros(3, 2), torch.arange(3))
