"""Weights that follow a schedule."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor

from pml_regularizers import LinearRamp, ScheduledLosses
from tests.support.tolerances import assert_close
from tests.support.toys import WIDTH


class TestRamps:
    def test_ends_are_exact(self) -> None:
        for start, end in ((0.0, 0.3), (0.7, 0.0), (0.1, 0.7)):
            ramp = pickle.loads(pickle.dumps(LinearRamp(start, end, 3)))
            assert ramp == LinearRamp(start, end, 3)
            assert (ramp(0), ramp(3), ramp(10**9)) == (start, end, end)


def scheduled(**weights: Any) -> ScheduledLosses:
    parts = {"metric": losses.TripletMarginLoss(), "pairs": losses.ContrastiveLoss()}
    return ScheduledLosses(
        parts, weights={"metric": 1.0, "pairs": LinearRamp(0.0, 0.5, 5), **weights}
    )


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.arange(8) % 4


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

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    def test_compiled_code_follows_the_schedule(self) -> None:
        loss, (x, labels) = scheduled(pairs=LinearRamp(0.0, 1.0, 20)), batch()
        plain = copy.deepcopy(loss)
        compiled = torch.compile(loss, backend="eager")
        for _ in range(12):  # more than torch recompiles a frame
            assert_close(compiled(x, labels), plain(x, labels))
        assert loss.step == 12
