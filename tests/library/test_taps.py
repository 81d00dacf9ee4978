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

from pml_regularizers import FeatureLoss, MissingFeaturesError
from pml_regularizers.features.feature_loss import already_reduced
from tests.library.test_features import attached, explicit, gradients
from tests.library.test_parameter_groups import horde
from tests.support.tolerances import assert_close
from tests.support.toys import WIDTH, Network, images


class Segmented(nn.Module):
    """A network whose trunk, with the tapped head's map, is recomputed in the backward pass."""

    def __init__(self, network: Network, use_reentrant: bool) -> None:
        super().__init__()
        self.network = network
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        maps = checkpoint(self.stage, x, use_reentrant=self.use_reentrant)
        embeddings: Tensor = self.network.head._embed(maps.mean(dim=(2, 3)))
        return embeddings

    def stage(self, x: Tensor) -> Tensor:
        maps: Tensor = self.network.head.feature_map(self.network.trunk(x))
        return maps


def test_checkpointing_gives_the_exact_gradients() -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    expected = loss(network(x), labels)
    exact = gradients(expected, network, loss)
    recomputed = Segmented(network, use_reentrant=False)
    for _ in range(3):  # what the recomputation leaves behind would show in the next step
        value = loss(recomputed(x), labels)
        assert torch.equal(value, expected)
        for ours, theirs in zip(gradients(value, network, loss), exact, strict=True):
            assert torch.equal(ours, theirs)


def test_reentrant_checkpointing_is_refused() -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    embeddings = Segmented(network, use_reentrant=True)(x.requires_grad_())
    with pytest.raises(MissingFeaturesError, match="re-entrant activation checkpointing"):
        loss(embeddings, labels)
    embeddings.sum().backward()  # whose recomputation leaves no record
    with pytest.raises(MissingFeaturesError, match="not known to be those of these embeddings"):
        loss(torch.randn(8, WIDTH), labels)


def test_a_compiled_network_gives_the_same_value_without_a_graph_break() -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    expected = loss(network(x), labels)
    exact = gradients(expected, network, loss)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    value = loss(compiled(x), labels)
    assert_close(value, expected)
    for ours, theirs in zip(gradients(value, network, loss), exact, strict=True):
        assert_close(ours, theirs)
    torch.compiler.reset()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_network_and_loss_copied_together_stay_connected(again: Callable[[Any], Any]) -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    network(x)  # a pending record is not copied
    new_network, new_loss = again((network, loss))
    with pytest.raises(MissingFeaturesError, match="no features were recorded"):
        new_loss(torch.randn(8, WIDTH), labels)
    expected = loss(network(x), labels)
    assert torch.equal(new_loss(new_network(x), labels), expected)
    with torch.no_grad():
        for parameter in new_network.parameters():
            parameter.mul_(1.5)
    assert_close(new_loss(new_network(x), labels), explicit(new_loss, new_network, x, labels))
    assert torch.equal(loss(network(x), labels), expected)  # the original goes on undisturbed


def test_a_loss_copied_alone_must_be_attached_again() -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    new_loss = copy.deepcopy(loss)
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
    loss.attach(other.head.feature_map)
    assert not network.head.feature_map._forward_hooks
    assert_close(loss(other(x), labels), explicit(loss, other, x, labels))
    for _ in range(2):
        assert loss.detach() is loss
    assert not other.head.feature_map._forward_hooks
    with pytest.raises(MissingFeaturesError, match="pass features="):
        loss(other(x), labels)


# Threads


class Slow(FeatureLoss):
    """Reads its features when another call has come as far."""

    def __init__(self) -> None:
        super().__init__()
        self.together = threading.Barrier(2, timeout=120)

    def compute_loss(self, *args: Any) -> dict[str, Any]:
        self.together.wait()
        return {"loss": already_reduced(self.features.mean())}


def test_a_loss_is_called_from_two_threads_at_once() -> None:
    stage, embedder = nn.Identity(), nn.Identity()
    loss = Slow().attach(stage, embedder=embedder)

    def step(number: int) -> float:
        with torch.no_grad():
            stage(torch.full((3, 2), float(number)))
            loss.together.wait()
            return loss(embedder(torch.zeros(3, 2)), torch.arange(3)).item()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(step, [1, 2])) == [1, 2]


def test_features_of_another_thread_are_not_taken() -> None:
    stage = nn.Identity()
    loss = Slow().attach(stage)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(stage, torch.ones(3, 2)).result()
    with pytest.raises(MissingFeaturesError, match="in the same thread"):
        loss(torch.zeros(3, 2), torch.arange(3))
