"""Optimizer groups, weights that follow a schedule, and gradient ratios, for several losses on one network."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn

from pml_regularizers import (
    DistributedLoss,
    EmbeddingHead,
    HORDELoss,
    LinearRamp,
    ScheduledLosses,
    VarianceRegularizer,
    VEMAttention,
    attach_all,
    gradient_norm_ratios,
    parameter_groups,
    record_terms,
    warn_untrained,
)
from tests.support.composition import STEPS, measure, measure_all
from tests.support.pool import Pool
from tests.support.tolerances import assert_close
from tests.support.toys import CHANNELS, WIDTH, Network, images

CLASSES = 4


def horde(base: nn.Module | None = None, **kwargs: Any) -> HORDELoss:
    base = losses.ContrastiveLoss() if base is None else base
    return HORDELoss(base, CHANNELS, WIDTH, order=3, moment_dim=8, **kwargs)


def paths(groups: list[dict[str, Any]]) -> dict[str, int]:
    return {group["name"]: len(group["params"]) for group in groups}


def assert_partition(groups: list[dict[str, Any]], *modules: nn.Module) -> None:
    """Every trained parameter of the modules is in exactly one group."""
    found = [id(parameter) for group in groups for parameter in group["params"]]
    trained = {id(p) for module in modules for p in module.parameters() if p.requires_grad}
    assert len(found) == len(set(found))
    assert set(found) == trained


class Attended(Network):
    def __init__(self) -> None:
        super().__init__()
        self.head = EmbeddingHead(CHANNELS, WIDTH, attention=VEMAttention)


class TestParameterGroups:
    def test_network_loss_and_what_brings_its_own_settings(self) -> None:
        model, loss = Attended(), horde()
        groups = parameter_groups(model, loss, lr=1e-5, loss_lr=1e-3, weight_decay=1e-4)
        assert paths(groups) == {"model": 5, "model.head.attention": 1, "loss": 5}
        assert_partition(groups, model, loss)
        settings = {g["name"]: (g["lr"], g["weight_decay"]) for g in groups}
        assert settings == {
            "model": (1e-5, 1e-4),
            "model.head.attention": (1e-2, 0.0),
            "loss": (1e-3, 1e-4),
        }
        assert groups[1]["params"][0] is model.head.attention.variance

    def test_each_group_moves_at_its_own_rate(self) -> None:
        model, loss = Attended(), losses.ArcFaceLoss(3, WIDTH)
        start = copy.deepcopy([*model.state_dict().items(), *loss.state_dict().items()])
        optimizer = torch.optim.SGD(
            parameter_groups(
                model, loss, lr=0.5, loss_lr=0.25, overrides={"model.head.fc": {"lr": 0.125}}
            )
        )
        for parameter in (*model.parameters(), *loss.parameters()):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        now = {**model.state_dict(), **loss.state_dict()}
        rates = {"head.attention.variance": 1e-2, "head.fc.weight": 0.125, "W": 0.25}
        for name, before in start:
            expected = torch.full_like(before, rates.get(name, 0.5))
            torch.testing.assert_close(before - now[name], expected, rtol=1e-4, atol=0)

    def test_longer_paths_win_and_keep_what_they_do_not_set(self) -> None:
        groups = parameter_groups(
            Attended(),
            lr=1e-5,
            weight_decay=0.5,
            overrides={
                "model.head": {"lr": 1e-4, "betas": (0.5, 0.9)},
                "model.head.attention": {"lr": 3e-2},
                "model.trunk.0.bias": {"weight_decay": 0.0},
            },
        )
        assert {g.pop("name"): {k: v for k, v in g.items() if k != "params"} for g in groups} == {
            "model": {"lr": 1e-5, "weight_decay": 0.5},
            "model.trunk.0.bias": {"lr": 1e-5, "weight_decay": 0.0},
            "model.head": {"lr": 1e-4, "weight_decay": 0.5, "betas": (0.5, 0.9)},
            "model.head.attention": {"lr": 3e-2, "weight_decay": 0.0, "betas": (0.5, 0.9)},
        }

    def test_shared_parameters_are_in_one_group(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), VEMAttention(4))
        model[1].weight = model[0].weight
        loss = nn.Sequential(model[2], nn.Linear(4, 4))
        loss[1].bias = model[1].bias
        groups = parameter_groups(model, loss, lr=1)
        assert paths(groups) == {"model": 3, "model.2": 1, "loss": 1}
        assert_partition(groups, model, loss)

    def test_frozen_parameters_are_left_out(self) -> None:
        model, loss = Attended(), horde(projections="random")
        model.trunk.requires_grad_(False)
        groups = parameter_groups(model, loss, lr=1)
        assert paths(groups) == {"model": 1, "model.head.attention": 1}
        assert_partition(groups, model, loss)

    @pytest.mark.parametrize(
        "wrap",
        [
            DistributedLoss,
            DistributedLossWrapper,
            nn.DataParallel,
            lambda module: torch.compile(module, backend="eager"),
        ],
    )
    def test_wrappers_do_not_change_the_paths(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        loss = horde(losses.ArcFaceLoss(3, WIDTH))
        overrides = {"loss.losses.order_1": {"lr": 7.0}}
        plain = parameter_groups(Network(), loss, lr=1, overrides=overrides)
        assert paths(plain) == {"model": 5, "loss": 7, "loss.losses.order_1": 1}
        wrapped = parameter_groups(Network(), wrap(loss), lr=1, overrides=overrides)
        assert paths(wrapped) == paths(plain)

    @pytest.mark.parametrize("path", ["model.haed", "head", "loss", "model.head.f", "model.relu"])
    def test_an_override_of_nothing(self, path: str) -> None:
        model = Network()
        model.relu = nn.ReLU()
        with pytest.raises(ValueError, match=f"overrides: no trained parameter is at {path};"):
            parameter_groups(model, losses.ContrastiveLoss(), lr=1, overrides={path: {"lr": 2}})

    def test_an_override_without_settings(self) -> None:
        message = r"overrides: expected settings such as .* for model\.trunk, got 0\.001"
        with pytest.raises(ValueError, match=message):
            parameter_groups(Network(), lr=1, overrides={"model.trunk": 1e-3})  # type: ignore[dict-item]

    def test_what_is_no_module(self) -> None:
        network, loss = Network(), losses.ArcFaceLoss(3, WIDTH)
        for model, came in (
            ({"trunk": network.trunk}, "dict"),
            (network.parameters(), "generator"),
        ):
            with pytest.raises(ValueError, match=f"model: expected a module, got {came}; pass"):
                parameter_groups(model, lr=1)
        with pytest.raises(ValueError, match="loss: expected a module, got generator; pass"):
            parameter_groups(network, loss.parameters(), lr=1)
        with pytest.raises(ValueError, match="loss: expected a module, got dict; pass"):
            warn_untrained({"metric_loss": loss})
        several = nn.ModuleDict({"trunk": network.trunk, "embedder": network.head})
        assert_partition(parameter_groups(several, lr=1), network)


class TestWarnUntrained:
    def test_silent_when_all_are_trained(self) -> None:
        model, loss = Network(), horde()
        optimizer = torch.optim.Adam(parameter_groups(model, loss, lr=1))
        assert warn_untrained(loss, optimizer) == []
        apart = [torch.optim.SGD([parameter], lr=1) for parameter in loss.parameters()]
        assert warn_untrained(loss, *apart) == []
        assert warn_untrained(losses.ContrastiveLoss()) == []

    def test_the_original_base_loss_is_not_what_horde_trains(self) -> None:
        base = losses.ArcFaceLoss(3, WIDTH)
        loss = losses.MultipleLosses({"horde": horde(base), "other": losses.ContrastiveLoss()})
        optimizer = torch.optim.Adam(base.parameters())
        for wrap in (DistributedLoss, nn.DataParallel, nn.Identity()):
            wrapped = loss if isinstance(wrap, nn.Identity) else wrap(loss)
            with pytest.warns(
                UserWarning, match=r"no optimizer got 8 of .*horde\.moments\.weight_0"
            ):
                names = warn_untrained(wrapped, optimizer)
            assert [name for name in names if name.endswith("W")] == [
                f"losses.horde.losses.order_{k}.W" for k in (1, 2, 3)
            ]

    def test_names_only_what_is_missing(self) -> None:
        loss = losses.MultipleLosses([losses.ArcFaceLoss(3, 4), losses.ProxyAnchorLoss(3, 4)])
        optimizer = torch.optim.Adam(loss.losses[0].parameters())
        with pytest.warns(
            UserWarning, match=r"MultipleLosses's parameters.*: losses\.1\.proxies\."
        ):
            assert warn_untrained(loss, optimizer) == ["losses.1.proxies"]
        loss.losses[1].requires_grad_(False)
        assert warn_untrained(loss, optimizer) == []

    def test_a_dict_of_optimizers(self) -> None:
        loss = losses.ArcFaceLoss(3, 4)
        with pytest.raises(ValueError, match=r"expected torch optimizers, got dict; unpack"):
            warn_untrained(loss, {"metric_loss_optimizer": torch.optim.Adam(loss.parameters())})


class TestRamps:
    def test_linear(self) -> None:
        ramp = LinearRamp(0.2, 1.0, steps=4)
        assert [ramp(step) for step in range(7)] == pytest.approx(
            [0.2, 0.4, 0.6, 0.8, 1, 1, 1], rel=1e-15
        )

    def test_ends_are_exact(self) -> None:
        for start, end in ((0.0, 0.3), (0.7, 0.0), (0.1, 0.7)):
            ramp = pickle.loads(pickle.dumps(LinearRamp(start, end, 3)))
            assert ramp == LinearRamp(start, end, 3)
            assert (ramp(0), ramp(3), ramp(10**9)) == (start, end, end)

    def test_no_steps(self) -> None:
        with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
            LinearRamp(0.0, 1.0, 0)


def scheduled(**weights: Any) -> ScheduledLosses:
    parts = {"metric": losses.TripletMarginLoss(), "pairs": losses.ContrastiveLoss()}
    return ScheduledLosses(
        parts, weights={"metric": 1.0, "pairs": LinearRamp(0.0, 0.5, 5), **weights}
    )


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.arange(8) % CLASSES


class TestScheduledLosses:
    def test_every_step_has_its_weights(self) -> None:
        loss, (x, labels) = scheduled(), batch()
        metric, pairs = (part(x, labels) for part in loss.losses.values())
        for step in range(8):
            weight = min(step / 5, 1) * 0.5
            assert_close(loss(x, labels), metric + weight * pairs)
            assert loss.weights == {"metric": 1.0, "pairs": pytest.approx(weight)}
            assert (loss.weight_metric, loss.weight_pairs) == tuple(loss.weights.values())
            assert loss.step == step + 1

    def test_numbers_are_the_weights_of_multiple_losses(self) -> None:
        x, labels = batch()
        parts = [losses.TripletMarginLoss(), losses.ContrastiveLoss()]
        mined = miners.TripletMarginMiner(margin=0.5)
        for weights in (None, [0.5, 2.0]):
            ours, theirs = (
                kind(parts, weights=weights) for kind in (ScheduledLosses, losses.MultipleLosses)
            )
            for tuples in (None, mined(x, labels)):
                assert ours(x, labels, tuples) == theirs(x, labels, tuples)
        ours, theirs = (
            kind(parts, [None, mined], [0.5, 2.0])
            for kind in (ScheduledLosses, losses.MultipleLosses)
        )
        assert ours(x, labels) == theirs(x, labels)
        named = ScheduledLosses({"a": parts[0], "b": parts[1]}, {"b": mined}, {"a": 0.5, "b": 2.0})
        assert named(x, labels) == theirs(x, labels)

    @pytest.mark.parametrize("as_list", [False, True], ids=["dict", "list"])
    def test_a_number_can_be_changed_and_a_schedule_not(self, as_list: bool) -> None:
        loss, (x, labels) = scheduled(), batch()
        metric, pairs = (part(x, labels) for part in loss.losses.values())
        names: list[Any] = ["metric", "pairs"]
        if as_list:
            names = [0, 1]
            parts = [losses.TripletMarginLoss(), losses.ContrastiveLoss()]
            loss = ScheduledLosses(parts, weights=[1.0, LinearRamp(0.0, 0.5, 5)])
        loss.set_step(2)
        loss.weights[names[0]], loss.weights[names[1]] = 3.0, 7.0
        for step in (2, 3):
            assert_close(loss(x, labels), 3 * metric + 0.1 * step * pairs)
            weights = [getattr(loss, f"weight_{name}") for name in names]
            assert weights == [3.0, pytest.approx(0.1 * step)]

    def test_only_training_counts(self) -> None:
        loss, (x, labels) = scheduled(), batch()
        loss(x, labels)
        loss.eval()
        loss(x, labels)
        loss.train()
        with torch.no_grad():
            loss(x, labels)
        assert loss.step == 1
        loss(x, labels)
        assert loss.step == 2

    def test_resumes_exactly(self) -> None:
        loss, (x, labels) = scheduled(), batch()
        for _ in range(3):
            loss(x, labels)
        again = scheduled()
        again.load_state_dict(pickle.loads(pickle.dumps(loss.state_dict())))
        others = [again, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))]
        for _ in range(4):
            value = loss(x, labels)
            assert all(other(x, labels) == value for other in others)
            assert all(other.weights == loss.weights for other in others)

    def test_a_step_in_half_precision_is_refused(self) -> None:
        """2,049 would become 2,048, and 70,000 a negative number."""
        state = {"step": torch.tensor(70_000).half()}
        with pytest.raises(
            RuntimeError, match=r"step: expected signed integers, got torch\.float16"
        ):
            scheduled().load_state_dict(state, strict=False)

    def test_a_call_keeps_its_weights_while_another_thread_calls(self) -> None:
        class Interrupted(losses.ContrastiveLoss):
            def forward(self, *args: Any) -> Tensor:
                if loss.step < 5:
                    loss.set_step(5)
                    with torch.no_grad(), ThreadPoolExecutor(1) as threads:
                        threads.submit(loss, *args[:2]).result()
                value: Tensor = super().forward(*args)
                return value

        (x, labels), weights = batch(), [LinearRamp(1.0, 0.0, 5)]
        loss = ScheduledLosses([Interrupted()], weights=weights)
        assert_close(loss(x, labels), losses.ContrastiveLoss()(x, labels))

    def test_mined_tuples_beside_miners_are_refused(self) -> None:
        loss, (x, labels) = losses.TripletMarginLoss(), batch()
        tuples = miners.BatchHardMiner()(x, labels)
        with pytest.raises(ValueError, match="indices_tuple: the losses have miners of their own"):
            ScheduledLosses([loss], miners=[miners.BatchHardMiner()])(x, labels, tuples)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    def test_compiled_code_follows_the_schedule(self) -> None:
        loss, (x, labels) = scheduled(pairs=LinearRamp(0.0, 1.0, 20)), batch()
        plain = copy.deepcopy(loss)
        compiled = torch.compile(loss, backend="eager")
        for _ in range(12):  # more than torch recompiles a frame
            assert_close(compiled(x, labels), plain(x, labels))
        assert loss.step == 12

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ({"metric": 1.0}, r"one for each of metric, pairs, got metric"),
            ([1.0, 2.0], r"expected a dict with one for each of metric, pairs, got list"),
            (
                {"metric": 1.0, "pairs": "1"},
                r"a number or a function of the step for pairs, got '1'",
            ),
        ],
    )
    def test_weights_of_other_losses(self, weights: Any, message: str) -> None:
        parts = {"metric": losses.TripletMarginLoss(), "pairs": losses.ContrastiveLoss()}
        with pytest.raises(ValueError, match=f"weights: .*{message}"):
            ScheduledLosses(parts, weights=weights)

    @pytest.mark.parametrize(
        ("wrong", "came"),
        [
            (losses.TripletMarginLoss(), "TripletMarginLoss"),
            (nn.ModuleDict({"a": losses.TripletMarginLoss()}), "ModuleDict"),
            (iter([losses.TripletMarginLoss()]), "list_iterator"),
        ],
    )
    def test_losses_that_are_neither_a_dict_nor_a_list(self, wrong: Any, came: str) -> None:
        with pytest.raises(ValueError, match=f"losses: expected a dict or a list .* got {came};"):
            ScheduledLosses(wrong)
        assert len(ScheduledLosses(nn.ModuleList([losses.TripletMarginLoss()])).losses) == 1


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
        x, labels = images()
        gradients = []
        start = copy.deepcopy((Attended(), horde()))
        for diagnosed in (False, True):
            network, first = copy.deepcopy(start)
            loss = attach_all(
                ScheduledLosses({"horde": first, "variance": VarianceRegularizer()}), network.head
            )
            embeddings = network(x)
            with record_terms(loss) as terms:
                total = loss(embeddings, labels)
            trained = [*network.parameters(), *loss.parameters()]
            if diagnosed:
                at = {"embeddings": embeddings, "all": trained}
                before = torch.get_rng_state()
                ratios = gradient_norm_ratios(terms, base="horde.order_1", at=at)
                assert torch.equal(torch.get_rng_state(), before)
                assert ratios.keys() == {"horde.order_2", "horde.order_3", "variance"}
                assert all(parameter.grad is None for parameter in trained)
            assert loss.step == 1
            total.backward()
            gradients.append([parameter.grad for parameter in trained])
        for plain, diagnosed_gradient in zip(*gradients, strict=True):
            assert torch.equal(plain, diagnosed_gradient)

    def test_nothing_to_compare_with(self) -> None:
        x, y = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
        terms = {"base": y.sum(), "strong": x.sum(), "constant": torch.tensor(4.0)}
        ratios = gradient_norm_ratios(terms, base="base", at={"x": x, "y": y})
        assert ratios["strong"] == {"x": float("inf"), "y": 0.0}
        assert ratios["constant"] == {"x": pytest.approx(float("nan"), nan_ok=True), "y": 0.0}

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_norms_do_not_overflow_in_half_precision(self, dtype: torch.dtype) -> None:
        """|30000 * (1, ..., 1)| of 10,000 numbers is 3e6, far beyond float16."""
        x = torch.ones(10_000, dtype=dtype, requires_grad=True)
        big = 29_952.0  # a bfloat16 number
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

    def test_errors(self) -> None:
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(ValueError, match="base: expected one of a, b, got 'metric'"):
            gradient_norm_ratios({"a": x.sum(), "b": x.sum()}, base="metric", at={"x": x})
        for wrong, came in ((2 * x, r"\(3,\)"), (1.5, "float")):
            with pytest.raises(ValueError, match=f"losses: expected b to be a scalar .*{came}"):
                gradient_norm_ratios({"a": x.sum(), "b": wrong}, base="a", at={"x": x})

    @pytest.mark.parametrize(
        ("at", "message"),
        [
            ({}, "expected a dict of places by name, .* got none"),
            (torch.ones(3, requires_grad=True), "expected a dict of places by name, .* got Tensor"),
            ({"fc": nn.Linear(3, 2).named_parameters()}, "expected tensors at fc, got tuple; pass"),
            ({"x": 1.0}, "expected tensors at x, got float; pass"),
            ({"relu": nn.ReLU()}, "none of the 0 tensors of relu requires a gradient"),
        ],
    )
    def test_places_that_are_none(self, at: Any, message: str) -> None:
        term = torch.ones(3, requires_grad=True).sum()
        with pytest.raises(ValueError, match=f"at: {message}"):
            gradient_norm_ratios({"a": term, "b": term}, base="a", at=at)


def test_the_boundary_of_margin_loss_has_a_rate_of_its_own() -> None:
    """5e-4 unless one is given, also within other losses."""
    model, margin = nn.Linear(4, 4), losses.MarginLoss(learn_beta=True)
    loss = HORDELoss(margin, CHANNELS, WIDTH, order=2, moment_dim=8)

    def settings(**given: Any) -> dict[str, Any]:
        groups = parameter_groups(model, loss, lr=1e-5, weight_decay=1e-4, **given)
        return {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}

    beta = "loss.losses.order_2.beta"
    assert settings()[beta] == (5e-4, 0)
    assert settings()["loss"] == (1e-5, 1e-4)
    assert settings(overrides={beta: {"lr": 1e-3}})[beta] == (1e-3, 0)
    assert settings(loss_lr=1e-3) == {"model": (1e-5, 1e-4), "loss": (1e-3, 1e-4)}


class TestRecordTerms:
    def test_terms_add_up_to_the_total(self) -> None:
        network = Attended()
        inner = ScheduledLosses([losses.ContrastiveLoss(), horde()], weights=[0.5, 2.0])
        loss = losses.MultipleLosses(
            {"plain": losses.TripletMarginLoss(), "inner": inner},
            weights={"plain": 3, "inner": 0.1},
        )
        attach_all(loss, network.head)
        x, labels = images()
        embeddings = network(x)
        with record_terms(DistributedLoss(loss)) as terms:
            total = loss(embeddings, labels)
        assert list(terms) == [
            "plain",
            "inner.0",
            "inner.1.order_1",
            "inner.1.order_2",
            "inner.1.order_3",
        ]
        assert_close(total, sum(terms.values()).detach())
        assert_close(terms["plain"], 3 * losses.TripletMarginLoss()(embeddings, labels).detach())
        pairs = losses.ContrastiveLoss()(embeddings, labels).detach()
        assert_close(terms["inner.0"], 0.05 * pairs)
        assert_close(terms["inner.1.order_1"], 0.2 * pairs)

    def test_calls_of_other_threads_do_not_count(self) -> None:
        loss, (x, labels) = scheduled(pairs=0.5), batch()
        with record_terms(loss) as terms, ThreadPoolExecutor(1) as threads:
            threads.submit(loss, 2 * x, labels).result()
            total = loss(x, labels)
        assert_close(sum(terms.values()), total)

    def test_one_loss_in_two_places(self) -> None:
        part, (x, labels) = losses.TripletMarginLoss(margin=0.5), batch()
        loss = losses.MultipleLosses(
            {"easy": part, "hard": part},
            miners={"hard": miners.BatchHardMiner()},
            weights={"easy": 1.0, "hard": 2.0},
        )
        with record_terms(loss) as terms:
            total = loss(x, labels)
        assert_close(terms["easy"], part(x, labels))
        assert_close(terms["hard"], 2 * part(x, labels, miners.BatchHardMiner()(x, labels)))
        assert_close(total, sum(terms.values()))

    def test_leaves_no_hooks(self) -> None:
        loss, (x, labels) = scheduled(), batch()
        with record_terms(loss):
            loss(x, labels)
        with pytest.raises(KeyError), record_terms(loss):
            raise KeyError
        assert not any(module._forward_hooks for module in loss.modules())

    @pytest.mark.parametrize("alone", [losses.ContrastiveLoss, VarianceRegularizer])
    def test_a_loss_that_is_no_sum(self, alone: Any) -> None:
        message = f"loss: expected a sum of losses, .* got {alone.__name__};"
        with pytest.raises(ValueError, match=message), record_terms(alone()):
            pass

    def test_a_block_without_a_call(self) -> None:
        message = "loss: no call of metric, pairs was recorded;"
        with pytest.raises(ValueError, match=message), record_terms(scheduled()):
            pass


@pytest.fixture(scope="module", params=[2, 3])
def spread(request: pytest.FixtureRequest, pool: Pool) -> Any:
    found, *_ = pool.run(measure_all, processes=request.param)
    assert found["world_size"] == request.param
    return found


def test_many_processes_equal_one(spread: Any) -> None:
    """Ratios, weights, and the gradients of the step that was diagnosed."""
    alone = measure(None)
    assert len(spread["steps"]) == len(alone["steps"]) == STEPS
    for found, expected in zip(spread["steps"], alone["steps"], strict=True):
        assert found["step"] == expected["step"]
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-12, atol=0)
        for name, places in expected["ratios"].items():
            assert found["ratios"][name] == pytest.approx(places, rel=1e-12)
        for name, gradient in expected["gradients"].items():
            assert gradient is not None, name
            bound = 1e-12 * max(gradient.abs().max().item(), 1.0)
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=0, atol=bound)
    first, last = (step["ratios"]["jrd.metric"]["trunk"] for step in alone["steps"])
    assert first == 0 < last


def test_a_static_graph_is_measured_from_the_second_step_on(spread: Any) -> None:
    """DDP's first backward pass must be the step's own, or its gradients are never averaged."""
    found = spread["static_graph"]
    assert found["errors"] == pytest.approx([0.0] * STEPS, abs=1e-12)
    assert "measure from the second step on" in found["said"][0]
    assert found["said"][1:] == [""] * (STEPS - 1)
