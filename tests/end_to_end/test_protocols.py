"""Two protocols, the tests at the end, and the ways to save memory: small runs, in this process."""

import signal
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import default_collate

from benchmarks import run as runner
from benchmarks.building.images import build_datasets, show_to
from benchmarks.building.network import build_model
from benchmarks.building.objective import build_optimizer
from benchmarks.evaluation.curves import Curves
from benchmarks.evaluation.extract import class_cosines
from benchmarks.evaluation.generalization_bound import (
    confidence_interval,
    h_divergence,
    stratified_parts,
)
from benchmarks.evaluation.tester import Evaluator, measure
from benchmarks.records.run_folder import load_best, load_checkpoint, run_identity
from benchmarks.records.steps import read_table
from benchmarks.settings.command import parse
from benchmarks.training import run as training_run
from benchmarks.training.loop import Trainer
from tests.benchmarks.runs import assert_same_trace, finished, mark_unfinished, record_of, traced
from tests.support.processes import FROZEN_STATISTICS, TINY, horde

MAP = "mean_average_precision_at_r"
FAIR = ("--protocol=fair", "--evaluation.every=2", "--checkpoint_every=4")
FAIR += ("--optimization.steps=10", "--optimization.learning_rate=0.03")
EVERYTHING = ("orders=true", "parts=4", "clustering=true", "divergence=true", "features=5")
EVERYTHING += ("oracle=true",)


@pytest.fixture(scope="module")
def short(data: str) -> list[str]:
    return [data, *TINY, "--optimization.steps=6", "--data.batch_size=20"]


@pytest.fixture(scope="module")
def fair(short: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run by protocol fair."""
    folder = tmp_path_factory.mktemp("fair") / "run"
    finished([*short, *FAIR], folder)
    return folder


@pytest.fixture(scope="module")
def measured(short: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs that differ in what is measured: "everything", and the "plain" metrics."""
    folder, asked = tmp_path_factory.mktemp("measured"), [f"--evaluation.{x}" for x in EVERYTHING]
    settings = [*short, horde(), "--evaluation.descriptor=true", "--evaluation.every=2"]
    for name, more in {"everything": asked, "plain": []}.items():
        finished([*settings, *more], folder / name)
    return {name: folder / name for name in ("everything", "plain")}


def last_network(folder: Path) -> tuple[nn.Module, Any, Any]:
    """The network at a run's end, its images, and its last checkpoint."""
    checkpoint = load_checkpoint(folder)
    model, images = rebuilt(folder, checkpoint)
    return model.eval(), images, checkpoint


def stacked(dataset: Any) -> torch.Tensor:
    """The test views of all images."""
    return torch.stack([dataset[i][0] for i in range(len(dataset))])


def rebuilt(folder: Path, state: dict[str, Any] | None = None) -> tuple[nn.Module, Any]:
    """The network with these weights, or as it started, and the images that it was trained and tested on."""
    run = parse([f"--config={folder / 'config.yaml'}"]).experiment
    torch.manual_seed(run.seed)
    model = build_model(run.model, run.data)
    if state is not None:
        model.load_state_dict(state["model"])
    datasets = build_datasets(run.data, fair=run.protocol == "fair")
    return model, show_to(model.trunk, datasets, run.data)


def test_fair_tests_the_weights_that_validation_classes_choose(fair):
    record = record_of(fair)
    curve = read_table(fair / "records", "evaluation")
    assert curve["step"] == [0, 2, 4, 6, 8, 10]
    assert record["before_training"] is None
    curve = {name: values[1:] for name, values in curve.items()}  # the start is never chosen
    best = curve[MAP].index(max(curve[MAP]))
    selection = {"metric": MAP, "step": curve["step"][best], "value": max(curve[MAP])}
    assert record["selection"] == selection
    state = load_best(fair, int(curve["step"][best]), run_identity(record))
    model, images = rebuilt(fair, state)
    names = [{of.name(i) for i in range(len(of))} for of in images]
    assert len(set.union(*names)) == sum(map(len, names))
    tested = (images.validation, images.test)
    found = [Evaluator(Accelerator(), model, 256).evaluate(part, [1]) for part in tested]
    expected = [record["selection"]["value"], record["metrics"][MAP]]
    assert [measured.metrics[MAP] for measured in found] == expected
    assert record["data"]["fold"] == "0 of 4"
    [kept] = (fair / "checkpoints").glob("best_*.pt")
    assert kept.name.startswith(f"best_{int(curve['step'][best]):09d}-")


def test_the_network_is_tested_before_training(short, tmp_path, monkeypatch):
    """This moves no number, as later tests do."""
    settings = [*short, "--seed=3", "--optimization.steps=4"]
    with traced() as steps:
        record = finished([*settings, "--evaluation.every=2"], tmp_path / "run")
    model, images = rebuilt(tmp_path / "run")
    found = Evaluator(Accelerator(), model, 256).evaluate(images.test, [1, 2, 4, 8])
    assert record["before_training"] == found.metrics
    assert found.metrics.keys() == record["metrics"].keys()
    assert found.metrics != record["metrics"]
    assert record["per_class"].pop("queries") == [12] * record["data"]["test_classes"]
    for name, values in record["per_class"].items():
        mean = sum(values) / len(values) / 1e4
        assert mean == pytest.approx(record["metrics"][name], abs=5e-5)

    monkeypatch.setattr(training_run, "test_before_training", lambda *_: None)
    with traced() as untested:
        plain = finished([*settings, "--evaluation.every=0"], tmp_path / "plain")
    assert (plain["before_training"], plain["metrics"]) == (None, record["metrics"])
    assert len(steps) == 4
    assert_same_trace(steps, untested, 0)


def test_a_network_that_trains_nothing_is_tested_and_resumed(short, tmp_path):
    folder = tmp_path / "run"
    settings = [*short, "--optimization.steps=0", "--model.head=whitened", "--evaluation.every=2"]
    settings += ["--optimization.scheduler={class_path: torch.optim.lr_scheduler.OneCycleLR}"]
    settings += ["--model.embedding_size=8"]
    record = finished(settings, folder)
    outputs = record["outputs"]
    assert record["metrics"] == record["before_training"] == outputs["untrained_whitened"]
    assert record["metrics"] != outputs["untrained_pca"] and not record["never_acted"]
    assert load_checkpoint(folder, run_identity(record))["step"] == 0
    mark_unfinished(folder)
    assert finished([*settings, "--resume"], folder)["metrics"] == record["metrics"]


def test_a_resumed_fair_run_keeps_its_choice(fair, short, tmp_path, monkeypatch):
    settings, folder, point = [*short, *FAIR], tmp_path / "run", Curves.point
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        # Killed after a point whose weights may be the best, before their checkpoint.
        patch.setattr(Curves, "point", lambda self, step: point(self, step) if step < 8 else 1 / 0)
        finished(settings, folder)
    (folder / "checkpoints" / "best_000000006.pt").touch()
    killed, whole = finished([*settings, "--resume"], folder), record_of(fair)
    assert killed["sessions"][-1]["from_step"] == 4
    assert killed["selection"] == whole["selection"]
    assert killed["metrics"] == whole["metrics"]
    [kept] = (folder / "checkpoints").glob("best_*.pt")
    assert kept.name.startswith(f"best_{whole['selection']['step']:09d}-")


def test_the_oracle_is_the_best_by_the_test_set_and_is_told_apart(measured):
    record = record_of(measured["everything"])
    curve = read_table(measured["everything"] / "records", "oracle")
    assert curve["step"] == [2, 4, 6]
    assert record["oracle"]["recall_at_1"] == max(curve["recall_at_1"])
    for metric in ("recall_at_1", "NMI", "F1"):
        assert record["metrics"][metric] == curve[metric][-1], "for curves over steps"
    assert record["selection"] is None


def test_orders_and_parts_are_what_they_say(measured):
    record = record_of(measured["everything"])
    model, images, checkpoint = last_network(measured["everything"])
    with torch.no_grad():
        features = model.trunk(stacked(images.test))
        seen, unseen = model(stacked(images.train)), model.head(features)
    labels, seen_labels = images.test.labels, images.train.labels
    own = {name.removeprefix("loss."): tensor for name, tensor in checkpoint["loss"].items()}
    W = [own[f"moments.weight_{k}"] for k in range(3)]
    x = features.flatten(2).transpose(1, 2)
    phi = (x @ W[0]) * (x @ W[1])
    for k in (2, 3):
        order = phi.mean(dim=1) @ own[f"embeddings.order_{k}.weight"].T
        expected = measure(order, labels, [1, 2, 4, 8])
        assert record["outputs"][f"order_{k}"] == pytest.approx(expected, abs=0.02)
        phi = phi * (x @ W[2])

    parts = stratified_parts(labels, 4)
    both = [
        (seen[rows], seen_labels[rows], unseen[part], 100 + labels[part])
        for rows, part in zip(stratified_parts(seen_labels, 4), parts, strict=True)
    ]
    for name, values in {
        "recall_at_1": [measure(unseen[p], labels[p], [1])["recall_at_1"] for p in parts],
        "h_divergence": [h_divergence(*part) for part in both],
    }.items():
        mean, half_width = confidence_interval(values)
        assert record["outputs"]["parts"][name] == pytest.approx(mean, abs=0.02)
        assert record["half_widths"]["parts"][name] == pytest.approx(half_width, abs=0.02)
    assert 0 < record["outputs"]["parts"]["ideal_joint_error"] < 1


def test_other_outputs_and_scores_only_on_request(measured):
    """They are beside HORDE's descriptor, which the same pass reads."""
    record, plain = (record_of(folder) for folder in measured.values())
    records = (folder / "records" for folder in measured.values())
    curve, plain_curve = (read_table(folder, "evaluation") for folder in records)
    names = {"features", "features_centred", "features_pca", "features_whitened"}
    untrained = {"untrained_features", "untrained_pca", "untrained_whitened"}
    assert {*plain["outputs"]} - untrained == {"descriptor"}
    assert {*record["outputs"]} == {"order_2", "order_3", "descriptor", "parts", *names, *untrained}
    assert record["outputs"]["descriptor"] == plain["outputs"]["descriptor"]
    assert record["metrics"].items() >= plain["metrics"].items()
    assert record["metrics"].keys() - plain["metrics"].keys() == {"NMI", "AMI", "F1"}
    assert {"seen_same_class_cosine", "unseen_features_rank"} <= curve.keys() - {*plain_curve}

    model, images, _ = last_network(measured["everything"])
    with torch.no_grad():
        pooled = model.trunk(stacked(images.test)).mean(dim=(2, 3))
    expected = measure(pooled, images.test.labels, [1, 2, 4, 8])
    assert record["outputs"]["features"] == pytest.approx(expected, abs=0.02)
    same, other = class_cosines(pooled, images.test.labels)  # few classes: all of them
    assert curve["unseen_same_class_cosine"][-1] == pytest.approx(same, abs=1e-4)
    assert curve["unseen_other_class_cosine"][-1] == pytest.approx(other, abs=1e-4)


def test_sigterm_in_the_test_stops_the_run(short, tmp_path, monkeypatch):
    folder, arguments = tmp_path / "run", [*short, "--optimization.steps=2", "--resume"]
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "test_outputs", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert runner.main([*arguments, f"--output={folder}"]) == 128 + signal.SIGTERM
    assert record_of(folder)["status"] == "stopped"
    assert finished(arguments, folder)["status"] == "finished"


def test_mixed_precision_is_close_to_float32(short, tmp_path):
    settings = [*short, horde(), "--optimization.steps=2"]
    settings += [*FROZEN_STATISTICS, "--evaluation.descriptor=false"]
    losses = {}
    for name, more in {"float32": [], "bf16": ["--precision=bf16"]}.items():
        finished([*settings, *more], tmp_path / name)
        losses[name] = read_table(tmp_path / name / "records", "training")["loss"]
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["bf16"][0] != losses["float32"][0]


def test_the_runner_trains_as_a_plain_loop(short, tmp_path, monkeypatch):
    """The same batches, weights and learning rates give the same losses, to the bit."""
    schedule = "{class_path: torch.optim.lr_scheduler.ExponentialLR, init_args: {gamma: 0.5}}"
    settings = [*short, horde(), f"--optimization.scheduler={schedule}", "--precision=float64"]
    settings += ["--optimization.steps=3", "--evaluation.every=2"]
    expected, train = [], Trainer.run

    def compared(trainer: Trainer, loader: Any) -> None:
        model, loss = deepcopy((trainer.state.model, trainer.state.loss))
        model.train()
        settings = trainer.experiment.optimization
        optimizer, scheduler = build_optimizer(settings, model, loss)
        assert scheduler is not None
        for step in range(3):
            keys = trainer.sampler.batch(step)
            images, labels, _ = default_collate([loader.dataset[key] for key in keys])
            value = loss(model(images.double()), labels)
            value.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            expected.append(value.item())
        train(trainer, loader)

    monkeypatch.setattr(Trainer, "run", compared)
    finished(settings, tmp_path / "run")
    assert read_table(tmp_path / "run" / "records", "training")["loss"] == expected
    assert len({*expected}) == 3
