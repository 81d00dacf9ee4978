"""A batch in chunks has the loss and every gradient of the whole batch, whatever the loss reads.

test_distributed.py has the same of several processes.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from pml_regularizers import (
    DistributedLoss,
    GradientCache,
    MissingFeaturesError,
    attach_all,
)
from tests.library.contract import CHANNELS, WIDTH
from tests.support.gradients import CASES, Net, horde, share

Measured = dict[str, Tensor]


def measured(value: Tensor, **modules: nn.Module) -> Measured:
    """The loss, and every gradient by name."""
    gradients = {
        f"{owner}.{name}": parameter.grad
        for owner, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    assert any(name.startswith("net") for name in gradients)
    return {"loss": value.detach(), **gradients}


def whole(net: nn.Module, loss: nn.Module, x: Tensor, *labels: Any) -> Measured:
    value = loss(net(x), *labels)
    value.backward()
    return measured(value, net=net, loss=loss)


def in_chunks(net: nn.Module, loss: nn.Module, x: Tensor, *labels: Any, size: int) -> Measured:
    cache = GradientCache(net, loss, size)
    value = loss(cache(x), *labels)
    value.backward()
    cache.backward()
    return measured(value, net=net, loss=loss)


def assert_same(found: Measured, expected: Measured) -> None:
    assert found.keys() == expected.keys()
    assert max(x.abs().max() for name, x in expected.items() if name != "loss") > 0
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-12, msg=name)


def both(make: Callable[[], nn.Module], size: int, net: Callable[[], nn.Module] = Net) -> None:
    """Two steps' gradients of a network and its loss, on the whole batch and in chunks."""
    _, x, y = share(None)
    pair = nn.ModuleList([net(), make()]).double()
    attach_all(pair[1], pair[0])
    again = copy.deepcopy(pair)
    for step in range(2):
        assert_same(in_chunks(*again, x + step, y, size=size), whole(*pair, x + step, y))


@pytest.mark.parametrize(
    ("case", "size"),
    [
        *(("triplet", 5), ("JRD", 5), ("HORDE of arcface", 5), ("variance in a slot", 5)),
        *(("several", 1), ("several", 5), ("several", 40)),
    ],
)
def test_a_batch_of_12_images(case: str, size: int) -> None:
    both(CASES[case], size)


def test_a_miner_sees_the_whole_batch() -> None:
    base, miner = losses.TripletMarginLoss(), miners.MultiSimilarityMiner()
    both(lambda: DistributedLoss(horde(base), copy.deepcopy(miner)), 5)
    memory = partial(losses.CrossBatchMemory, base, WIDTH, memory_size=20)
    both(lambda: horde(memory(miner=copy.deepcopy(miner)), embed_orders=True), 5)


def test_random_numbers_are_the_same_in_both_passes() -> None:
    _, x, y = share(None)
    net = Net(nn.Dropout(0.5)).double()
    loss = horde(losses.ContrastiveLoss()).double().attach(net.head)
    apart = copy.deepcopy(nn.ModuleList([net, loss]))
    torch.manual_seed(5)
    value = apart[1](torch.cat([apart[0](chunk) for chunk in x.split(5)]), y)
    value.backward()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    found = in_chunks(net, loss, x, y, size=5)
    assert torch.equal(torch.get_rng_state(), after)
    assert_same(found, measured(value, net=apart[0], loss=apart[1]))


def test_half_precision_is_that_of_the_call() -> None:
    _, x, y = share(None)
    net, loss = Net(), CASES["several"]()
    attach_all(loss, net.head)
    again = copy.deepcopy(nn.ModuleList([net, loss]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = whole(*again, x.float(), y)
        cache = GradientCache(net, loss, 5)
        embeddings = cache(x.float())
        value = loss(embeddings, y)
    assert embeddings.dtype == torch.bfloat16
    value.backward()
    cache.backward()  # outside autocast
    found = measured(value, net=net, loss=loss)
    assert found["net.trunk.0.weight"].abs().max() > 0
    for name, x in expected.items():
        error = (found[name] - x).norm() / x.norm()
        assert error < 0.05, name


# Refusals


def test_weights_computed_once_for_both_passes_are_refused() -> None:
    """The second pass would find those of the first, which have no graph."""
    cache = GradientCache(nn.Linear(3, 2), losses.ContrastiveLoss(), 2)
    with parametrize.cached(), pytest.raises(ValueError, match="inside torch"):
        cache(torch.randn(4, 3))


@pytest.mark.parametrize(
    ("layer", "fault"),
    [
        (lambda: nn.BatchNorm2d(CHANNELS), "batch norm"),
        (lambda: spectral_norm(nn.Conv2d(CHANNELS, CHANNELS, 1)), "spectral norm"),
        (lambda: nn.utils.spectral_norm(nn.Conv2d(CHANNELS, CHANNELS, 1)), "spectral norm"),
    ],
)
def test_norms_of_more_than_an_image_are_refused_unless_frozen(layer: Any, fault: str) -> None:
    _, x, _ = share(None)
    cache = GradientCache(Net(layer()).double(), losses.ContrastiveLoss(), 5)
    with pytest.raises(
        ValueError, match=rf"model: trunk.2 has {fault} in training mode.* freeze it"
    ):
        cache(x)
    both(losses.ContrastiveLoss, 5, net=lambda: Net(layer().eval()))


def test_batch_norm_without_running_statistics_cannot_be_frozen() -> None:
    _, x, _ = share(None)
    net = Net(nn.BatchNorm2d(CHANNELS, track_running_stats=False).eval()).double()
    with pytest.raises(ValueError, match="batch norm"):
        GradientCache(net, losses.ContrastiveLoss(), 5)(x)


def test_without_gradients_the_embeddings_have_none() -> None:
    _, x, y = share(None)
    net = Net().double()
    loss = horde(losses.ContrastiveLoss()).double().attach(net.head)
    with torch.inference_mode():
        embeddings = GradientCache(net, loss, 5)(x)
        assert not embeddings.requires_grad
        torch.testing.assert_close(loss(embeddings, y), loss(net(x), y))


def test_steps_in_another_order_and_embeddings_of_two_calls() -> None:
    _, x, y = share(None)
    loss = losses.ContrastiveLoss()
    cache = GradientCache(Net().double(), loss, 5)
    told = "the embeddings have no gradient; call embeddings = cache"
    skipped = cache(x)  # a batch whose loss is left out is none of its business
    value = loss(cache(x), y)
    with pytest.raises(RuntimeError, match=told):
        cache.backward()
    value.backward()
    cache.backward()
    with pytest.raises(RuntimeError, match=told):
        cache.backward()
    assert skipped.grad is None
    first, second = cache(x), cache(x + 1)
    loss(torch.cat([first, second]), torch.cat([y, y])).backward()
    with pytest.raises(RuntimeError, match="has read embeddings of an earlier call"):
        cache.backward()


def test_a_network_whose_passes_differ() -> None:
    class Counting(nn.Module):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return x + self.passes

    _, x, y = share(None)
    loss = losses.ContrastiveLoss()
    cache = GradientCache(Net(Counting()).double(), loss, 5)
    loss(cache(x), y).backward()
    with pytest.raises(RuntimeError, match="second pass over a chunk gave other embeddings"):
        cache.backward()


def test_what_the_whole_batch_would_refuse() -> None:
    _, x, y = share(None)
    net = Net().double()
    loss = horde(losses.ContrastiveLoss()).double().attach(net.trunk)  # and no embedder
    with pytest.raises(MissingFeaturesError, match="embedder=module"):
        GradientCache(net, loss, 5)(x)
    loss.attach(net.trunk, embedder=net)
    cache = GradientCache(net, loss, 5)
    loss(cache(x), y).backward()
    net.trunk.requires_grad_(False)
    with pytest.raises(MissingFeaturesError, match="carry no gradient"):
        cache.backward()
    with pytest.raises(ValueError, match=r"returns embeddings .* got tuple"):
        GradientCache(nn.RNN(6, 2), loss, 5)(torch.randn(2, 6))
