"""Features reach a loss: the right ones, or an error; and what taps leave behind."""

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pml_regularizers import (
    CosinePowersLoss,
    EmbeddingHead,
    EnergyConfusionRegularizer,
    FeatureLoss,
    GaussianMixtureKernel,
    HORDELoss,
    JRSRegularizer,
    MissingFeaturesError,
    attach_all,
)
from pml_regularizers.features.feature_loss import already_reduced
from pml_regularizers.features.feature_tap import FeatureTap
from tests.library.test_parameter_groups import horde
from tests.support.tolerances import assert_close
from tests.support.toys import CHANNELS, WIDTH, Network, images


def attached(network: Network) -> HORDELoss:
    return horde().attach(network.head.feature_map)


def explicit(loss: HORDELoss, network: Network, x: Tensor, labels: Tensor) -> Tensor:
    """The value that an attached loss must have, from a copy that is attached to nothing."""
    features = network.trunk(x)
    embeddings = network.head(features).detach()
    value: Tensor = copy.deepcopy(loss).detach()(embeddings, labels, features=features)
    loss.clear()
    return value


def gradients(value: Tensor, *modules: nn.Module) -> list[Tensor]:
    parameters = [p for module in modules for p in module.parameters()]
    return [g.clone() for g in torch.autograd.grad(value, parameters)]


class Segmented(nn.Module):
    """A network whose trunk, with the tapped head's map, is recomputed in the backward pass."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        maps = checkpoint(self.stage, x, use_reentrant=False)
        embeddings: Tensor = self.network.head._embed(maps.mean(dim=(2, 3)))
        return embeddings

    def stage(self, x: Tensor) -> Tensor:
        maps: Tensor = self.network.head.feature_map(self.network.trunk(x))
        return maps


@pytest.mark.parametrize(
    "change",
    [
        lambda network: network,
        Segmented,
        pytest.param(
            partial(torch.compile, backend="aot_eager", fullgraph=True), marks=pytest.mark.slow
        ),
    ],
    ids=["as it is", "checkpointed", "compiled"],
)
def test_an_attached_loss_equals_the_explicit_call_in_value_and_gradient(change: Any) -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    features = network.trunk(x)
    expected = loss(network.head(features), labels, features=features)
    exact = gradients(expected, network, loss)
    changed = change(network)
    if isinstance(changed, Segmented):  # which does not call the head
        loss.attach(network.head.feature_map, embedder=changed)
    for _ in range(3):  # what a recomputation leaves behind would show in the next step
        value = loss(changed(x), labels)
        assert_close(value, expected.item())
        for ours, theirs in zip(gradients(value, network, loss), exact, strict=True):
            assert_close(ours, theirs)
    torch.compiler.reset()


def test_features_that_are_not_those_of_the_embeddings_are_refused() -> None:
    """test_passes.py has random programs of copies, of passes and of calls."""
    network, (x, labels) = Network(), images()
    loss = attached(network)
    embeddings = network(x)
    loss(embeddings, labels)
    with pytest.raises(MissingFeaturesError, match="no features were recorded since the last call"):
        loss(embeddings, labels)
    with pytest.raises(MissingFeaturesError, match="embedder=module"):
        loss(network(x) + 2, labels)
    with torch.no_grad():
        maps = network.trunk(x)
    embeddings = network.head(maps)
    with pytest.raises(MissingFeaturesError, match="carry no gradient, but the embeddings do"):
        loss(embeddings, labels)
    loss.frozen_features = True  # a trunk that is frozen on purpose
    value = loss(embeddings, labels, features=maps)
    attach_all(losses.MultipleLosses([loss]), network, frozen=True)
    assert torch.equal(loss(network.head(maps), labels), value)


def test_a_head_is_found_in_what_is_around_it() -> None:
    """Its output would be taken for the features of a loss that also reads vectors."""
    network, (x, labels) = Network(), images()
    value = JRSRegularizer().attach(network.head)(network(x), labels)
    around = nn.Sequential(network)
    loss = JRSRegularizer().attach(around)
    assert_close(loss(around(x), labels), value)
    with pytest.raises(ValueError, match="source: Sequential contains 2 heads; attach to one"):
        loss.attach(nn.Sequential(network, Network()))


def test_attach_all_gives_every_loss_the_stages_it_reads() -> None:
    network, (x, labels) = Network(), images()
    both = losses.MultipleLosses({"horde": horde(), "similarity": JRSRegularizer()})
    value = attach_all(both, network.head)(network(x), labels)
    stages = {"feature_map": network.head.feature_map, "pooled": network.head.pooled}
    assert attach_all(both, stages) is both
    assert_close(both(network(x), labels), value)
    apart = losses.MultipleLosses({"horde": horde(), "similarity": JRSRegularizer()})
    with pytest.raises(ValueError, match="JRSRegularizer reads pooled, got none"):
        attach_all(apart, {"feature_map": network.head.feature_map})
    assert apart.losses["horde"].tap is None  # all, or none


def test_a_test_pass_may_come_between_the_forward_pass_and_its_loss() -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    expected, (other, other_labels) = explicit(loss, network, x, labels), images(6)
    other_expected = explicit(loss, network, other, other_labels)
    embeddings = network(x)
    with torch.no_grad():
        network(other)
        assert_close(loss(network(other), other_labels), other_expected)
        assert loss.descriptor(network(other)).shape == (6, 3 * WIDTH)
        network(other)
    value = loss(embeddings, labels)
    assert_close(value, expected)
    value.backward()


@pytest.mark.parametrize("training", [True, False])
def test_records_are_bounded(training: bool) -> None:
    network, (x, _) = Network(), images()
    loss = attached(network)
    maps = []
    network.head.feature_map.register_forward_hook(lambda *args: maps.append(weakref.ref(args[2])))
    with torch.set_grad_enabled(training):
        for _ in range(20):
            network(x)
    kept = FeatureTap.capacity if training else 1
    assert [ref for ref in maps if ref() is not None] == maps[-kept:]
    loss.clear()
    assert all(ref() is None for ref in maps)


def test_a_loss_that_is_gone_leaves_nothing_behind() -> None:
    """A notebook cell run again, or a copy of the network alone, must not collect maps and graphs."""
    stage, x = nn.Conv2d(3, CHANNELS, 1), torch.randn(4, 3, 2, 2)
    loss = horde().attach(stage, embedder=nn.Identity())
    tap = weakref.ref(loss.tap)
    del loss
    assert tap() is None
    assert not stage._forward_hooks

    kept = horde().attach(stage, embedder=nn.Identity())
    for alone in (copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
        record = weakref.ref(alone(x))
        assert record() is None
    assert kept.tap is not None


def two_stages() -> JRSRegularizer:
    """A loss that reads several stages, by name."""
    names = ("pooled", "stopgrad_embeddings")
    return JRSRegularizer({name: GaussianMixtureKernel() for name in names})


def stages_of(network: Network) -> dict[str, nn.Module]:
    head = network.head
    return {"stopgrad_embeddings": head.stopgrad_embeddings, "pooled": head.pooled}


def test_several_stages_by_name_from_the_call_or_from_taps() -> None:
    network, (x, labels) = Network(), images()
    embeddings = network(x)
    features = {"pooled": network.trunk(x).mean(dim=(2, 3)), "stopgrad_embeddings": embeddings}
    loss = two_stages()
    value = loss(embeddings, labels, features=features)
    for source in (network.head, stages_of(network)):  # attaching again moves the taps
        loss.attach(source)
        for _ in range(2):  # every tap is consumed by its call
            assert_close(loss(network(x), labels), value)
        loss(network(x), labels, features=features)  # so it is by an explicit call
        with pytest.raises(MissingFeaturesError, match=": no features were recorded"):
            loss(torch.randn(8, WIDTH, requires_grad=True), labels)
    assert loss.detach().detach() is loss
    assert not any(m._forward_hooks for m in network.head.children())


def test_features_and_stages_by_the_wrong_names() -> None:
    head, loss = Network().head, two_stages()
    with pytest.raises(ValueError, match="reads pooled, stopgrad_embeddings; got pooled; pass a"):
        loss(torch.randn(8, WIDTH), torch.arange(8), features={"pooled": torch.zeros(8, 6)})
    for source, came in ((head.pooled, "Identity"), ({"pooled": head.pooled}, "pooled")):
        with pytest.raises(ValueError, match=f"pooled, stopgrad_embeddings, got {came}; pass"):
            loss.attach(source)
    with pytest.raises(ValueError, match=r"pooled: expected a torch\.nn\.Module, got Tensor"):
        loss.attach({"pooled": torch.zeros(2), "stopgrad_embeddings": head.fc})
    assert loss.tap is None and not any(m._forward_hooks for m in head.children())


def test_one_tap_without_a_record_is_named_and_the_others_start_afresh() -> None:
    network, (x, labels), idle = Network(), images(), nn.Identity()
    value = two_stages().attach(network.head)(network(x), labels)
    loss = two_stages().attach(stages_of(network) | {"pooled": idle})
    for _ in range(2):  # what the other tap recorded is not left for the next call
        with pytest.raises(MissingFeaturesError, match="pooled: no features were recorded"):
            loss(network(x), labels)
    idle(network.trunk(x).mean(dim=(2, 3)))
    assert_close(loss(network(x), labels), value)


def test_rows_that_are_nearer_to_each_other_than_bfloat16_rounds_keep_their_order() -> None:
    stage, embedder = nn.Identity(), nn.Identity()
    loss = JRSRegularizer().attach(stage, embedder=embedder)
    rows = (1 + torch.randn(4, 1) / 99).bfloat16() * torch.tensor([1.0, 0]) + torch.tensor([0, 1.0])
    for change, ok in ((lambda x: x.flip(0), False), (lambda x: F.normalize(x.float()), True)):
        loss.clear()
        stage(torch.randn(4, CHANNELS))
        embeddings = embedder(rows.bfloat16())
        with nullcontext() if ok else pytest.raises(MissingFeaturesError, match="in their order"):
            loss(change(embeddings), images(4)[1])


@pytest.mark.parametrize("second", [1.0, 2.0])
def test_a_copy_of_embeddings_that_two_passes_have(second: float) -> None:
    """As of a collapsed network: which pass it is of matters, unless the features are the same."""
    stage, embedder = nn.Identity(), nn.Identity()
    loss = Slow().attach(stage, embedder=embedder)
    loss.together = threading.Barrier(1)
    for size in (1.0, second):
        stage(torch.full((3, 2), size))
        embeddings = embedder(torch.ones(3, 2))
    with pytest.raises(MissingFeaturesError) if second > 1 else nullcontext():
        assert loss(F.normalize(embeddings), torch.arange(3)) == 1


def test_a_stage_whose_output_is_pooled_before_the_embedder() -> None:
    """Which of two outputs the embedder was given is not known, unless the first one's pass failed in it."""
    stage, embedder, labels = nn.Identity(), nn.Linear(CHANNELS, WIDTH), images(4)[1]
    loss, maps = Slow().attach(stage, embedder=embedder), torch.randn(3, 4, CHANNELS, 2, 2)
    loss.together = threading.Barrier(1)
    with torch.no_grad():
        for x in maps:
            assert_close(loss(embedder(stage(x).mean((2, 3))), labels), x.mean())
        stage(maps[0])
        with pytest.raises(RuntimeError, match="shapes"):
            embedder(maps[0])
        assert_close(loss(embedder(stage(maps[1]).mean((2, 3))), labels), maps[1].mean())
        stage(maps[0])
        with pytest.raises(MissingFeaturesError, match="not known to be those"):
            loss(embedder(stage(maps[1]).mean((2, 3))), labels)
    first, second = (stage(x).mean((2, 3)) for x in maps[:2].requires_grad_())
    embeddings = torch.cat([embedder(second), embedder(first)])
    with pytest.raises(MissingFeaturesError, match="not known to be those"):
        loss(embeddings, labels.repeat(2))


@pytest.mark.parametrize("training", [False, True])
def test_a_stage_that_runs_often_in_one_pass(training: bool) -> None:
    stage, (_, labels) = nn.Identity(), images(4)
    embedder, x = nn.Sequential(*[stage] * 20), torch.randn(4, CHANNELS)
    loss = JRSRegularizer().attach(stage, embedder=embedder)
    with torch.set_grad_enabled(training), pytest.raises(MissingFeaturesError, match="not known"):
        loss(embedder(x), labels)


def test_a_loss_of_several_passes_behind_a_frozen_stage() -> None:
    stage, embedder, loss = nn.Identity(), nn.Linear(CHANNELS, WIDTH), Slow()
    embedder.register_forward_hook(lambda module, args, y: (y.mean(), y))  # a number beside them
    loss.attach(stage, embedder=embedder, frozen=True).together = threading.Barrier(1)
    maps, embeddings = torch.randn(4, 3, CHANNELS), []
    for x in maps:
        with torch.no_grad():
            x = stage(x)
        embeddings.append(embedder(x)[1])
    assert_close(loss(torch.cat(embeddings), torch.arange(12)), maps.mean())


def test_the_embedder_is_told_by_a_head_alone() -> None:
    network = Network()
    for source in (network.trunk, nn.Sequential(network.trunk, nn.Flatten())):
        with pytest.raises(ValueError, match=r"embedder: .* attach\(trunk, embedder=head\)"):
            horde().attach(source)
        with pytest.raises(ValueError, match="embedder: "):
            attach_all(losses.MultipleLosses([horde()]), source)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (JRSRegularizer, r"pooled: .*loss\.attach\(head\[-2\], embedder=head\)"),
        (
            partial(EnergyConfusionRegularizer, gradient="fc"),
            r"stopgrad_embeddings: .*features=fc\(pooled\.detach\(\)\)",
        ),
        (horde, r"feature_map: .*loss\.attach\(trunk, embedder=head\)"),
    ],
)
def test_a_tap_on_the_embeddings_is_refused(make: Any, instead: str, training: bool) -> None:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, WIDTH))
    maps, labels = torch.randn(8, CHANNELS, 2, 2), images()[1]
    loss = make().attach(head, embedder=head)
    with torch.set_grad_enabled(training):
        for view in (lambda x: x.view(8, WIDTH), lambda x: x.detach()):
            with pytest.raises(MissingFeaturesError, match=instead):
                loss(view(head(maps)), labels)


@pytest.mark.parametrize("pool", [None, "avg"])  # which another loss beside it may need
def test_tokens_that_are_no_positions_are_refused(pool: Any) -> None:
    """timm's transformers tell how many these are; a block of theirs does not."""
    fc, (_, labels) = nn.Linear(CHANNELS, WIDTH), images()
    for prefix, count, refused in ((5, 54, 5), (None, 50, 1), (0, 50, 0), (None, 49, 0)):
        trunk = nn.Linear(3, CHANNELS)
        if prefix is not None:
            trunk.num_prefix_tokens = prefix
        loss = attach_all(horde(), trunk, embedder=fc, pool=pool)
        embeddings = fc(trunk(torch.randn(8, count, 3)).mean(dim=1))
        told = rf"num_prefix_tokens={refused}\) .*tokens\[:, {refused}:\]"
        with pytest.raises(MissingFeaturesError, match=told) if refused else nullcontext():
            loss(embeddings, labels)


def test_a_head_without_a_layer_has_the_embeddings_as_features() -> None:
    """Energy confusion alone has nothing to train there, if its gradient goes to the layer."""
    head, (_, labels) = EmbeddingHead(CHANNELS, None, normalize=False), images()
    maps = torch.rand(8, CHANNELS, 2, 2)
    loss = CosinePowersLoss(losses.ContrastiveLoss())
    expected = loss(maps.mean((2, 3)), labels, features=maps.mean((2, 3)))
    for embedder in (None, nn.Sequential(head)):
        loss.attach(head, embedder=embedder)
        assert_close(loss((embedder or head)(maps), labels), expected)
    confusion = EnergyConfusionRegularizer(gradient="fc").attach(head)
    with pytest.raises(MissingFeaturesError, match=r'choose gradient="all" .* head\.fc = '):
        confusion(head(maps.requires_grad_()), labels)


def test_reentrant_checkpointing_is_refused() -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    embeddings = checkpoint(network, x.requires_grad_(), use_reentrant=True)
    with pytest.raises(MissingFeaturesError, match="re-entrant activation checkpointing"):
        loss(embeddings, labels)
    embeddings.sum().backward()  # whose recomputation leaves no record
    with pytest.raises(MissingFeaturesError, match="no features were recorded"):
        loss(torch.randn(8, WIDTH), labels)


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


def test_a_loss_stored_alone_holds_no_network_and_must_be_attached_again() -> None:
    network, (x, labels) = Network(), images(64)
    loss = attached(network)
    embeddings = network(x)
    stored = pickle.dumps(loss)
    assert len(stored) < len(pickle.dumps(horde())) + 500  # neither records nor the network
    assert set(loss.state_dict()) == set(horde().state_dict())
    new_loss = pickle.loads(stored)
    with pytest.raises(MissingFeaturesError, match="attach again after copying or loading"):
        new_loss(embeddings, labels)
    expected = loss(embeddings, labels)
    new_loss.attach(network.head.feature_map)
    assert torch.equal(new_loss(network(x), labels), expected)


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
