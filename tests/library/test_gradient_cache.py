"""A batch in chunks has the loss and every gradient of the whole batch, whatever the loss reads."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pml_regularizers import (
    DistributedLoss,
    EmbeddingHead,
    GradientCache,
    HORDELoss,
    MissingFeaturesError,
    VEMAttention,
    attach_all,
    prepare_loss,
)
from tests.library.contract import CHANNELS, CLASSES, HEADS, WIDTH, network
from tests.support.gradients import CASES, horde, share
from tests.support.pool import Pool, Processes

Measured = dict[str, Tensor]


class Net(nn.Sequential):
    """Images (N, 1, 6, 6) -> embeddings; every stage that a loss reads."""

    def __init__(self, *between: nn.Module) -> None:
        head = EmbeddingHead(CHANNELS, WIDTH, attention=VEMAttention)
        super().__init__(nn.Conv2d(1, CHANNELS, 3), nn.Tanh(), *between, head)

    @property
    def head(self) -> EmbeddingHead:
        head: EmbeddingHead = self[-1]
        return head


def measured(value: Tensor, **modules: nn.Module) -> Measured:
    """The loss, and every gradient by name."""
    gradients = {
        f"{owner}.{name.removeprefix('module.')}": parameter.grad
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


def both(
    make: Callable[[], nn.Module], size: int, net: Callable[[], Any] = Net, channels: int = 1
) -> None:
    """Two steps' gradients of a network and its loss, on the whole batch and in chunks."""
    torch.manual_seed(3)
    _, x, y = share(None)
    x = x.repeat(1, channels, 1, 1)
    pair = nn.ModuleDict({"net": net(), "loss": make()}).double()
    attach_all(pair["loss"], pair["net"])
    again = copy.deepcopy(pair)
    expected = [whole(pair["net"], pair["loss"], x + i, y) for i in range(2)]
    found = [in_chunks(again["net"], again["loss"], x + i, y, size=size) for i in range(2)]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("case", CASES)
def test_every_loss(case: str) -> None:
    both(CASES[case], 5)  # of 12 images


@pytest.mark.parametrize("size", [1, 3, 12, 40])
def test_any_size(size: int) -> None:
    both(CASES["several"], size)


def test_an_ensemble_and_its_map() -> None:
    channels = HEADS * 4  # of its map
    loss = partial(HORDELoss, losses.ContrastiveLoss(), channels, WIDTH, moment_dim=7)
    both(loss, 5, net=network, channels=3)


@pytest.mark.parametrize(
    "miner", [miners.TripletMarginMiner(), miners.BatchHardMiner(), miners.MultiSimilarityMiner()]
)
def test_a_miner_sees_the_whole_batch(miner: nn.Module) -> None:
    base = losses.TripletMarginLoss()
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
    assert found["net.0.weight"].abs().max() > 0
    for name, x in expected.items():
        error = (found[name] - x).norm() / x.norm()
        assert error < 0.05, name


def spread(processes: Processes, case: str) -> Measured:
    rank, x, y = share(processes)
    torch.manual_seed(rank)
    net, loss = Net().double(), CASES[case]().double()
    attach_all(loss, net.head)
    wrapped = prepare_loss(processes, DistributedLoss(loss))
    return in_chunks(processes.prepare(net), wrapped, x, y, size=4)


@pytest.mark.parametrize("case", ["several", "JRD", "HORDE of arcface"])
def test_two_processes(case: str, pool: Pool) -> None:
    _, x, y = share(None)
    torch.manual_seed(0)
    net, loss = Net().double(), CASES[case]().double()
    attach_all(loss, net.head)
    expected = whole(net, DistributedLoss(loss), x, y)
    for found in pool.run(spread, case, processes=2):
        assert_same(found, expected)


# ----------------------------------------------------------------------------------- refusals


def test_weights_computed_once_for_both_passes_are_refused() -> None:
    """The second pass would find those of the first, which have no graph."""
    cache = GradientCache(nn.Linear(3, 2), losses.ContrastiveLoss(), 2)
    with parametrize.cached(), pytest.raises(ValueError, match="inside torch"):
        cache(torch.randn(4, 3))


def test_the_backward_pass_of_a_caller_without_gradients() -> None:
    network, images = nn.Linear(3, 2), torch.randn(4, 3)
    loss = losses.ContrastiveLoss()
    cache = GradientCache(network, loss, 2)
    loss(cache(images), torch.tensor([0, 0, 1, 1])).backward()
    with torch.no_grad():
        cache.backward()
    assert network.weight.grad is not None and network.weight.grad.any()


def test_batch_norm_is_refused_unless_it_is_frozen() -> None:
    with pytest.raises(ValueError, match="chunk_size: expected at least 1, got 0"):
        GradientCache(Net(), losses.ContrastiveLoss(), 0)
    _, x, _ = share(None)
    net = Net(nn.BatchNorm2d(CHANNELS)).double()
    cache = GradientCache(net, losses.ContrastiveLoss(), 5)
    with pytest.raises(ValueError, match=r"model: 2 has batch norm in training mode.* freeze it"):
        cache(x)
    net[2].eval()
    assert cache(x).shape == (12, WIDTH)
    net[2] = nn.BatchNorm2d(CHANNELS, track_running_stats=False).eval().double()
    with pytest.raises(ValueError, match="batch norm"):
        cache(x)
    both(losses.ContrastiveLoss, 5, net=lambda: Net(nn.BatchNorm2d(CHANNELS).eval()))


@pytest.mark.parametrize(
    "normed", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm]
)
def test_spectral_norm_is_refused_unless_it_is_frozen(normed: Callable[..., nn.Module]) -> None:
    def net() -> Net:
        return Net(normed(nn.Conv2d(CHANNELS, CHANNELS, 1)).eval())

    both(losses.ContrastiveLoss, 5, net=net)
    _, x, _ = share(None)
    cache = GradientCache(net().train().double(), losses.ContrastiveLoss(), 5)
    with pytest.raises(ValueError, match=r"model: 2 has spectral norm in training mode.* freeze"):
        cache(x)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_embeddings_have_none(without_gradients: Any) -> None:
    _, x, y = share(None)
    net = Net().double()
    loss = horde(losses.ContrastiveLoss()).double().attach(net.head)
    with without_gradients():
        embeddings = GradientCache(net, loss, 5)(x)
        assert not embeddings.requires_grad
        torch.testing.assert_close(loss(embeddings, y), loss(net(x), y))


def test_steps_in_another_order() -> None:
    _, x, y = share(None)
    net, loss = Net().double(), losses.ContrastiveLoss()
    cache = GradientCache(net, loss, 5)
    told = "the embeddings have no gradient; call embeddings = cache"
    with pytest.raises(RuntimeError, match=told):
        cache.backward()
    value = loss(cache(x), y)
    with pytest.raises(RuntimeError, match=told):
        cache.backward()
    value.backward()
    cache.backward()
    with pytest.raises(RuntimeError, match=told):
        cache.backward()


def test_embeddings_of_two_calls_are_refused() -> None:
    _, x, y = share(None)
    net, loss = Net().double(), losses.ContrastiveLoss()
    cache = GradientCache(net, loss, 5)
    skipped = cache(x)  # a batch whose loss is left out is none of its business
    loss(cache(x), y).backward()
    cache.backward()
    assert skipped.grad is None
    first, second = cache(x), cache(x + 1)
    loss(torch.cat([first, second]), torch.cat([y, y])).backward()
    with pytest.raises(RuntimeError, match="has read embeddings of an earlier call"):
        cache.backward()


def test_a_call_that_fails_leaves_nothing_to_go_back_through() -> None:
    _, x, y = share(None)
    net, loss = Net().double(), losses.ContrastiveLoss()
    cache = GradientCache(net, loss, 5)
    loss(cache(x), y).backward()
    cache.backward()
    loss(cache(x), y).backward()
    with pytest.raises(RuntimeError):
        cache(x[:, :0])
    with pytest.raises(RuntimeError, match=r"earlier call|have no gradient"):
        cache.backward()
    with pytest.raises(ValueError, match="chunk_size: expected a whole number"):
        GradientCache(net, loss, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_size: expected at least 1, got True"):
        GradientCache(net, loss, True)


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
    loss = horde(losses.ContrastiveLoss()).double().attach(net[0])  # and no embedder
    with pytest.raises(MissingFeaturesError, match="embedder=module"):
        GradientCache(net, loss, 5)(x)
    loss.attach(net[0], embedder=net)
    cache = GradientCache(net, loss, 5)
    loss(cache(x), y).backward()
    net[0].requires_grad_(False)
    with pytest.raises(MissingFeaturesError, match="carry no gradient"):
        cache.backward()
    with pytest.raises(ValueError, match=r"returns embeddings .* got tuple"):
        GradientCache(Pair(), loss, 5)(x)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x, CLASSES
