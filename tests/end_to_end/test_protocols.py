"""Two protocols, the tests at the end, and the ways to save memory: small runs, in this process."""

import json
import signal
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import default_collate

from benchmarks import evaluation
from benchmarks import run as runner
from benchmarks.building.images import build_datasets, show_to
from benchmarks.building.network import build_model
from benchmarks.building.objective import build_optimizer
from benchmarks.evaluation.curves import Curves
from benchmarks.evaluation.extract import class_cosines
from benchmarks.evaluation.generalization_bound import (
    confidence_interval,
    h_divergence,
    ideal_joint_error,
    stratified_parts,
)
from benchmarks.evaluation.tester import Evaluator, measure
from benchmarks.records.run_folder import load_best, load_checkpoint, run_identity
from benchmarks.records.steps import read_table
from benchmarks.run import OngoingRun
from benchmarks.settings.command import parse
from benchmarks.training import trial
from tests.benchmarks.runs import assert_same_trace, finished, mark_unfinished, traced
from tests.support.processes import FROZEN_STATISTICS, TINY, horde

MAP = "mean_average_precision_at_r"
SHORT = (*TINY, "--optimization.steps=6", "--data.batch_size=30")


@pytest.fixture
def train(glyphs_root: Path, tmp_path: Path) -> Any:
    """Run with these settings on Glyphs; what run.json says."""

    def train(*settings: str) -> dict[str, Any]:
        return finished([f"--data.root={glyphs_root}", *SHORT, *settings], tmp_path / "run")

    return train


FAIR = ("--protocol=fair", "--evaluation.every=2", "--checkpoint_every=4")
FAIR += ("--optimization.steps=10", "--optimization.learning_rate=0.03")
EVERYTHING = ("orders=true", "parts=4", "clustering=true", "divergence=true", "features=5")


@pytest.fixture(scope="module")
def fair(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run by protocol fair."""
    folder = tmp_path_factory.mktemp("fair") / "run"
    finished([data, *SHORT, *FAIR], folder)
    return folder


@pytest.fixture(scope="module")
def measured(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs that differ in what is measured: "everything", and the "plain" metrics."""
    folder, asked = tmp_path_factory.mktemp("measured"), [f"--evaluation.{x}" for x in EVERYTHING]
    settings = [data, *SHORT, horde(), "--evaluation.descriptor=true", "--evaluation.every=3"]
    for name, more in {"everything": asked, "plain": []}.items():
        finished([*settings, *more], folder / name)
    return {name: folder / name for name in ("everything", "plain")}


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return record


def last_network(folder: Path) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The network at a run's end, its images, and its last checkpoint."""
    checkpoint = load_checkpoint(folder)
    assert checkpoint is not None
    model, images = rebuilt(folder, checkpoint)
    return model.eval(), images, checkpoint


def stacked(dataset: Any) -> torch.Tensor:
    """The test views of all images."""
    return torch.stack([dataset[i][0] for i in range(len(dataset))])


def rebuilt(folder: Path, state: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The network with these weights, and the images that it was trained and tested on."""
    run = parse([f"--config={folder / 'config.yaml'}"]).experiment
    model = build_model(run.model, run.data)
    model.load_state_dict(state["model"])
    datasets = build_datasets(run.data, fair=run.protocol == "fair")
    return model, show_to(model.trunk, datasets, run.data)


# ------------------------------------------------------------------------------------------- fair


def test_fair_tests_the_weights_that_validation_classes_choose(fair: Path) -> None:
    record = record_of(fair)
    curve = read_table(fair / "records", "evaluation")
    assert curve["step"] == [0, 2, 4, 6, 8, 10]
    assert record["before_training"] is None
    curve = {name: values[1:] for name, values in curve.items()}  # the start is never chosen
    best = curve[MAP].index(max(curve[MAP]))
    assert record["selection"] == {
        "metric": MAP,
        "step": curve["step"][best],
        "value": max(curve[MAP]),
    }
    state = load_best(fair, int(curve["step"][best]), run_identity(record))
    model, images = rebuilt(fair, state)
    names = [set(map(images.train.name, range(len(images.train)))), set(), set()]
    for i, dataset in enumerate((images.validation, images.test), start=1):
        names[i] = set(map(dataset.name, range(len(dataset))))
    assert not names[0] & names[1] and not (names[0] | names[1]) & names[2]
    for dataset, expected in (
        (images.validation, record["selection"]["value"]),
        (images.test, record["metrics"][MAP]),
    ):
        found = Evaluator(Accelerator(), model, 256).evaluate(dataset, [1])
        assert found.metrics[MAP] == expected
    assert record["data"]["fold"] == "0 of 4"
    [kept] = (fair / "checkpoints").glob("best_*.pt")
    assert kept.name.startswith(f"best_{int(curve['step'][best]):09d}-")


def test_the_network_is_tested_before_training(
    train: Any, glyphs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This moves no number, as later tests do; it reads no test class under protocol fair, and is kept."""
    settings = ["--seed=3", "--optimization.steps=4", "--checkpoint_every=2"]
    settings += ["--evaluation.every=2"]
    with traced() as steps:
        record = train(*settings)
    run = parse([f"--config={tmp_path / 'run' / 'config.yaml'}"]).experiment
    torch.manual_seed(3)
    model = build_model(run.model, run.data)
    images = show_to(model.trunk, build_datasets(run.data), run.data)
    found = Evaluator(Accelerator(), model, 256).evaluate(images.test, [1, 2, 4, 8])
    assert record["before_training"] == found.metrics
    assert found.metrics.keys() == record["metrics"].keys()
    assert found.metrics != record["metrics"]
    queries = torch.tensor(record["per_class"].pop("queries"))
    assert queries.tolist() == [12] * record["data"]["test_classes"]
    for name, values in record["per_class"].items():
        mean = (queries * torch.tensor(values)).sum() / queries.sum() / 1e4
        assert mean.item() == pytest.approx(record["metrics"][name], abs=5e-5)

    mark_unfinished(tmp_path / "run")
    next((tmp_path / "run" / "checkpoints").glob("step_000000004*")).unlink()
    resumed = train(*settings, "--resume")
    assert resumed["sessions"][-1]["from_step"] == 2
    assert resumed["before_training"] == found.metrics
    assert resumed["metrics"] == record["metrics"]

    (tmp_path / "run").rename(tmp_path / "before")
    monkeypatch.setattr(OngoingRun, "test_start", lambda run: None)
    with traced() as untested:
        plain = train(*settings, "--evaluation.every=0")
    assert (plain["before_training"], plain["metrics"]) == (None, record["metrics"])
    assert len(steps) == 4
    assert_same_trace(steps, untested, 0)


def test_fair_can_leave_the_test_classes_alone(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    original = trial.build_datasets

    def watched(*arguments: Any, **options: Any) -> Any:
        images = original(*arguments, **options)
        opened.extend(images)
        return images

    monkeypatch.setattr(trial, "build_datasets", watched)
    record = train("--protocol=fair", "--data.split=validation", "--evaluation.every=3")
    assert opened[1] is opened[2]  # tested on what it was chosen by
    assert record["metrics"][MAP] == record["selection"]["value"]
    assert record["data"]["split"] == "validation"


def test_a_resumed_fair_run_keeps_its_choice(
    fair: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, folder, evaluate_point = [data, *SHORT, *FAIR], tmp_path / "run", Curves.point
    with monkeypatch.context() as patch:
        # Killed after a point whose weights may be the best, before their checkpoint.
        patch.setattr(
            Curves, "point", lambda self, step: evaluate_point(self, step) if step < 8 else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            finished(settings, folder)
    (folder / "checkpoints" / "best_000000006.pt").touch()
    killed, whole = finished([*settings, "--resume"], folder), record_of(fair)
    assert killed["sessions"][-1]["from_step"] == 4
    assert killed["selection"] == whole["selection"]
    assert killed["metrics"] == whole["metrics"]
    [kept] = (folder / "checkpoints").glob("best_*.pt")
    assert kept.name.startswith(f"best_{whole['selection']['step']:09d}-")


# -------------------------------------------------------------------------------- paper and oracle


def test_the_oracle_is_the_best_by_the_test_set_and_is_told_apart(
    train: Any, tmp_path: Path
) -> None:
    oracle = ["--evaluation.oracle=true", "--evaluation.clustering=true"]
    record = train("--evaluation.every=2", *oracle, "--evaluation.recall_at=[1]")
    curve = read_table(tmp_path / "run" / "records", "oracle")
    assert curve["step"] == [2, 4, 6]
    assert record["oracle"]["recall_at_1"] == max(curve["recall_at_1"])
    for metric in ("recall_at_1", "NMI", "F1"):
        assert record["metrics"][metric] == curve[metric][-1], "for curves over steps"
    assert record["selection"] is None


# ---------------------------------------------------------------------------------------- outputs


def test_orders_and_parts_are_what_they_say(measured: dict[str, Path]) -> None:
    record = record_of(measured["everything"])
    model, images, checkpoint = last_network(measured["everything"])
    with torch.no_grad():
        features = model.trunk(stacked(images.test))
        embeddings = model.head(features)
    labels = images.test.labels
    own = {name.removeprefix("loss."): tensor for name, tensor in checkpoint["loss"].items()}
    W = [own[f"moments.weight_{k}"] for k in range(3)]
    x = features.flatten(2).transpose(1, 2)
    phi = (x @ W[0]) * (x @ W[1])
    for k in (2, 3):
        order = phi.mean(dim=1) @ own[f"embeddings.order_{k}.weight"].T
        expected = measure(order, labels, [1, 2, 4, 8])
        assert record["outputs"][f"order_{k}"] == pytest.approx(expected, abs=0.02)
        phi = phi * (x @ W[2])
    parts = [
        measure(embeddings[rows], labels[rows], [1])["recall_at_1"]
        for rows in stratified_parts(labels, 4)
    ]
    mean = sum(parts) / 4
    deviation = (sum((p - mean) ** 2 for p in parts) / 3) ** 0.5
    assert record["outputs"]["parts"]["recall_at_1"] == pytest.approx(mean)
    assert record["half_widths"]["parts"]["recall_at_1"] == pytest.approx(1.96 * deviation / 2)


def test_the_pooled_features_in_place_of_the_embeddings(measured: dict[str, Path]) -> None:
    """Beside HORDE's descriptor, which the same pass reads."""
    record, plain = (record_of(measured[name]) for name in ("everything", "plain"))
    names = ["features", "features_centred", "features_pca"]
    assert list(plain["outputs"]) == ["descriptor"]
    assert {*record["outputs"]} == {"order_2", "order_3", "descriptor", *names, "parts"}
    assert record["outputs"]["descriptor"] == plain["outputs"]["descriptor"]
    assert record["metrics"].items() >= plain["metrics"].items()
    model, images, _ = last_network(measured["everything"])
    with torch.no_grad():
        trained, tested = (
            model.trunk(stacked(dataset)).mean(dim=(2, 3))
            for dataset in (images.train, images.test)
        )
    curve = read_table(measured["everything"] / "records", "evaluation")
    expected = class_cosines(tested, images.test.labels)  # Glyphs with few classes: all of them
    last = [curve[f"unseen_{kind}_class_cosine"][-1] for kind in ("same", "other")]
    assert last == pytest.approx(expected, abs=1e-4)
    assert curve["seen_same_class_cosine"][-1] > curve["seen_other_class_cosine"][-1]
    assert "seen_same_class_cosine" not in read_table(measured["plain"] / "records", "evaluation")
    centred = tested - trained.mean(dim=0)
    components = torch.linalg.eigh((trained - trained.mean(dim=0)).T.cov()).eigenvectors[:, -5:]
    vectors = dict(zip(names, (tested, centred, centred @ components), strict=True))
    found = {
        name: measure(rows, images.test.labels, [1, 2, 4, 8]) for name, rows in vectors.items()
    }
    for name, expected in found.items():
        assert record["outputs"][name] == pytest.approx(expected, abs=0.02)
        classes = record["per_class_of_outputs"][name]
        assert classes["queries"] == record["per_class"]["queries"]
        for metric in ("recall_at_1", MAP):
            weighted = torch.tensor(classes[metric]) * torch.tensor(classes["queries"])
            mean = weighted.sum() / sum(classes["queries"]) / 1e4
            assert mean.item() == pytest.approx(record["outputs"][name][metric], abs=1e-4)
    assert found["features"] != found["features_centred"] != found["features_pca"]


def test_scores_of_clusters_and_of_the_bound_only_on_request(measured: dict[str, Path]) -> None:
    record, plain = (record_of(measured[name]) for name in ("everything", "plain"))
    assert record["metrics"].keys() - plain["metrics"].keys() == {"NMI", "AMI", "F1"}
    assert 0 < record["metrics"]["NMI"] < 1
    assert 0 < record["metrics"]["F1"] < 1
    model, images, _ = last_network(measured["everything"])
    domains = []
    for dataset, first in ((images.train, 0), (images.test, 100)):
        with torch.no_grad():
            x = model(stacked(dataset))
        rows = stratified_parts(dataset.labels, 4)
        domains.append([(x[part], dataset.labels[part] + first) for part in rows])
    both = [(*seen, *unseen) for seen, unseen in zip(*domains, strict=True)]
    found, half_widths = record["outputs"]["parts"], record["half_widths"]["parts"]
    for name, values in {
        "ideal_joint_error": [ideal_joint_error(*part) / 2 for part in both],
        "h_divergence": [h_divergence(*part) for part in both],
    }.items():
        mean, half_width = confidence_interval(values)
        assert 0 < mean < 1
        assert found[name] == pytest.approx(mean, abs=0.02)
        assert half_widths[name] == pytest.approx(half_width, abs=0.02)


def test_what_cannot_be_tested_is_said_before_the_training(
    glyphs_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--data.root={glyphs_root}", *SHORT, "--evaluation.orders=true"]
    assert runner.main([*arguments, f"--output={tmp_path / 'run'}"]) == 2
    said = "error: evaluation.orders: needs one HORDELoss among the losses"
    assert capsys.readouterr().err.startswith(said)
    assert not (tmp_path / "run").exists()


def test_sigterm_in_the_test_stops_the_run(
    glyphs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    arguments = [f"--data.root={glyphs_root}", *SHORT, "--resume"]
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "test_outputs", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert runner.main([*arguments, f"--output={folder}"]) == 128 + signal.SIGTERM
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"
    assert finished(arguments, folder)["status"] == "finished"


# ------------------------------------------------------------------------------------- the network


def test_mixed_precision_is_close_to_float32(glyphs_root: Path, tmp_path: Path) -> None:
    settings = [f"--data.root={glyphs_root}", *SHORT, horde(), "--optimization.steps=2"]
    settings += [*FROZEN_STATISTICS, "--evaluation.descriptor=false"]
    losses = {}
    for name, more in {"float32": [], "bf16": ["--precision=bf16"]}.items():
        finished([*settings, *more], tmp_path / name)
        losses[name] = read_table(tmp_path / name / "records", "training")["loss"]
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["bf16"][0] != losses["float32"][0]


def test_fp16_without_a_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--precision=fp16", f"--output={tmp_path / 'run'}"]) == 2
    assert "error: precision: fp16 needs a GPU" in capsys.readouterr().err


def test_clustering_without_faiss_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.training.trial.find_spec", lambda name: None)
    words = ["--evaluation.clustering=true", f"--output={tmp_path / 'run'}"]
    assert runner.main(words) == 2
    assert "error: evaluation.clustering: needs faiss" in capsys.readouterr().err


def test_the_runner_trains_as_a_plain_loop(data: str, tmp_path: Path) -> None:
    """The same batches, weights and learning rates give the same losses, to the bit."""
    schedule = "{class_path: torch.optim.lr_scheduler.ExponentialLR, init_args: {gamma: 0.5}}"
    settings = [data, *TINY, horde(), f"--optimization.scheduler={schedule}"]
    settings += ["--precision=float64", "--optimization.steps=3", "--evaluation.every=2"]
    settings += ["--data.batch_size=20"]
    settings.append(f"--output={tmp_path / 'run'}")
    command = parse(settings)
    run = OngoingRun(command, settings, trial.start(command.experiment))
    with closing(run.record):
        model, loss = deepcopy((run.state.model, run.state.loss))
        optimizer, scheduler = build_optimizer(command.experiment.optimization, model, loss)
        assert scheduler is not None
        expected = []
        for step in range(3):
            keys = run.sampler.batch(step)
            images, labels, _ = default_collate([run.images.train[key] for key in keys])
            value = loss(model(images.double()), labels)
            value.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            expected.append(value.item())
        run.train()
    assert read_table(tmp_path / "run" / "records", "training")["loss"] == expected
    assert len({*expected}) == 3
