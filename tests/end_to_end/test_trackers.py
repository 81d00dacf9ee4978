"""Accelerate's trackers get the rows of the record, neither more nor fewer."""

import json
from typing import Any
from unittest import mock

import pytest
from accelerate import tracking

from benchmarks.records.steps import read_table
from benchmarks.run import main
from benchmarks.studies.jobs import make_job, read
from tests.benchmarks.runs import finished, forget, mark_unfinished
from tests.support.processes import TINY, horde


class Kept(tracking.GeneralTracker):
    """Keeps what it gets."""

    name = "kept"
    requires_logging_directory = False
    tracker = None
    runs: list["Kept"] = []

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.config: dict[str, Any] = {}
        self.ended = False
        self.runs.append(self)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, float], step: int | None, **kwargs: Any) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.ended = True


gone = mock.Mock(side_effect=ConnectionError("gone"))


@pytest.fixture
def settings(data: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Kept, "runs", [])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, Kept.name, Kept)
    return [
        *(data, *TINY, horde(), "--evaluation.descriptor=false", "--data.batch_size=20"),
        *("--optimization.steps=10", "--evaluation.every=5", "--evaluation.curve_classes=2"),
        "--checkpoint_every=5",
    ]


def test_the_rows_of_a_tracker_are_those_of_the_record(settings, tmp_path):
    record = finished([*settings, "--trackers=[kept]"], tmp_path / "run")
    (kept,) = Kept.runs
    got = {(step, name): value for step, row in kept.rows for name, value in row.items()}
    test = {name: got.pop((10, f"test/{name}")) for name in record["metrics"]}
    assert test == record["metrics"]
    expected = {}
    for table in ("training", "terms", "evaluation"):
        columns = read_table(tmp_path / "run" / "records", table)
        steps = columns.pop("step")
        for name, values in columns.items():
            expected |= {(s, f"{table}/{name}"): x for s, x in zip(steps, values, strict=True)}
    assert got == expected
    steps = [step for step, _ in kept.rows]
    assert steps == sorted(steps)
    assert json.loads(json.dumps(kept.config))["optimization.steps"] == 10 and kept.ended

    # They are no part of what a run computes: it goes on without them.
    mark_unfinished(tmp_path / "run")
    assert finished([*settings, "--resume"], tmp_path / "run")["metrics"] == record["metrics"]
    assert len(Kept.runs) == 1
    both = (read([*settings, *more]) for more in ([], ["--trackers=[kept]"]))
    assert len({make_job(command, tmp_path, {}).digest for command in both}) == 1


def test_a_tracker_that_cannot_start(settings, tmp_path, monkeypatch, refused):
    monkeypatch.setattr(Kept, "start", gone)
    for name, said in {
        "wandbb": "Accelerate has no 'wandbb'; it has ",
        "aim": "aim is not installed",
        "kept": "kept does not start: ConnectionError: gone",
    }.items():
        forget()
        words = [*settings, f"--trackers=[{name}]", f"--output={tmp_path / name}"]
        assert refused(main, *words).startswith(f"trackers: {said}")
        assert not (tmp_path / name / "run.json").exists()


def test_a_tracker_that_fails_leaves_the_run_alone(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Kept, "log", gone)
    finished([*settings, "--trackers=[kept]"], tmp_path / "run")
    assert capsys.readouterr().out.count("trackers: ConnectionError: gone") == 1
