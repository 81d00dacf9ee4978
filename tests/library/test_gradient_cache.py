"""A batch in chunks has the loss and every gradient of the whole batch, whatever the loss reads.

test_distributed.py has the same of several processes.
"""

import copy
import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from pml_regularizers import DistributedLoss, GradientCache, MissingFeaturesError, attach_all
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
    value = loss(GradientCache(net, loss, size)(x), *labels)
    value.backward()
    return measured(value, net=net, loss=loss)


def tapped(*between: nn.Module) -> tuple[Net, nn.Module]:
    """A network, and HORDE of its maps."""
    net = Net(*between).double()
    return net, horde(losses.ContrastiveLoss()).double().attach(net.head)


def assert_same(found: Measured, expected: Measured) -> None:
    assert found.keys() == expected.keys()
    assert max(x.abs().max() for name, x in expected.items() if name != "loss") > 0
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-12, msg=name)


def compare(net: nn.Module, loss: nn.Module, size: int, value: Callable[[Any], Tensor]) -> None:
    """A value has the same gradients, whether the network embeds or a cache of it."""
    results = []
    for embed in (net, GradientCache(net, loss, size)):
        net.zero_grad(), loss.zero_grad()
        result = value(embed)
        result.backward()
        results.append(measured(result, net=net, loss=loss))
    assert_same(*results)


def both(make: Callable[[], nn.Module], size: int, net: Callable[[], nn.Module] = Net) -> None:
    """Two steps' gradients of a network and its loss, on the whole batch and in chunks."""
    _, x, y = share(None)
    pair = nn.ModuleList([net(), make()]).double()
    attach_all(pair[1], pair[0])
    again = copy.deepcopy(pair)
    for step in range(2):
        assert_same(in_chunks(*again, x + step, y, size=size), whole(*pair, x + step, y))


def test_a_batch_of_12_images() -> None:
    for case, size in (
        *(("triplet", 5), ("JRD", 5), ("HORDE of arcface", 5), ("variance in a slot", 5)),
        *(("several", 1), ("several", 5), ("several", 40)),
    ):
        both(CASES[case], size)


def test_a_miner_sees_the_whole_batch() -> None:
    base, miner = losses.TripletMarginLoss(), miners.MultiSimilarityMiner()
    both(lambda: DistributedLoss(horde(base), copy.deepcopy(miner)), 5)
    memory = partial(losses.CrossBatchMemory, base, WIDTH, memory_size=20)
    both(lambda: horde(memory(miner=copy.deepcopy(miner)), embed_orders=True), 5)


def test_random_numbers_are_the_same_in_both_passes() -> None:
    (_, x, y), (net, loss) = share(None), tapped(nn.Dropout(0.5))
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
        embeddings = GradientCache(net, loss, 5)(x.float())
        value = loss(embeddings, y)
    assert embeddings.dtype == torch.bfloat16
    value.backward()  # outside autocast
    found = measured(value, net=net, loss=loss)
    for name, x in expected.items():
        assert (found[name] - x).norm() < 0.05 * x.norm(), name


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d, partial(nn.InstanceNorm2d, affine=True, track_running_stats=True)]
)
@pytest.mark.parametrize(("after", "size"), [(nn.Identity, 1), (nn.SiLU, 11)])
def test_an_image_alone_in_its_chunk(after: Any, size: int, norm: Any) -> None:
    """Behind batch norm, torch's gradient of one image depends on strides; also where no EmbeddingHead is."""

    class Tokens(Net):
        def forward(self, x: Tensor) -> Tensor:
            tokens = self.trunk(x).flatten(2).transpose(1, 2)
            return nn.functional.normalize(self.head.fc(tokens.mean(dim=1)))

    def layers() -> list[nn.Module]:
        layer = norm(CHANNELS).eval()
        layer.running_mean.normal_(), layer.running_var.uniform_(0.5, 2)
        layer.weight.data.normal_()
        return [layer, after()]

    both(losses.ContrastiveLoss, size, net=lambda: Tokens(*layers()))
    both(CASES["several"], size, net=lambda: Net(*layers()))


def test_several_calls_before_one_backward_pass() -> None:
    _, x, y = share(None)
    pair = nn.ModuleList([Net(), losses.SelfSupervisedLoss(losses.NTXentLoss())]).double()
    (net, loss), again = pair, copy.deepcopy(pair)
    cache = GradientCache(again[0], again[1], 5)
    skipped = cache(x)  # a batch whose loss is left out is none of its business
    with pytest.raises(RuntimeError, match="no gradient has come"):
        cache.backward()
    expected, value = loss(net(x), net(-x)), again[1](cache(x), cache(-x))
    expected.backward(), value.backward(), cache.backward()
    with pytest.raises(RuntimeError, match="no gradient has come"):
        cache.backward()
    assert_same(measured(value, net=again[0]), measured(expected, net=net))
    again.zero_grad()
    (skipped.sum() + cache(x).sum()).backward()
    net.zero_grad(), (2 * net(x).sum()).backward()
    assert_same(measured(value, net=again[0]), measured(value, net=net))
    # Features join as those of several passes do.
    net, loss = tapped()
    compare(net, loss, 5, lambda embed: loss(torch.cat([embed(x), embed(-x)]), y.repeat(2)))


class Text(nn.Module):
    """Token numbers (N, L) and a mask -> what language models return."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(20, 6), nn.Linear(6, WIDTH)

    def forward(
        self, input_ids: Any, attention_mask: Any = None, scale: float = 1.0, tree: bool = False
    ) -> Any:
        if isinstance(input_ids, dict):
            return self(**input_ids)
        words = self.words(input_ids) * attention_mask[..., None] * scale
        pooled = self.fc(words.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True))
        return {"last_hidden_state": words, "pooled": pooled, "cache": None} if tree else pooled


CALLS = (
    lambda net, ids, mask: net({"input_ids": ids, "attention_mask": mask}),
    lambda net, ids, mask: net(ids, mask, 0.5),
    lambda net, ids, mask: net(input_ids=ids, attention_mask=mask, scale=torch.tensor(0.5)),
    lambda net, ids, mask: net(ids, mask, tree=True)["pooled"],
)


@pytest.mark.parametrize("call", CALLS)
def test_a_tree_of_arguments(call: Any) -> None:
    ids, labels = torch.arange(12).view(6, 2) % 7, torch.arange(6) % 2
    mask = (ids > 1).long().clamp(min=ids[:, :1])
    mask[:, 0] = 1
    net, loss = Text().double(), losses.TripletMarginLoss()
    compare(net, loss, 4, lambda embed: loss(call(embed, ids, mask), labels))


def test_of_several_outputs_a_loss_knows_its_embeddings() -> None:
    class Outputs(Net):
        def forward(self, x: Tensor) -> Any:
            maps = self.trunk(x)
            return {"maps": maps, "embeddings": self.head(maps), "pooled": maps.mean((2, 3))}

    (_, x, y), net = share(None), Outputs().double()
    loss = horde(losses.ContrastiveLoss()).double().attach(net.head)
    compare(net, loss, 5, lambda embed: loss(embed(x)["embeddings"], y))


def test_images_have_a_gradient_if_they_need_one() -> None:
    _, x, y = share(None)
    net, loss = Net().double().requires_grad_(False), losses.ContrastiveLoss()
    gradients = []
    for embed in (net, GradientCache(net, loss, 5)):
        images = x.clone().requires_grad_()
        loss(embed(2 * images), y).backward()
        gradients.append(images.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()
    assert not GradientCache(net, loss, 5)(x).requires_grad  # as those of the frozen network


def test_gradients_of_chosen_tensors() -> None:
    (_, x, y), (net, loss) = share(None), tapped()
    parameters = [*net.trunk.parameters(), *loss.parameters()]
    expected = torch.autograd.grad(loss(net(x), y), parameters)
    cache = GradientCache(net, loss, 5)
    value = loss(cache(x), y)
    torch.testing.assert_close(
        torch.autograd.grad(value, parameters, retain_graph=True), expected, rtol=1e-9, atol=1e-12
    )
    value.backward(inputs=parameters)
    torch.testing.assert_close([p.grad for p in parameters], [*expected], rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in net.head.parameters())
    seen: list[Any] = []  # a hook gets gradients only, and there the loss cannot be asked for some
    net.head.fc.weight.register_hook(seen.append)
    loss(cache(x), y).backward()
    assert seen and all(isinstance(gradient, Tensor) for gradient in seen)
    with pytest.raises(RuntimeError, match=r"without inputs=, .* have hooks"):
        torch.autograd.grad(loss(cache(x), y), parameters)


@dataclass(slots=True)
class Slotted:
    images: Tensor


def test_weights_computed_once_for_both_passes_are_refused() -> None:
    """The second pass would find those of the first, which have no graph."""
    cache = GradientCache(nn.Linear(3, 2), losses.ContrastiveLoss(), 2)
    with parametrize.cached(), pytest.raises(ValueError, match="inside torch"):
        cache(torch.randn(4, 3))


class Mixing(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        ([lambda: nn.BatchNorm2d(CHANNELS)], "trunk.2, BatchNorm2d, mixes .* freeze it"),
        ([lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False).eval()], "trunk.2, Batch"),
        ([lambda: Mixing(lambda x: x / x.var((0, 2, 3), keepdim=True).sqrt())], "trunk.2, Mixing"),
        ([lambda: spectral_norm(nn.Conv2d(CHANNELS, CHANNELS, 1))], r"changes trunk.2.*_u,"),
        ([lambda: nn.utils.spectral_norm(nn.Conv2d(CHANNELS, CHANNELS, 1))], "trunk.2.weight_u"),
        ([lambda: Mixing(lambda x: x - x.mean(0) / 99)], "trunk.2, Mixing, mixes"),
        ([lambda: Mixing(lambda x: x + x.roll(len(x) // 2, 0))], "trunk.2, Mixing, mixes"),
        ([lambda: Mixing(lambda x: x + x[torch.arange(len(x)) // 2 * 2])], "trunk.2, Mixing, mix"),
        ([lambda: Mixing(lambda x: x + x.flip(0)), nn.Dropout], "trunk.2, Mixing, mixes"),
        ([nn.Dropout, lambda: Mixing(lambda x: x + x[:1])], "trunk.3, Mixing, mixes"),
        ([lambda: Mixing(lambda x: x + random.random())], "two passes .* differ; draw random"),
    ],
)
@pytest.mark.parametrize("size", [1, 4])
def test_layers_that_mix_images_are_refused_by_what_they_do(
    layers: Any, fault: str, size: int
) -> None:
    _, x, _ = share(None)
    net = Net(*(layer() for layer in layers)).double()
    before, cache = copy.deepcopy(net.state_dict()), GradientCache(net, nn.Module(), size)
    with pytest.raises(ValueError, match=rf"model: .*{fault}"):
        cache(x)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)  # as it was
    if fault.endswith("freeze it"):
        net.eval(), cache(x)
        with pytest.raises(ValueError, match=fault):
            net.train(), cache(x)


@pytest.mark.parametrize("size", [1, 4])
def test_batches_that_cannot_show_a_fault_do_not_count(size: int) -> None:
    """Images that are alike, as in a warm-up, or nearly."""
    _, x, _ = share(None)
    cache = GradientCache(Net(Mixing(lambda x: x - x.mean(0) / 2)).double(), nn.Module(), size)
    for alike in (torch.zeros_like(x), x[:1].expand_as(x), x[:1] + 1e-9 * x):
        cache(alike)
    chunks_alike = torch.cat([x[:1].expand(size, *x.shape[1:]), x[size:]])
    with pytest.raises(ValueError, match=r"trunk\.2, Mixing, mixes"):
        cache(chunks_alike)


def test_without_gradients_the_embeddings_have_none() -> None:
    (_, x, y), (net, loss) = share(None), tapped()
    with torch.inference_mode():
        embeddings = GradientCache(net, loss, 5)(x)
        assert not embeddings.requires_grad
        torch.testing.assert_close(loss(embeddings, y), loss(net(x), y))


def test_nothing_changes_between_the_passes() -> None:
    for change, told in (
        (lambda net, x: net.eval(), "which of its modules train, have changed"),
        (lambda net, x: net.trunk.requires_grad_(False), "have changed since the call"),
        (lambda net, x: net.head.fc.weight.data.add_(1), "gave other embeddings"),
        (lambda net, x: torch.nn.init.zeros_(net.head.fc.weight), "its weights, or"),
        (lambda net, x: x.add_(1), "modified by an inplace operation"),
        (lambda net, x: x.numpy().fill(1), "gave other embeddings"),
    ):
        _, x, y = share(None)
        net, loss = Net(nn.Dropout(0.1)).double(), losses.ContrastiveLoss()
        cache = GradientCache(net, loss, 5)
        for _ in range(2):  # nor after the first step
            loss(cache(x), y).backward()
        value = loss(cache(x), y)
        change(net, x)
        with pytest.raises(RuntimeError, match=told):
            value.backward()


def test_what_the_whole_batch_would_refuse() -> None:
    (_, x, y), (net, loss) = share(None), tapped()
    net.trunk.requires_grad_(False)
    cache = GradientCache(net, loss.attach(net.trunk, embedder=net), 5)
    with pytest.raises(MissingFeaturesError, match="carry no gradient"):
        loss(cache(x), y).backward()
    with pytest.raises(RuntimeError, match="create_graph=True, got one"):
        torch.autograd.grad(cache(2 * x.requires_grad_()).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="is it detached"):
        GradientCache(nn.Sequential(net, Mixing(Tensor.detach)), loss, 5)(x).sum().backward()


def test_what_cannot_be_split_or_joined() -> None:
    linear, x = nn.Linear(6, 2), torch.randn(4, 6)
    for model, arguments, told in (
        (nn.RNN(6, 2), [x[:2]], "a row for each of the 2 images .* got torch.float32"),
        (linear, [x, x[:1]], r"\(4, 6\), torch.float32 \(1, 6\)"),
        (linear, ["a text"], "expected tensors with a row for each image, got none"),
        (linear, [UserDict(x=x)], r"in a UserDict; .* cache\(\*\*batch"),
        (linear, [x, [*"abcd"]], "a list of 4 entries, as many as images"),
        (linear, [x, {"ids": torch.ones(4).numpy()}], "a ndarray of 4 entries"),
        (linear, [Slotted(x)], "split the tensors in a Slotted"),
        (Mixing(lambda x: x.argmax(1)), [x], "returns embeddings"),
        (Mixing(lambda x: (x, object())), [x], "got object; return the embed"),
    ):
        with pytest.raises(ValueError, match=told):
            GradientCache(model, losses.ContrastiveLoss(), 2)(*arguments)
