"""The parts of a run and its trial step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from benchmarks.settings import ConfigError, Data, parse
from benchmarks.training import trial
from benchmarks.training.trial import computes_in_bfloat16
from tests.support.processes import TINY, horde

MEMORY = (
    "--losses=[{loss: {class_path: pytorch_metric_learning.losses.CrossBatchMemory, init_args: {memory_size: 9, "
    "loss: {class_path: pytorch_metric_learning.losses.ContrastiveLoss}}}}]"
)


TRIPLET, JRS = "pytorch_metric_learning.losses.TripletMarginLoss", "pml_regularizers.JRSRegularizer"
CONFUSION = "pml_regularizers.EnergyConfusionRegularizer"


def losses(*paths: str, weights: Sequence[float] = (1, 1)) -> str:
    terms = (
        f"{{weight: {weight}, loss: {{class_path: {path}}}}}"
        for path, weight in zip(paths, weights, strict=False)
    )
    return f"--losses=[{', '.join(terms)}]"


@pytest.mark.parametrize(
    ("settings", "index"),
    [
        ([losses(TRIPLET), "--data.samples_per_class=1"], 0),
        ([losses(TRIPLET), "--data.samples_per_class=60"], 0),
        ([losses(TRIPLET, CONFUSION), "--data.samples_per_class=60"], 0),
        ([losses(TRIPLET, weights=[0])], 0),
    ],
)
def test_a_loss_that_never_acts_is_refused(settings: list[str], index: int) -> None:
    with pytest.raises(ConfigError, match=rf"losses\[{index}\]: a .* of 0 in all trial batches"):
        trial.try_one_step(parse([*TINY, *settings]).experiment)


@pytest.mark.parametrize(
    "settings",
    [
        [losses("pytorch_metric_learning.losses.ArcFaceLoss"), "--data.samples_per_class=1"],
        [losses(TRIPLET, JRS, weights=[1, 0])],
        [
            losses(TRIPLET),
            "--miner={class_path: pytorch_metric_learning.miners.TripletMarginMiner, "
            "init_args: {type_of_triplets: hard}}",
        ],
        [losses(TRIPLET), "--data.samples_per_class=null"],
    ],
)
def test_a_loss_that_acts_in_some_batch_is_tried(settings: list[str]) -> None:
    trial.try_one_step(parse([*TINY, *settings]).experiment)


@pytest.mark.parametrize(
    ("size", "of_class", "small", "classes"),
    [
        *((80, 4, [0, 1, 0, 1], 16), (80, 1, [0, 1, 2, 3], 32), (4, 1, [0, 1, 2, 3], 4)),
        *((8, 8, [0, 0, 0, 0], 1), (2, 2, [0, 0], 1), (80, None, [0, 1, 0, 1], 2)),
    ],
)
def test_trial_batches_are_composed_as_those_of_the_training(
    size: int, of_class: int | None, small: list[int], classes: int
) -> None:
    data = Data(batch_size=size, samples_per_class=of_class)
    assert trial._trial_labels(data, 4).tolist() == small
    assert len(trial._trial_labels(data, 32).unique()) == classes


@pytest.mark.parametrize("setting", [horde(), MEMORY])
def test_the_trial_step_leaves_no_trace(
    setting: str, glyphs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = parse([f"--data.root={glyphs_root}", *TINY, setting]).experiment
    found = []
    for trial_step in (trial._take_trial_step, lambda *_: None):
        monkeypatch.setattr(trial, "_take_trial_step", trial_step)
        model, _, loss, _ = trial.build_parts(experiment, Accelerator(cpu=True))
        weights = {**model.state_dict(), **loss.state_dict(prefix="loss.")}
        found.append((weights, torch.get_rng_state(), len(model.head.feature_map._forward_hooks)))
        assert all(p.grad is None for p in model.parameters())
        assert model.training
    (weights, state, hooks), (untried, *others) = found
    assert weights.keys() == untried.keys()
    for name, tensor in untried.items():
        assert torch.equal(weights[name], tensor), name
    assert torch.equal(state, others[0]) and hooks == others[1]


@pytest.mark.parametrize("has_instructions", [True, False])
def test_slow_bfloat16_is_told(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(trial, "computes_in_bfloat16", lambda: has_instructions)
    trial.start(parse([*TINY, losses(TRIPLET), "--precision=bf16"]).experiment)
    assert ("--precision float32" in capsys.readouterr().out) is not has_instructions
    assert isinstance(computes_in_bfloat16(), bool)


def test_a_network_that_cannot_be_copied_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    build = trial.build_model

    def uncopied(*arguments: Any) -> Any:
        model = build(*arguments)
        model.computed = next(model.parameters()) * 1
        return model

    monkeypatch.setattr(trial, "build_model", uncopied)
    with pytest.raises(ConfigError, match="cannot be copied for a trial step: RuntimeError"):
        trial.try_one_step(parse([*TINY, losses(TRIPLET)]).experiment)
