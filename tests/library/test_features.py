"""Features reach a loss: the right ones, or an error; and what taps leave behind."""

import copy
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pml_regularizers import (
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
from tests.library.contract import LOSSES
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


def test_an_attached_loss_equals_the_explicit_call_in_value_and_gradient() -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    features = network.trunk(x)
    expected = loss(network.head(features), labels, features=features)
    exact = gradients(expected, network, loss)
    value = loss(network(x), labels)
    assert torch.equal(value, expected)
    for ours, theirs in zip(gradients(value, network, loss), exact, strict=True):
        assert torch.equal(ours, theirs)
    assert any(g.abs().max() > 0 for g in exact)


def test_a_record_serves_one_call() -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    embeddings = network(x)
    loss(embeddings, labels)
    with pytest.raises(MissingFeaturesError, match="no features were recorded since the last call"):
        loss(embeddings, labels)
    loss(network(x), labels)  # and the next step works again


def test_features_without_a_gradient_are_refused() -> None:
    network, (x, labels) = Network(), images()
    loss = attached(network)
    with torch.no_grad():
        maps = network.trunk(x)
    embeddings = network.head(maps)
    with pytest.raises(MissingFeaturesError, match="carry no gradient, but the embeddings do"):
        loss(embeddings, labels)
    loss(embeddings, labels, features=maps)  # a trunk that is frozen on purpose


def test_a_trunk_that_is_frozen_on_purpose() -> None:
    network, (x, labels) = Network(), images()
    network.trunk.requires_grad_(False)
    loss = horde()
    attach_all(losses.MultipleLosses([loss]), network, frozen=True)
    for _ in range(2):
        found = loss(network(x), labels)
        assert_close(found, explicit(loss, network, x, labels))
        found.backward()
    assert network.head.fc.weight.grad.abs().sum() > 0


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


@pytest.mark.parametrize("training", [True, False])
def test_copies_of_the_embeddings_are_known_and_others_refused(training: bool) -> None:
    """test_passes.py has random programs of them."""
    network, (x, labels) = Network(), images()
    loss = attached(network)
    alone, expected = copy.deepcopy(loss).detach(), explicit(loss, network, x, labels)
    with torch.set_grad_enabled(training):
        assert_close(loss(network(x).double().float(), labels), expected)
        assert_close(loss(network(x).detach(), labels), expected)
        scaled = F.normalize(network(x))
        assert_close(loss(scaled, labels), alone(scaled, labels, features=network.trunk(x)))
        with pytest.raises(MissingFeaturesError, match="embedder=module"):
            loss(network(x) + 2, labels)
        loss.attach(network.trunk, embedder=network.head)
        assert_close(loss(network(x), labels), expected)


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


def test_features_are_forgotten_even_when_the_loss_fails() -> None:
    network, (x, labels) = Network(), images()
    loss = horde()
    with pytest.raises(ValueError, match="embeddings: expected"):
        loss(torch.randn(8, WIDTH + 1), labels, features=network.trunk(x))
    assert loss.features is None


def test_a_loss_that_is_gone_leaves_nothing_behind() -> None:
    """A notebook cell run again, or a copy of the network alone, must not collect maps and graphs."""
    stage, x = nn.Conv2d(3, CHANNELS, 1), torch.randn(4, 3, 2, 2)
    loss = horde().attach(stage)
    tap = weakref.ref(loss.tap)
    del loss
    assert tap() is None
    assert not stage._forward_hooks

    kept = horde().attach(stage)
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
    embeddings = network(x).detach()
    features = {"pooled": network.trunk(x).mean(dim=(2, 3)), "stopgrad_embeddings": embeddings}
    value = two_stages()(embeddings, labels, features=features)
    for source in (network.head, stages_of(network)):
        loss = two_stages().attach(source)
        for _ in range(2):  # every tap is consumed by its call
            assert_close(loss(network(x), labels), value)
        loss(network(x), labels, features=features)  # so it is by an explicit call
        with pytest.raises(MissingFeaturesError, match=": no features were recorded"):
            loss(torch.randn(8, WIDTH, requires_grad=True), labels)
        loss.detach()
    assert not any(m._forward_hooks for m in network.head.children())


def test_features_and_stages_by_the_wrong_names() -> None:
    head, loss = Network().head, two_stages()
    with pytest.raises(ValueError, match="reads pooled, stopgrad_embeddings; got pooled; pass a"):
        loss(torch.randn(8, WIDTH), torch.arange(8), features={"pooled": torch.zeros(8, 6)})
    for source, came in ((head.pooled, "Identity"), ({"pooled": head.pooled}, "pooled")):
        with pytest.raises(ValueError, match=f"pooled, stopgrad_embeddings, got {came}; pass"):
            loss.attach(source)
    with pytest.raises(ValueError, match=r"module: expected a torch\.nn\.Module .* got Tensor"):
        loss.attach({"pooled": torch.zeros(2), "stopgrad_embeddings": head.fc})
    assert loss.tap is None and not any(m._forward_hooks for m in head.children())


@pytest.mark.parametrize("missing", ["pooled", "stopgrad_embeddings"])
def test_one_tap_without_a_record_is_named_and_the_others_start_afresh(missing: str) -> None:
    network, (x, labels), idle = Network(), images(), nn.Identity()
    value = two_stages().attach(network.head)(network(x), labels)
    loss = two_stages().attach(stages_of(network) | {missing: idle})
    for _ in range(2):  # what the other tap recorded is not left for the next call
        with pytest.raises(MissingFeaturesError, match=f"{missing}: no features were recorded"):
            loss(network(x), labels)
    pooled = network.trunk(x).mean(dim=(2, 3))
    idle(pooled if missing == "pooled" else network.head._embed(pooled))
    assert_close(loss(network(x), labels), value)


# Wrong taps, and introspection


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (JRSRegularizer, r"pooled: .*loss\.attach\(head\[-2\]\)"),
        (EnergyConfusionRegularizer, r"stopgrad_embeddings: .*features=fc\(pooled\.detach\(\)\)"),
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


@pytest.mark.parametrize(
    ("prefix", "count", "refused"), [(5, 54, 5), (None, 50, 1), (0, 50, 0), (None, 49, 0)]
)
def test_tokens_that_are_no_positions_are_refused(
    prefix: int | None, count: int, refused: int
) -> None:
    """timm's transformers tell how many these are; a block of theirs does not."""
    trunk, fc = nn.Linear(3, CHANNELS), nn.Linear(CHANNELS, WIDTH)
    if prefix is not None:
        trunk.num_prefix_tokens = prefix
    loss = horde().attach(trunk)
    embeddings, labels = fc(trunk(torch.randn(8, count, 3)).mean(dim=1)), images()[1]
    if not refused:
        loss(embeddings, labels)
        return
    with pytest.raises(
        MissingFeaturesError, match=rf"num_prefix_tokens={refused}\) .*tokens\[:, {refused}:\]"
    ):
        loss(embeddings, labels)


def test_what_is_no_tensor_of_features_or_embeddings() -> None:
    loss, (_, labels) = horde(), images()
    tokens, embeddings = torch.randn(8, 9, CHANNELS), torch.randn(8, WIDTH)
    output = {"last_hidden_state": tokens, "pooler_output": torch.ones(8)}  # as Hugging Face's
    with pytest.raises(ValueError, match=r"pass features=output\.last_hidden_state"):
        loss(embeddings, labels, features=output)
    with pytest.raises(ValueError, match=r"embeddings: .* got dict; pass the tensor in it"):
        loss(output, labels)
    with pytest.raises(ValueError, match=r"embeddings: .* got torch\.int64 \(8,\); call loss"):
        loss(labels, embeddings, features=tokens)
    with pytest.raises(ValueError, match=r"features=feature_map\.permute\(0, 3, 1, 2\)"):
        loss(embeddings, labels, features=torch.randn(8, 4, 3, CHANNELS))
    stage = nn.Identity()
    loss.attach(stage)
    with pytest.raises(ValueError, match="features: expected a tensor or a tuple of tensors"):
        stage(None)


def test_every_attribute_can_be_looked_at() -> None:
    for case in LOSSES.values():
        assert dict(inspect.getmembers(case.make())).get("features") is None


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_network_that_owns_an_attached_loss_is_traced() -> None:
    network, (x, _) = Network(), images()
    network.loss = attached(network)
    traced = torch.jit.trace(network, x)
    assert torch.equal(traced(x), network(x))
    network.loss.clear()
    with pytest.raises(RuntimeError, match=r"call loss\.detach\(\) before, or export with"):
        torch.jit.script(network.head.feature_map)


# Checkpointing, compilation and copies


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
