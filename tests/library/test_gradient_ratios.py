"""Terms of a loss, and the ratios of their gradients, on one process and on several."""

from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners, regularizers
from torch import Tensor, nn

from pml_regularizers import (
    DistributedLoss,
    EnergyConfusionRegularizer,
    JRDLoss,
    VarianceRegularizer,
    attach_all,
    prepare_loss,
)
from pml_regularizers.gradient_ratios import capture_loss_terms, gradient_norm_ratios
from tests.library import contract
from tests.library.test_parameter_groups import horde
from tests.support import gradients
from tests.support.pool import Pool, Processes
from tests.support.tolerances import assert_close
from tests.support.toys import WIDTH, Attended, Network, images

STEPS = 2


def two_losses() -> losses.MultipleLosses:
    return losses.MultipleLosses(
        {"metric": losses.TripletMarginLoss(), "pairs": losses.ContrastiveLoss()},
        weights={"metric": 1.0, "pairs": 0.5},
    )


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.arange(8) % 4


class TestGradientNormRatios:
    def test_by_hand(self) -> None:
        """L = sum of x, R = w |x|^2 of x = A u: gradients 1 and 2 w x at x, 1 u^T and 2 w x u^T at A."""
        u = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
        A = torch.tensor([[1.0, 0, 1], [0, 2, 0]], dtype=torch.float64).requires_grad_()
        c = torch.tensor([0.5, 0.0], dtype=torch.float64).requires_grad_()
        x = A @ u + c  # (3.5, 4)
        terms = {"base": x.sum(), "square": 0.3 * x.square().sum(), "fc": c.sum()}
        ratios = gradient_norm_ratios(
            terms, base="base", at={"x": x, "A": A, "c": [c], "both": iter([x, A])}
        )
        length = (3.5**2 + 4**2) ** 0.5
        square = 0.6 * length / 2**0.5  # |u| cancels
        assert ratios == {
            "square": pytest.approx(dict.fromkeys(("x", "A", "c", "both"), square), rel=1e-14),
            "fc": pytest.approx({"x": 0.0, "A": 0.0, "c": 1.0, "both": 0.0}, rel=1e-14),
        }

    def test_one_pass_serves_diagnosis_and_training(self) -> None:
        """Measuring leaves no gradient behind, and the step's own are the same to the bit."""
        network, (x, labels) = Attended(), images()
        parts = {"horde": horde(), "variance": VarianceRegularizer()}
        loss = attach_all(losses.MultipleLosses(parts), network.head)
        trained = [*network.parameters(), *loss.parameters()]
        loss(network(x), labels).backward()
        plain = [parameter.grad for parameter in trained]
        network.zero_grad()
        loss.zero_grad()
        embeddings = network(x)
        with capture_loss_terms(loss) as terms:
            total = loss(embeddings, labels)
        at = {"embeddings": embeddings, "all": trained}
        ratios = gradient_norm_ratios(terms, base="horde.order_1", at=at)
        assert ratios.keys() == {"horde.order_2", "horde.order_3", "variance"}
        assert all(parameter.grad is None for parameter in trained)
        total.backward()
        for expected, parameter in zip(plain, trained, strict=True):
            assert torch.equal(expected, parameter.grad)

    def test_nothing_to_compare_with(self) -> None:
        x, y = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
        terms = {"base": y.sum(), "strong": x.sum(), "constant": torch.tensor(4.0)}
        ratios = gradient_norm_ratios(terms, base="base", at={"x": x, "y": y})
        assert ratios["strong"] == {"x": float("inf"), "y": 0.0}
        assert ratios["constant"] == {"x": pytest.approx(float("nan"), nan_ok=True), "y": 0.0}

    def test_norms_do_not_overflow_in_half_precision(self) -> None:
        """|30000 * (1, ..., 1)| of 10,000 numbers is 3e6, far beyond float16."""
        x = torch.ones(10_000, dtype=torch.float16, requires_grad=True)
        big = 29_952.0
        terms = {"base": x.float().sum(), "big": big * x.float().sum()}
        ratios = gradient_norm_ratios(terms, base="base", at={"x": x})
        assert ratios == {"big": {"x": pytest.approx(big, rel=1e-14)}}

    def test_parts_that_are_frozen_do_not_count(self) -> None:
        network = Network()
        network.trunk[0].requires_grad_(False)
        embeddings = network(images()[0])
        terms = {"base": embeddings.sum(), "other": 2 * embeddings.sum()}
        ratios = gradient_norm_ratios(terms, base="base", at={"trunk": network.trunk.parameters()})
        assert ratios == {"other": {"trunk": pytest.approx(2.0)}}
        assert ratios == gradient_norm_ratios(terms, base="base", at={"trunk": network.trunk})
        with pytest.raises(ValueError, match="at: none of the 2 tensors of stem requires a grad"):
            gradient_norm_ratios(terms, base="base", at={"stem": network.trunk[0].parameters()})
        with pytest.raises(ValueError, match="base: expected one of base, other, got 'metric'"):
            gradient_norm_ratios(terms, base="metric", at={"embeddings": embeddings})


class TestCaptureLossTerms:
    def test_terms_add_up_to_the_total(self) -> None:
        network, (x, labels) = Attended(), images()
        regularized = horde(embedding_regularizer=regularizers.LpRegularizer())
        inner = losses.MultipleLosses([losses.ContrastiveLoss(), regularized], weights=[0.5, 2.0])
        loss = losses.MultipleLosses(
            {"plain": losses.TripletMarginLoss(), "inner": inner},
            weights={"plain": 3, "inner": 0.1},
        )
        attach_all(loss, network.head)
        embeddings = network(x)
        with capture_loss_terms(DistributedLoss(loss)) as terms:
            total = loss(embeddings, labels)
        orders = [f"inner.1.{x}" for x in ("order_1", "order_2", "order_3", "embedding_reg_loss")]
        assert list(terms) == ["plain", "inner.0", *orders]
        assert_close(total, sum(terms.values()).detach())
        pairs = losses.ContrastiveLoss()(embeddings, labels).detach()
        assert_close(terms["inner.0"], 0.05 * pairs)
        assert_close(terms["inner.1.order_1"], 0.2 * pairs)

    def test_one_loss_in_two_places(self) -> None:
        part, (x, labels) = losses.TripletMarginLoss(margin=0.5), batch()
        loss = losses.MultipleLosses(
            {"easy": part, "hard": part},
            miners={"hard": miners.BatchHardMiner()},
            weights={"easy": 1.0, "hard": 2.0},
        )
        with capture_loss_terms(loss) as terms:
            total = loss(x, labels)
        assert_close(terms["easy"], part(x, labels))
        assert_close(terms["hard"], 2 * part(x, labels, miners.BatchHardMiner()(x, labels)))
        assert_close(total, sum(terms.values()))
        with capture_loss_terms(loss) as twice:
            total = loss(x, labels) + loss(x.flip(1), labels)
        assert_close(total, sum(twice.values()))

    def test_nothing_to_record(self) -> None:
        for loss, message in (
            (losses.ContrastiveLoss(), "expected a sum of losses, .* got ContrastiveLoss;"),
            (two_losses(), "no call of metric, pairs was recorded;"),
        ):
            with pytest.raises(ValueError, match=f"loss: {message}"), capture_loss_terms(loss):
                pass
            assert not any(module._forward_hooks for module in loss.modules())


def criterion() -> losses.MultipleLosses:
    """Half of the regularizers have weight 0 in the first step, which must not upset the processes."""
    return losses.MultipleLosses(
        {
            "horde": gradients.horde(losses.ContrastiveLoss(), order_weights=(0.5, 2)),
            "jrd": JRDLoss(contract.CLASSES, contract.WIDTH),
            "variance": VarianceRegularizer(),
            "fc confusion": EnergyConfusionRegularizer(gradient="fc"),
            "confusion": EnergyConfusionRegularizer(),
        },
        weights={"horde": 1, "jrd": 0, "variance": 0, "fc confusion": 0.3, "confusion": 0.2},
    )


def measure(processes: Processes | None) -> list[dict[str, Any]]:
    """Loss, ratios and gradients of each step."""
    rank, x, y = gradients.share(processes)
    # Initial weights differ by rank on purpose: preparing must make them agree.
    torch.manual_seed(rank)
    net, loss = gradients.Net().double(), criterion().double()
    attach_all(loss, net.head)
    called: nn.Module = loss
    model: nn.Module = net
    if processes is not None:
        called = prepare_loss(DistributedLoss(loss), processes)
        model = processes.prepare(net)
    steps = []
    for number in range(STEPS):
        loss.weights |= {"jrd": number / 2, "variance": number / 4}
        model.zero_grad()
        called.zero_grad()
        embeddings = model(x)
        with capture_loss_terms(called) as terms:
            total = called(embeddings, y)
        at = {"trunk": net.trunk.parameters(), "both": [embeddings, net.trunk[0].weight]}
        ratios = gradient_norm_ratios(terms, base="horde.order_1", at=at)
        total.backward()
        trained = [*net.parameters(), *loss.parameters()]
        grads = [parameter.grad for parameter in trained]
        steps.append({"loss": total.detach(), "ratios": ratios, "gradients": grads})
    return steps


@pytest.mark.parametrize("processes", [2, 3])
def test_many_processes_equal_one(processes: int, pool: Pool) -> None:
    """Ratios, weights, and the gradients of the step that was diagnosed."""
    alone, several = measure(None), pool.run(measure, processes=processes)[0]
    for found, expected in zip(several, alone, strict=True):
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-12, atol=0)
        for name, places in expected["ratios"].items():
            assert found["ratios"][name] == pytest.approx(places, rel=1e-12)
        for gradient, right in zip(found["gradients"], expected["gradients"], strict=True):
            bound = 1e-12 * max(right.abs().max().item(), 1.0)
            torch.testing.assert_close(gradient, right, rtol=0, atol=bound)
    first, last = (step["ratios"]["jrd.metric"]["trunk"] for step in alone)
    assert first == 0 < last
