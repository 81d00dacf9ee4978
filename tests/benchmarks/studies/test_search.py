"""Searches: their space, what they try, that they can be killed, and what cannot change."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

from benchmarks import fair
from benchmarks.building import images
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.run import main
from benchmarks.settings.command import parse
from benchmarks.settings.differences import changed
from benchmarks.settings.errors import ConfigError
from benchmarks.studies.jobs import Job
from benchmarks.studies.launching import Launcher
from benchmarks.studies.search import read_space
from tests.benchmarks.studies.fakes import RECIPE, SPACE, TINY, Ended, value_of

NO_RANGES = (
    *("{low: 2, high: 1}", "{choices: [avg]}", "{choices: [{a: 1}, 2]}"),
    *("{low: no, high: 2}", "{low: 0, high: 1, log: true}"),
    *("{low: 1, high: 1.5, int: true}", "{low: 1, high: 2, log: 'off'}"),
)


def test_wrong_spaces(space):
    for text, message in (
        ("{}", "at least one setting"),
        ("evaluation.every: {low: 1, high: 2}", "says what a trial is measured on"),
        *((f"a: {given}", "a: expected {low: NUMBER, high: LARGER") for given in NO_RANGES),
    ):
        space.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_space(space)


def test_ranges(space):
    space.write_text("a: {low: 1e-4, high: 1, log: true}\nb: {choices: [x, null, 1]}")
    a, b = FloatDistribution(1e-4, 1.0, log=True), CategoricalDistribution(["x", None, 1])
    assert read_space(space) == {"a": a, "b": b}


def test_paths_into_settings():
    overrides = {"model.head": {"lr": 1}, "model.head.fc": {"lr": 2}}
    settings = {"losses": [{"weight": 1.0}], "optimization": {"overrides": overrides}}
    before, paths = json.dumps(settings), ("overrides.model.head.fc.lr", "loss_learning_rate")
    values = {"losses[0].weight": 3, **{f"optimization.{path}": 6 for path in paths}}
    optimization = {"overrides": overrides | {"model.head.fc": {"lr": 6}}, "loss_learning_rate": 6}
    assert changed(settings, values) == {"losses": [{"weight": 3}], "optimization": optimization}
    assert json.dumps(settings) == before
    with pytest.raises(ConfigError, match=r"losses\[1\].weight: leads nowhere"):
        changed(settings, {"losses[1].weight": 1})


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_search_maximises_the_mean_over_the_folds(make_search, trainings, capsys):
    done = trainings()
    searched = make_search()
    assert searched.execute(Launcher()) == 0
    assert len(done.started) == 3 * 2
    rows = table(searched.folder)
    assert [int(row["trial"]) for row in rows] == list(range(3))
    assert len({row["optimization.learning_rate"] for row in rows}) == 3
    for row, *runs in zip(rows, done.started[::2], done.started[1::2], strict=True):
        configs = [run.config for run in runs]
        assert [config["data"]["fold"] for config in configs] == [0, 1]
        assert {config["data"]["split"] for config in configs} == {"validation"}
        assert {config["protocol"] for config in configs} == {"fair"}
        assert float(row["validation MAP@R"]) == pytest.approx(np.mean([*map(value_of, configs)]))
        assert float(row["model.embedding_size"]) == configs[0]["model"]["embedding_size"]
        assert row["model.pool"] == configs[1]["model"]["pool"]
    best = max(rows, key=lambda row: float(row["validation MAP@R"]))
    # best.yaml describes a whole run, for any protocol and fold.
    found = parse(["--config", str(searched.folder / "best.yaml"), "--protocol=fair"]).experiment
    assert found.data.split == "test"
    assert found.optimization.learning_rate == float(best["optimization.learning_rate"])
    printed = capsys.readouterr().out.replace(str(searched.folder), "").lower()
    assert "validation map@r" in printed
    assert "test" not in printed


class KilledError(BaseException):
    """Nothing in the search catches it."""


MOMENTS = {
    "drawing": (optuna.samplers.TPESampler, "sample_independent", 6),
    "training": (Launcher, "place", 1),
    "telling": (np, "mean", 1),
}


def test_a_killed_study_goes_on_as_if_it_never_was(make_search, trainings, monkeypatch, tmp_path):
    trainings()
    whole = make_search(folder=tmp_path / "whole")
    whole.execute(Launcher())

    def deadly(original: Callable[..., Any], calls: int) -> Callable[..., Any]:
        count = iter(range(calls))

        def call(*arguments: Any, **keywords: Any) -> Any:
            if next(count, None) is None:
                raise KilledError
            return original(*arguments, **keywords)

        return call

    for moment, (owner, name, calls) in MOMENTS.items():
        stopped = make_search(folder=tmp_path / moment)
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(owner, name, deadly(getattr(owner, name), calls))
            stopped.execute(Launcher())
        with (stopped.folder / "journal.log").open("ab") as journal:
            journal.write(b'{"op_code": ')  # all that a full disk has taken
        assert stopped.execute(Launcher()) == 0
        assert table(stopped.folder) == table(whole.folder), moment


def test_what_a_search_is_cannot_change(make_search, space):
    first = make_search()
    first.folder.mkdir()
    first.begin()
    first.begin()
    space.write_text(SPACE.replace("4.0", "5.0"))
    for changes, message in (
        ({"trials": 4}, "--trials: .* was started with 3, not 4"),
        ({"space": read_space(space)}, r"--space\.losses.*alpha: .* was started with 'Float"),
        ({"settings": [*TINY, "--optimization.steps=3"]}, "optimization.steps: .* with 2, not 3"),
    ):
        with pytest.raises(RuntimeError, match=message):
            make_search(**{"space": first.space} | changes).begin()
    (first.folder / "journal.log").unlink()
    (first.folder / "trials").mkdir()
    with pytest.raises(RuntimeError, match=r"journal.log: is missing, but .* has trials"):
        first.begin()


def test_a_trial_has_the_defaults_of_its_classes(make_search, space):
    space.write_text(
        "optimization.optimizer.class_path: {choices: [torch.optim.Adam, torch.optim.SGD]}\n"
        "losses[0].loss.init_args.distance.init_args.power: {low: 1, high: 2, int: true}\n"
    )
    searched = make_search(space=read_space(space))
    adam, sgd = (
        searched.changed(dict(zip(searched.space, values, strict=True))).config()
        for values in (("torch.optim.Adam", 1), ("torch.optim.SGD", 2))
    )
    assert "betas" in adam["optimization"]["optimizer"]["init_args"]
    assert "nesterov" in sgd["optimization"]["optimizer"]["init_args"]
    distances = [config["losses"][0]["loss"]["init_args"]["distance"] for config in (adam, sgd)]
    assert [distance["init_args"]["power"] for distance in distances] == [1, 2]


def test_a_trial_that_fails_is_one_of_the_budget(make_search, trainings):
    done = trainings(lambda number, run: "failed" if number == 2 else "finished")
    searched = make_search(trials=2)
    assert searched.execute(Launcher()) == 0
    rows, best = table(searched.folder), (searched.folder / "best.yaml").read_bytes()
    assert [row["failed"] for row in rows] == ["the loss is nan at step 7", ""]
    assert len(done.started) == 2 + 1 * 2
    again = trainings()
    assert make_search(trials=2).execute(Launcher()) == 0
    assert again.started == [], "neither what is finished nor what failed"
    assert (table(searched.folder), (searched.folder / "best.yaml").read_bytes()) == (rows, best)
    trainings(lambda number, run: "failed")
    hopeless = make_search(trials=1, folder=searched.folder.with_name("hopeless"))
    assert hopeless.execute(Launcher()) == 1
    assert not (hopeless.folder / "best.yaml").exists()


def test_a_run_ended_from_outside_is_not_the_settings_fault(make_search, trainings, capsys):
    trainings(lambda number, run: "finished" if number < 4 else "running")
    searched = make_search(trials=2)
    assert searched.execute(Launcher()) == 1
    [line] = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: trial 1: ")
    assert line.endswith("to resume this trial")
    done = trainings()
    assert searched.execute(Launcher()) == 0
    assert done.started[0].folder.name == "0001-fold1"
    assert len(table(searched.folder)) == 2


def test_trials_at_once(make_search, trainings):
    """Both of two trials have begun before one ends; a kill loses neither their numbers nor their values."""

    def end(number: int, run: Job) -> str:
        assert len(killed.started) % 2 == 0
        if number > 4:
            raise KilledError
        return "finished"

    killed = trainings(end)
    searched = make_search(trials=4)
    with pytest.raises(KilledError):
        searched.execute(Launcher(jobs=2))
    begun = {run.folder: run.config for run in killed.started}
    assert len(begun) == 6

    after = trainings()
    assert make_search(trials=4).execute(Launcher(jobs=2)) == 0
    assert len(after.started) == 4
    for run in after.started[:2]:
        assert begun[run.folder] == run.config
    assert [int(row["trial"]) for row in table(searched.folder)] == list(range(4))


def test_a_search_never_loads_the_test_classes(glyphs_root, tmp_path, monkeypatch):
    splits, started = [], []

    def glyphs(*arguments: Any, **keywords: Any) -> Glyphs:
        splits.append(keywords["split"])
        assert keywords["split"] != "test"
        return Glyphs(*arguments, **keywords)

    def place(launcher: Launcher, command: list[str], job: Job) -> Ended:
        started.append(job)
        return Ended(lambda: main(command[2:]))

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(Launcher, "place", place)
    monkeypatch.setattr(images, "Glyphs", glyphs)
    monkeypatch.setattr(glyphs, "in_chans", 1, raising=False)
    space = tmp_path / "space.yaml"
    space.write_text("losses[0].loss.init_args.alpha: {low: 1.0, high: 4.0}")
    settings = [f"--data.root={glyphs_root}", *TINY]
    command = ["search", RECIPE, "--trials=1", f"--space={space}"]
    assert fair.main([*command, f"--runs={tmp_path / 'search'}", "--", *settings]) == 0
    assert set(splits) == {"development", "validation"}
    job, _ = started
    record = json.loads((job.folder / "run.json").read_text())
    [row] = table(tmp_path / "search")
    assert record["data"]["split"] == "validation"
    alpha = record["config"]["losses"][0]["loss"]["init_args"]["alpha"]
    assert alpha == float(row["losses[0].loss.init_args.alpha"])
    assert record["selection"]["value"] == float(row["validation MAP@R, fold 0"])
    assert not [*(job.folder / "checkpoints").glob("*.pt")]
