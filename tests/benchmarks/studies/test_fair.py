"""The fair protocol: its three kinds of number, counted again by hand, and evaluations that go on."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student_t

from benchmarks import fair
from benchmarks.console.writing import OwnedFolder
from benchmarks.records.files import write_json
from benchmarks.reporting import folds as reported
from benchmarks.studies.jobs import Job
from tests.benchmarks.made import DIVERGED, RECORD
from tests.benchmarks.reporting.made_runs import all_rows
from tests.benchmarks.studies.fakes import RECIPE, TINY, record_of


@pytest.fixture
def evaluated(tmp_path):
    """An evaluation with hand-made records: numbers[seed][fold] = (validation MAP@R, test Recall@1)."""

    def make(name: str, numbers: dict[int, list[tuple[float, float]]], **changes: Any) -> Path:
        folder = tmp_path / name
        for seed, folds in numbers.items():
            for fold, (value, recall) in enumerate(folds):
                data = {"split": "test", "fold": fold, "folds": len(folds)}
                config = {"label": name, "seed": seed, "data": data, "losses": [name]}
                config |= {"evaluation": {"recall_at": [1], "clustering": True}}
                config |= {"model": {"embedding_size": 64, "replace_layer": "features"}}
                run = folder / f"seed{seed}-fold{fold}"
                run.mkdir(parents=True)
                metrics = {"recall_at_1": recall, "mean_average_precision_at_r": recall / 2}
                record = record_of(config, value, metrics=metrics | {"F1": 0.5}, **changes)
                write_json(run / "run.json", record)
                vectors = EMBEDDINGS[fold % 2]
                np.savez(run / "test_embeddings.npz", embeddings=vectors, labels=LABELS)
        return folder

    return make


LABELS = np.array([0, 0, 1, 1])
# Degrees on the circle, at various lengths: an ensemble that forgets to normalise follows the long ones.
ANGLES = np.radians([[0.0, 80.0, 30.0, 200.0], [0.0, 5.0, 100.0, 140.0]])
LENGTHS = np.array([[9.0, 9.0, 9.0, 9.0], [1.0, 1.0, 1.0, 1.0]])
EMBEDDINGS = np.float32(np.stack([LENGTHS * np.cos(ANGLES), LENGTHS * np.sin(ANGLES)], axis=-1))


def interval(values: Sequence[float], sign: str = "") -> str:
    half = student_t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{100 * np.mean(values):{sign}.2f} ± {100 * half:.2f}"


NUMBERS = {
    seed: [(0.1 * fold + 0.01 * seed**2, 0.3 + 0.05 * fold + 0.02 * seed) for fold in range(4)]
    for seed in range(5)
}


def test_the_ensemble_by_hand(evaluated):
    """Cosines add up: of 0 and 1 cos 80 + cos 5 = 1.17, of 0 and 2 cos 30 + cos 100 = 0.69, ..."""
    method = reported.read_method(evaluated("a", {0: [(0.1, 0.2), (0.1, 0.2)]}))
    cosines = sum(np.cos(angles[:, None] - angles[None]) for angles in ANGLES)
    np.fill_diagonal(cosines, -9)
    assert cosines.argmax(axis=1).tolist() == [1, 0, 0, 2]
    assert method.numbers["ensemble"][0]["recall_at_1"] == 3 / 4
    assert method.numbers["ensemble"][0]["F1"] == pytest.approx(0.4), "{0, 1, 2} and {3}"


def test_three_kinds_of_number_are_paired_by_the_seeds_that_both_have(evaluated, capsys):
    other = {
        seed: [(value + 0.01 * seed, recall + 0.1 - 0.01 * seed) for value, recall in folds]
        for seed, folds in NUMBERS.items()
        if seed > 0
    }
    a, b = evaluated("a", NUMBERS), evaluated("b", other)
    assert fair.main(["compare", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    found = all_rows(text)
    assert [row["method"] for row in found] == ["a", "b", "b"] * 3
    validation, single, ensemble = found[::3]
    assert validation == {
        "method": "a",
        "validation MAP@R (%)": interval([np.mean(folds, 0)[0] for folds in NUMBERS.values()]),
        "models": "1 (mean of 4)",
        "dimensions": "2",
        "seeds": "5",
    }
    recalls = [np.mean(folds, 0)[1] for folds in NUMBERS.values()]
    assert single["test Recall@1 (%)"] == interval(recalls)
    assert (single["models"], single["dimensions"]) == ("1 (mean of 4)", "2")
    assert (ensemble["models"], ensemble["dimensions"]) == ("4 together", "8")
    assert ensemble["test Recall@1 (%)"] == "75.00 ± 0.00"
    assert not any(key.startswith("validation") for key in {**single, **ensemble})
    assert found[2]["MAP@R"] == interval([0.01 * seed for seed in other], "+")
    assert found[5]["Recall@1"] == interval([0.1 - 0.01 * seed for seed in other], "+")
    assert (found[5]["pairs"], found[8]["Recall@1"]) == ("4", "+0.00 ± 0.00")
    assert "Only 4 seeds: fewer than the protocol's 5." in text
    assert "Settings in which the methods differ: losses." in text


def test_a_run_that_diverged_is_counted_and_named(evaluated):
    folder = evaluated("a", NUMBERS)
    for fold in range(2):
        path = folder / f"seed3-fold{fold}" / "run.json"
        write_json(path, json.loads(path.read_text()) | DIVERGED)
    method = reported.read_method(folder)
    assert [*method.numbers["single"]] == [0, 1, 2, 4]
    text = reported.fair_comparison([method], 5)
    assert [row["seeds"] for row in all_rows(text)] == ["4 (diverged: seed 3)"] * 3
    assert "2 of its 4 folds are finished, diverged: seed3-fold0, seed3-fold1." in text


CUB = RECORD["data"] | {"name": "cub", "fold": "0 of 4", "view": None}


def test_what_cannot_be_compared(evaluated, refused):
    own = evaluated("a", NUMBERS)
    for other, message in (
        (evaluated("b", NUMBERS, data=CUB), "data name is 'cub', but 'glyphs'"),
        (evaluated("c", {0: NUMBERS[0][:2]}), "2 folds, but 4 in"),
    ):
        assert message in refused(fair.main, "compare", own, other)


def test_evaluation_goes_on_after_a_failure(tmp_path, trainings, refused, capsys):
    def end(number: int, run: Job) -> str:
        np.savez(run.folder / "test_embeddings.npz", embeddings=EMBEDDINGS[0], labels=LABELS)
        return "failed" if number == 2 else "finished"

    done = trainings(end)
    command = ["evaluate", RECIPE, "--seeds=2", f"--runs={tmp_path / 'runs'}", "--", *TINY]
    assert fair.main(command) == 1
    assert len(done.started) == 4
    captured = capsys.readouterr()
    assert "seed0-fold1: failed (exit status 1): the loss is nan at step 7; see" in captured.out
    assert "seed 0 is left out" in captured.out
    assert fair.main(command) == 0
    assert [run.folder.name for run in done.started[4:]] == ["seed0-fold1"]
    with OwnedFolder(tmp_path / "runs"):
        line = refused(fair.main, *command)
    assert f"being written by another process ({os.getpid()})" in line


def test_wrong_commands_are_one_line(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for arguments, message in (
        (["evaluate", RECIPE, "--", "--evaluation.oracle=true"], "evaluation.oracle"),
        (["search", RECIPE, "--space=x", "--", "--protocol=paper"], "--protocol=paper: is set"),
        (["search", RECIPE, "--space=x"], "pip install '.[benchmarks,search]'"),
        (["compare", "a", "--", "--seed=1"], "--seed=1: compare trains nothing"),
        (["compare", "nowhere"], "nowhere: found no run"),
    ):
        assert message in refused(fair.main, *arguments)
