"""The sweep: what it starts, skips, resumes and refuses, and what it tells of each run."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records.files import write_json
from benchmarks.records.run_folder import RunFolder
from benchmarks.settings import recipe_files
from benchmarks.settings.command import parse
from benchmarks.studies.jobs import Job, plan, trainings
from benchmarks.studies.launching import Launcher
from benchmarks.sweep import main
from tests.benchmarks.made import DIVERGED, LOSSES, RECORD, use_recipes, write_record
from tests.benchmarks.studies.fakes import Ended
from tests.support.processes import ROOT

RUNS: dict[str, tuple[str, int, dict[str, Any] | None]] = {
    **dict.fromkeys(("quick", "other"), ("", 0, RECORD)),
    "bad": ("error: it broke", 1, None),
    "taken": ("error: somebody is at it", 3, None),
    "silent": ("", 0, None),
    "wild": ("", 1, RECORD | DIVERGED),
}
"""What the run of a row prints, its exit status and its run.json."""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The commands of the runs, which stand-ins take: of two tables of tiny recipes, in an empty folder."""
    shared = {"losses": LOSSES, "optimization": {"steps": 30}}
    content = {"shared": shared, "trainings": {row: {"label": row} for row in RUNS}}
    again = {"trainings": {"same": {"same_as": "toy/table1/quick"}}}
    use_recipes(tmp_path, monkeypatch, {"toy/table1": content, "toy/table2": again})
    commands: dict[str, list[str]] = {}

    def place(launcher: Launcher, command: list[str], job: Job) -> Ended:
        said, status, record = RUNS[job.training.rpartition("/")[2]]
        commands[job.folder.name] = command
        job.log.write_text(f"{said}\n")
        job.folder.mkdir(exist_ok=True)
        if record:
            write_json(job.folder / "run.json", record)
        return Ended(lambda: status)

    (tmp_path / "work").mkdir()
    monkeypatch.setattr(Launcher, "place", place)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path / "work")
    return commands


def statuses(output: str) -> dict[tuple[str, str], str]:
    """{(row, seed): status}, as its lines tell."""
    found = re.findall(r"toy/table1/(\w+), seed (\d+): ([a-z ]*[a-z])", output)
    return {(row, seed): status for row, seed, status in found}


def record(row: str, seed: int = 0, status: str = "finished", **changes: Any) -> Path:
    """A recorded run of the settings that the sweep will ask for."""
    (job,) = plan([f"toy/table1/{row}"], [seed], Path("runs"), [])
    config = recipe_files.merge(job.config, changes)
    return write_record(job.folder, seed=seed, status=status, config=config)


def test_names_tables_and_patterns_are_distinct_trainings(started):
    assert trainings(["toy/table1"]) == [f"toy/table1/{row}" for row in RUNS]
    assert trainings(["toy/table2/same", "toy/table1/quick"]) == ["toy/table1/quick"]
    assert trainings(["toy/*/[bs]*"]) == ["toy/table1/bad", "toy/table1/silent", "toy/table1/quick"]


@pytest.mark.parametrize(("given", "seeds"), [("2", "01"), ("3 1 3", "31")])
def test_seeds(started, given, seeds):
    assert main(["toy/table1/quick", "--seeds", *given.split()]) == 0
    assert [*started] == [f"toy-table1-quick-seed{seed}" for seed in seeds]


def test_mistakes_end_before_anything_starts(started, capsys):
    for arguments, message in (
        (["toy/table1/quik"], "no 'quik' in toy/table1; there are quick, other"),
        (["toy/table1/quick", "--", "--seed=3"], "--seed=3: is set by this command"),
        (["toy/table1/quick", "--", "--model.weights=w.pth"], "w.pth: No such file"),
        (["toy/table1/quick", "--ray"], "pip install '.[benchmarks,cluster]'"),
        (["toy/table1/quick", "--gpus-per-run=0.5"], "are Ray's; add --ray"),
        (["x", "--seeds", "0"], "at least one seed"),
        (["x", "--runs", "/dev/null"], "--runs: expected a folder, got '/dev/null'"),
        (["x", "--launcher", "'x"], "--launcher: expected a command, got"),
        (["x", "--launcher", "acelerate"], "is no command here"),
    ):
        try:
            status: Any = main(arguments)
        except SystemExit as usage:
            status = usage.code
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, "")
        assert message in captured.err.splitlines()[-1]
        assert list(Path().iterdir()) == []


def test_goes_on_and_names_what_became_of_each_run(started, capsys):
    found = {"bad": "failed", "silent": "failed", "other": "failed"}
    found |= {"wild": "diverged", "taken": "in use", "quick": "finished"}
    (record("other") / "run.json").write_text("[]")
    settings = ["--data.root=x", "--checkpoint_every", "7"]
    names, launcher = [f"toy/table1/{row}" for row in found], f"--launcher={sys.executable} -X dev"
    assert main([*names, launcher, "--jobs=2", "--", *settings]) == 1
    output = capsys.readouterr().out
    assert statuses(output) == {(row, "0"): status for row, status in found.items()}
    for told in (
        "bad, seed 0: failed (exit status 1): error: it broke; see runs/logs/toy-",
        "silent, seed 0: failed (exit status 0): it said nothing",
        "wild, seed 0: diverged (exit status 1): the loss is nan",
        "taken, seed 0: in use (exit status 3): error: somebody is at it",
        "other, seed 0: failed: runs/toy-table1-other-seed0/run.json: is damaged",
    ):
        assert told in output
    command = started["toy-table1-bad-seed0"]
    assert command[:4] == [sys.executable, "-X", "dev", str(ROOT / "benchmarks" / "run.py")]
    asked = parse([*command[4:], "--output=again"])
    assert asked.recipe == "toy/table1/bad" and asked.resume
    [job] = plan([asked.recipe], [0], Path("runs"), settings)
    assert asked.config == job.config | {"output": "again"}


def test_skips_what_is_finished_and_resumes_what_is_not(started, capsys):
    record("quick", 0)
    record("quick", 1, "stopped")
    # As another machine would have run it: no number depends on these.
    record("quick", 2, data={"root": "elsewhere"}, checkpoint_every=9, evaluation={"every": 3})
    (wild,) = plan(["toy/table1/wild"], [0], Path("runs"), [])
    write_record(wild.folder, config=wild.config, **DIVERGED)  # it would again
    assert main(["toy/table1/quick", "toy/table1/wild", "--seeds", "3"]) == 1
    found = statuses(capsys.readouterr().out)
    assert found["quick", "0"] == found["quick", "2"] == "was finished"
    assert found["wild", "0"] == "diverged" and not started.pop("toy-table1-wild-seed0", None)
    assert [started.pop(f"toy-table1-wild-seed{seed}")[-1] for seed in (1, 2)] == ["--resume"] * 2
    assert [*started] == ["toy-table1-quick-seed1"]


def test_stale_runs_are_reported_or_moved_aside(started, capsys):
    folder = record("quick", optimization={"steps": 7})
    before = (folder / "run.json").read_bytes()
    assert main(["toy/table1/quick", "toy/table1/other"]) == 1
    output = capsys.readouterr().out
    assert statuses(output) == {("quick", "0"): "stale", ("other", "0"): "finished"}
    assert "was run with optimization.steps 7, not 30; run it again with --redo-stale" in output
    assert (folder / "run.json").read_bytes() == before
    record("other")
    Path("w.pth").write_bytes(b"weights")
    assert main(["toy/table1/other", "--", "--model.weights=w.pth"]) == 1
    assert "was run with weights None, not '" in capsys.readouterr().out

    folder.with_name(f"{folder.name}.stale-1").mkdir()
    assert main(["toy/table1/quick", "--redo-stale"]) == 0
    assert f"the stale run is now {folder}.stale-2" in capsys.readouterr().out
    assert (folder / "run.json").read_bytes() != before
    assert (folder.with_name(f"{folder.name}.stale-2") / "run.json").read_bytes() == before


def test_a_stale_run_that_is_being_written_is_left_alone(started, capsys):
    folder = record("quick", optimization={"steps": 7})
    with RunFolder(folder):
        assert main(["toy/table1/quick", "--redo-stale"]) == 1
    assert statuses(capsys.readouterr().out) == {("quick", "0"): "in use"}
    assert (folder / "run.json").exists()
