"""A run that cannot work is refused at its start, by a trial step, by its images or by the launcher's settings."""

import json
import re
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState

from benchmarks.building import network
from benchmarks.records.provenance import describe_launcher
from benchmarks.run import main
from benchmarks.settings.command import parse
from benchmarks.settings.errors import ConfigError
from benchmarks.training import parts, trial
from benchmarks.training.launcher import check_launcher
from benchmarks.training.parts import try_one_step
from tests.benchmarks.runs import MEMORY
from tests.support.apple import APPLE, Apple
from tests.support.fake_trees import write_pictures
from tests.support.processes import NO_BATCH_STATISTICS, TINY, horde

PML = "pytorch_metric_learning"
LOSSES = {
    "triplet": f"{PML}.losses.TripletMarginLoss",
    "arcface": f"{PML}.losses.ArcFaceLoss",
    "jrs": "pml_regularizers.JRSRegularizer",
    "confusion": "pml_regularizers.EnergyConfusionRegularizer",
}


def losses(**weights: float) -> str:
    """The losses of these weights, by the names above."""
    terms = ((weight, {"class_path": LOSSES[name]}) for name, weight in weights.items())
    return f"--losses={json.dumps([{'weight': weight, 'loss': loss} for weight, loss in terms])}"


def test_a_loss_that_never_acts_is_refused() -> None:
    for settings in (
        [losses(triplet=1), "--data.samples_per_class=1"],
        [losses(triplet=1, confusion=1), "--data.samples_per_class=60"],
        [losses(triplet=0)],
    ):
        with pytest.raises(ConfigError, match=r"losses\[0\]: a .* of 0 in all trial batches"):
            try_one_step(parse([*TINY, *settings]).experiment)


def test_a_loss_that_acts_in_some_batch_is_tried() -> None:
    for settings in (
        [losses(arcface=1), "--data.samples_per_class=1"],
        [losses(triplet=1, jrs=0)],
        [
            losses(triplet=1),
            f"--miner={{class_path: {PML}.miners.TripletMarginMiner, "
            "init_args: {type_of_triplets: hard}}",
        ],
        [losses(triplet=1), "--data.samples_per_class=null"],
    ):
        try_one_step(parse([*TINY, *settings]).experiment)


def test_the_trial_step_leaves_no_trace(glyphs_root, monkeypatch):
    experiment = parse([f"--data.root={glyphs_root}", *TINY, horde(), MEMORY]).experiment
    found = []
    for trial_step in (trial.take_trial_step, lambda *_: None):
        monkeypatch.setattr(parts, "take_trial_step", trial_step)
        made, *_ = parts.build_parts(experiment, Accelerator(cpu=True))
        model, loss = made.model, made.loss
        weights = {**model.state_dict(), **loss.state_dict(prefix="loss.")}
        found.append((weights, torch.get_rng_state(), len(model.head.feature_map._forward_hooks)))
        assert all(p.grad is None for p in model.parameters())
        assert model.training
    (weights, state, hooks), (untried, *others) = found
    assert weights.keys() == untried.keys()
    for name, tensor in untried.items():
        assert torch.equal(weights[name], tensor), name
    assert torch.equal(state, others[0]) and hooks == others[1]


def test_chunks_of_a_network_that_mixes_images_are_refused() -> None:
    """By comparison: nothing else knows this layer."""

    class Mixing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(dim=0)

    experiment = parse([*TINY, *NO_BATCH_STATISTICS, "--optimization.chunk_size=8"]).experiment
    try_one_step(experiment)
    state = parts.build_state(experiment, 4, Accelerator(cpu=True))
    state.model.trunk = torch.nn.Sequential(state.model.trunk, Mixing())
    with pytest.raises(ConfigError, match=r"^optimization.chunk_size: .* trunk.1, Mixing, mixes"):
        trial.take_trial_step(experiment, state)


@pytest.mark.slow
def test_a_run_on_a_device_without_float64(glyphs_root, tmp_path, monkeypatch, refused):
    monkeypatch.setattr(PartialState, "default_device", APPLE)
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: None)
    settings = [f"--data.root={glyphs_root}", *TINY, horde(), "--optimization.steps=2"]
    settings += [*NO_BATCH_STATISTICS, "--diagnose_every=2", f"--output={tmp_path / 'run'}"]
    with Apple():
        line = refused(main, *settings, "--precision=float64")
        assert line.startswith("precision: mps has no float64; set ACCEL")
        assert main(settings) == 0
    assert (tmp_path / "run" / "run.json").exists()


RECIPE = ("--recipe=images/resnet50/binomial_horde", "--data.image_size=32", "--data.num_workers=0")


def test_nothing_is_fetched_for_what_cannot_start(tmp_path, monkeypatch, refused):
    """Five training and five test classes of two images; each fault is mended as the one before it says."""
    images = [f"{name}/{i}.jpg" for name in "abcdefghij" for i in "01"]
    write_pictures(tmp_path / "photographs", images, different=20)
    create = network.timm.create_model

    def unreachable(name: str, **arguments: Any) -> Any:
        if name == "resnet50" and arguments.get("pretrained"):
            raise ConnectionError("no network.")
        return create(name, **arguments)

    monkeypatch.setattr(network.timm, "create_model", unreachable)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    missing, root = tmp_path / "nowhere", f"--data.root={tmp_path / 'photographs'}"
    small = ["--model.trunk=test_resnet", "--model.trunk_args={}", "--data.batch_size=8"]
    trained = [*small, "--model.batch_norm=train"]
    more_features = ["--evaluation.descriptor=false", "--evaluation.features=11"]
    for settings, line in (
        ([f"--data.root={missing}"], f"data.root: {missing}: cannot be read"),
        ([], "data.batch_size: 80 images, 4 per class, need 20 classes"),
        (["--data.batch_size=20"], "model: resnet50: no network; --model.weights FILE"),
        (small, "model: batch_norm or frozen_stages would keep random weights.* FILE.* null$"),
        (trained, "evaluation.descriptor: its PCA.*at most 9$"),
        ([*trained, *more_features], "evaluation.features: 11 .*at most 10$"),
    ):
        output = f"--output={tmp_path / 'run'}"
        assert re.match(line, refused(main, *RECIPE, root, *settings, output))
        assert not (tmp_path / "run").exists()


REFUSED = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_OF_A_LATER_VERSION": "x"}
OF_ACCELERATE_LAUNCH = {
    **{"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"},
    **{"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"},
}


def test_what_accelerate_takes_from_the_environment_is_refused(tmp_path, monkeypatch, refused):
    """Unless it has no effect, or a setting says the same."""
    for name in describe_launcher():
        monkeypatch.delenv(name)
    words = [*TINY, f"--data.root={tmp_path}", f"--output={tmp_path / 'run'}"]
    for name, value in REFUSED.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert refused(main, *words).startswith(f"{name}={value}: ")
        assert [*tmp_path.iterdir()] == []
    for name, value in OF_ACCELERATE_LAUNCH.items():
        monkeypatch.setenv(name, value)
    check_launcher(parse([]).experiment)
    assert describe_launcher() == OF_ACCELERATE_LAUNCH
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    check_launcher(parse(["--precision=bf16"]).experiment)
