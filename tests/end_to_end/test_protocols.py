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
SHORT = (*TINY, "--optimization.steps=12")


@pytest.fixture
def train(glyphs_root: Path, tmp_path: Path) -> Any:
    """Run with these settings on Glyphs; what run.json says."""

    def train(*settings: str) -> dict[str, Any]:
        return finished([f"--data.root={glyphs_root}", *SHORT, *settings], tmp_path / "run")

    return train


def rebuilt(folder: Path, state: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The network with these weights, and the images that it was trained and tested on."""
    run = parse([f"--config={folder / 'config.yaml'}"]).experiment
    model = build_model(run.model, run.data)
    model.load_state_dict(state["model"])
    datasets = build_datasets(run.data, fair=run.protocol == "fair")
    return model, show_to(model.trunk, datasets, run.data)


# ------------------------------------------------------------------------------------------- fair


def test_fair_tests_the_weights_that_validation_classes_choose(train: Any, tmp_path: Path) -> None:
    record = train("--protocol=fair", "--evaluation.every=3", "--optimization.learning_rate=0.03")
    curve = read_table(tmp_path / "run" / "records", "evaluation")
    assert curve["step"] == [0, 3, 6, 9, 12]
    assert record["before_training"] is None
    curve = {name: values[1:] for name, values in curve.items()}  # the start is never chosen
    best = curve[MAP].index(max(curve[MAP]))
    assert record["selection"] == {
        "metric": MAP,
        "step": curve["step"][best],
        "value": max(curve[MAP]),
    }
    state = load_best(tmp_path / "run", int(curve["step"][best]), run_identity(record))
    model, images = rebuilt(tmp_path / "run", state)
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
    [kept] = (tmp_path / "run" / "checkpoints").glob("best_*.pt")
    assert kept.name.startswith(f"best_{int(curve['step'][best]):09d}-")


def test_the_network_is_tested_before_training(
    train: Any, glyphs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This moves no number, as later tests do; it reads no test class under protocol fair, and is kept."""
    settings = [
        "--seed=3",
        "--optimization.steps=4",
        "--checkpoint_every=2",
        "--evaluation.every=1",
    ]
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
    record = train("--protocol=fair", "--data.split=validation", "--evaluation.every=6")
    assert opened[1] is opened[2]  # tested on what it was chosen by
    assert record["metrics"][MAP] == record["selection"]["value"]
    assert record["data"]["split"] == "validation"


def test_a_resumed_fair_run_keeps_its_choice(
    glyphs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"--data.root={glyphs_root}", *SHORT, "--protocol=fair", "--evaluation.every=2"]
    settings += ["--checkpoint_every=6", "--optimization.learning_rate=0.03"]
    assert runner.main([*settings, f"--output={tmp_path / 'whole'}"]) == 0
    evaluate_point = Curves.point
    # Killed after a point whose weights may be the best, before their checkpoint.
    monkeypatch.setattr(
        Curves, "point", lambda self, step: evaluate_point(self, step) if step < 10 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        runner.main([*settings, f"--output={tmp_path / 'killed'}"])
    (tmp_path / "killed" / "checkpoints" / "best_000000008.pt").touch()
    monkeypatch.setattr(Curves, "point", evaluate_point)
    assert runner.main([*settings, f"--output={tmp_path / 'killed'}", "--resume"]) == 0
    whole, killed = (
        json.loads((tmp_path / name / "run.json").read_text()) for name in ("whole", "killed")
    )
    assert killed["selection"] == whole["selection"]
    assert killed["metrics"] == whole["metrics"]
    [kept] = (tmp_path / "killed" / "checkpoints").glob("best_*.pt")
    assert kept.name.startswith(f"best_{whole['selection']['step']:09d}-")


# -------------------------------------------------------------------------------- paper and oracle


def test_the_oracle_is_the_best_by_the_test_set_and_is_told_apart(
    train: Any, tmp_path: Path
) -> None:
    oracle = ["--evaluation.oracle=true", "--evaluation.clustering=true"]
    record = train("--evaluation.every=3", *oracle, "--evaluation.recall_at=[1]")
    curve = read_table(tmp_path / "run" / "records", "oracle")
    assert curve["step"] == [3, 6, 9, 12]
    assert record["oracle"]["recall_at_1"] == max(curve["recall_at_1"])
    for metric in ("recall_at_1", "NMI", "F1"):
        assert record["metrics"][metric] == curve[metric][-1], "for curves over steps"
    assert record["selection"] is None


# ---------------------------------------------------------------------------------------- outputs


def test_orders_and_parts_are_what_they_say(train: Any, tmp_path: Path) -> None:
    record = train(horde(), "--evaluation.orders=true", "--evaluation.parts=4")
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    model, images = rebuilt(tmp_path / "run", checkpoint)
    model.eval()
    with torch.no_grad():
        pictures = torch.stack([images.test[i][0] for i in range(len(images.test))])
        features = model.trunk(pictures)
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
    assert list(record["outputs"]) == ["order_2", "order_3", "descriptor", "parts"]


def test_the_pooled_features_in_place_of_the_embeddings(
    train: Any, glyphs_root: Path, tmp_path: Path
) -> None:
    """Beside HORDE's descriptor, which the same pass reads."""
    asked = (horde(), "--evaluation.descriptor=true")
    asked += ("--evaluation.every=6",)
    record = train(*asked, "--evaluation.features=5")
    plain = finished([f"--data.root={glyphs_root}", *SHORT, *asked], tmp_path / "plain")
    names = ["descriptor", "features", "features_centred", "features_pca"]
    assert list(record["outputs"]) == names
    assert record["outputs"]["descriptor"] == plain["outputs"]["descriptor"]
    assert record["metrics"] == plain["metrics"]
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    model, images = rebuilt(tmp_path / "run", checkpoint)
    model.eval()
    pooled = []
    for dataset in (images.train, images.test):
        with torch.no_grad():
            maps = model.trunk(torch.stack([dataset[i][0] for i in range(len(dataset))]))
        pooled.append(maps.mean(dim=(2, 3)))
    trained, tested = pooled
    curve = read_table(tmp_path / "run" / "records", "evaluation")
    expected = class_cosines(tested, images.test.labels)  # Glyphs with few classes: all of them
    last = [curve[f"unseen_{kind}_class_cosine"][-1] for kind in ("same", "other")]
    assert last == pytest.approx(expected, abs=1e-4)
    assert curve["seen_same_class_cosine"][-1] > curve["seen_other_class_cosine"][-1]
    assert "seen_same_class_cosine" not in read_table(tmp_path / "plain" / "records", "evaluation")
    centred = tested - trained.mean(dim=0)
    components = torch.linalg.eigh((trained - trained.mean(dim=0)).T.cov()).eigenvectors[:, -5:]
    vectors = dict(zip(names[1:], (tested, centred, centred @ components), strict=True))
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


def test_scores_of_clusters_and_of_the_bound_only_on_request(train: Any, tmp_path: Path) -> None:
    record = train(
        "--evaluation.clustering=true", "--evaluation.parts=3", "--evaluation.divergence=true"
    )
    assert 0 < record["metrics"]["NMI"] < 1
    assert 0 < record["metrics"]["F1"] < 1
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    model, images = rebuilt(tmp_path / "run", checkpoint)
    model.eval()
    domains = []
    for dataset, first in ((images.train, 0), (images.test, 100)):
        with torch.no_grad():
            x = model(torch.stack([dataset[i][0] for i in range(len(dataset))]))
        rows = stratified_parts(dataset.labels, 3)
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
    settings += ["--precision=float64", "--optimization.steps=5", "--evaluation.every=2"]
    settings.append(f"--output={tmp_path / 'run'}")
    command = parse(settings)
    run = OngoingRun(command, settings, trial.start(command.experiment))
    with closing(run.record):
        model, loss = deepcopy((run.state.model, run.state.loss))
        optimizer, scheduler = build_optimizer(command.experiment.optimization, model, loss)
        assert scheduler is not None
        expected = []
        for step in range(5):
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
    assert len({*expected}) == 5
