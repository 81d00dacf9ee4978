"""The sweep: what it starts, skips, resumes and refuses; failures and signals; real runs at the end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.records.files import signed
from benchmarks.records.run_folder import RunFolder
from benchmarks.settings import recipe_files
from benchmarks.studies import launching
from benchmarks.studies.jobs import plan, trainings
from benchmarks.sweep import main
from tests.benchmarks.made import DIVERGED, RECORD, write_record
from tests.support.processes import ROOT

LOSSES = [{"loss": {"class_path": "pml_regularizers.BinomialDevianceLoss"}}]
ROWS = ("quick", "other", "bad", "taken", "patient", "silent", "garbled", "wild")
# Stands in for benchmarks/run.py: what it does is the recipe's row.
FAKE = (
    f"""
RECORD = {signed(RECORD)!r}
DIVERGED = {signed(RECORD | DIVERGED)!r}
"""
    + """
import argparse, json, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("recipe", "seed", "output"):
    parser.add_argument("--" + name)
parser.add_argument("--resume", action="store_true")
options, settings = parser.parse_known_args()
folder, row = Path(options.output), options.recipe.rpartition("/")[2]
events = folder.parent / "events"

def event(word):
    with events.open("a") as file:
        file.write(json.dumps([word, folder.name, settings, os.getpgrp()]) + "\\n")

event("begin")
if row == "bad":
    sys.exit("error: it broke")
if row == "taken":
    print("error: somebody is at it", file=sys.stderr)
    sys.exit(3)
if row == "silent":
    sys.exit(0)
if row == "patient":
    # As the runner: a second signal would end it before it has saved.
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    event("ready")
    while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        time.sleep(0.01)
    time.sleep(0.3)
    event("saved")
    sys.exit(143)
if row == "garbled":
    folder.mkdir()
    (folder / "run.json").write_text("[]")
    sys.exit(0)
if row == "wild":
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(DIVERGED))
    sys.exit(1)
(folder / "records").mkdir(parents=True)
(folder / "records" / "training.csv").write_text("~iteration~,loss\\n1,0.5\\n30,0.1\\n")
(folder / "run.json").write_text(json.dumps(RECORD))
event("end")
"""
)


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tables of tiny recipes, a stand-in for run.py, and an empty working folder."""
    folder = tmp_path / "recipes" / "toy"
    folder.mkdir(parents=True)
    shared = {"losses": LOSSES, "optimization": {"steps": 30}}
    content = {"shared": shared, "trainings": {row: {"label": row} for row in ROWS}}
    (folder / "table1.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    again = {"trainings": {"same": {"same_as": "toy/table1/quick"}}}
    (folder / "table2.yaml").write_text(yaml.safe_dump(again))
    (tmp_path / "fake.py").write_text(FAKE)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(recipe_files, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(launching, "RUN", tmp_path / "fake.py")
    monkeypatch.setattr("benchmarks.studies.queue.POLL", 0.02)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(work)
    return work


def events(word: str | None = None) -> list[Any]:
    path = Path("runs/events")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if word in (None, line[0])]


def statuses(output: str) -> dict[tuple[str, str], str]:
    """{(row, seed): status}, as its lines tell."""
    found = re.findall(r"toy/table1/(\w+), seed (\d+): ([a-z ]*[a-z])", output)
    return {(row, seed): status for row, seed, status in found}


def record(row: str, seed: int = 0, status: str = "finished", **changes: Any) -> Path:
    """A recorded run of the settings that the sweep will ask for."""
    (job,) = plan([f"toy/table1/{row}"], [seed], Path("runs"), [])
    config = recipe_files.merge(job.config, changes)
    return write_record(job.folder, seed=seed, status=status, config=config)


def test_names_tables_and_patterns_are_distinct_trainings(recipes: Path) -> None:
    everything = [f"toy/table1/{row}" for row in ROWS]
    assert trainings(["toy/table1"]) == everything
    assert trainings(["toy/table2/same", "toy/table1/quick"]) == ["toy/table1/quick"]
    assert trainings(["toy/*/[bs]*"]) == ["toy/table1/bad", "toy/table1/silent", "toy/table1/quick"]


@pytest.mark.parametrize(("given", "seeds"), [("2", "01"), ("3 1 3", "31")])
def test_seeds(recipes: Path, capsys: pytest.CaptureFixture[str], given: str, seeds: str) -> None:
    for seed in seeds:
        record("quick", int(seed))
    assert main(["toy/table1/quick", "--seeds", *given.split()]) == 0
    assert [seed for _, seed in statuses(capsys.readouterr().out)] == [*seeds]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy/table1/quik"], "no 'quik' in toy/table1; there are quick, other"),
        (["toy/table1/quick", "--", "--seed=3"], "--seed=3: is set by this command"),
        (["toy/table1/quick", "--", "--model.weights=w.pth"], "w.pth: No such file"),
        (["toy/table1/quick", "--ray"], "pip install '.[benchmarks,cluster]'"),
        (["toy/table1/quick", "--gpus-per-run=0.5"], "are Ray's; add --ray"),
        (["x", "--seeds", "0"], "at least one seed"),
        (["x", "--launcher", "acelerate"], "is no command here"),
    ],
)
def test_mistakes_end_before_anything_starts(
    recipes: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        status: Any = main(arguments)
    except SystemExit as usage:
        status = usage.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert message in captured.err.splitlines()[-1]
    assert list(recipes.iterdir()) == []


def test_goes_on_and_names_what_became_of_each_run(
    recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"bad": "failed", "silent": "failed", "garbled": "failed", "other": "failed"}
    found |= {"wild": "diverged", "taken": "in use", "quick": "finished"}
    (record("other") / "run.json").write_text("[]")  # damaged before the sweep, or by its run
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
        "garbled, seed 0: failed: runs/toy-table1-garbled-seed0/run.json: is damaged",
        "other, seed 0: failed: runs/toy-table1-other-seed0/run.json: is damaged",
    ):
        assert told in output
    assert all(event[2] == settings for event in events())
    log = Path("runs/logs/toy-table1-bad-seed0.log").read_text()
    assert log.startswith(f"$ {sys.executable} -X dev {recipes.parent}/fake.py --recipe ")
    assert log.endswith("--resume\nerror: it broke\n")


def test_skips_what_is_finished_and_resumes_what_is_not(
    recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record("quick", 0)
    record("quick", 1, "stopped")
    # As another machine would have run it: no number depends on these.
    record("quick", 2, data={"root": "elsewhere"}, checkpoint_every=9, evaluation={"every": 3})
    main(["toy/table1/quick", "--seeds", "3"])
    found = statuses(capsys.readouterr().out)
    assert found["quick", "0"] == found["quick", "2"] == "was finished"
    assert [event[1] for event in events("begin")] == ["toy-table1-quick-seed1"]


def test_stale_runs_are_reported_or_moved_aside(
    recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "was run with model.weights None, not {'file': 'w.pth'" in capsys.readouterr().out

    folder.with_name(f"{folder.name}.stale-1").mkdir()
    assert main(["toy/table1/quick", "--redo-stale"]) == 0
    assert (folder / "run.json").read_bytes() != before
    assert (folder.with_name(f"{folder.name}.stale-2") / "run.json").read_bytes() == before


def test_a_stale_run_that_is_being_written_is_left_alone(
    recipes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.records.run_folder.PATIENCE", 0.1)
    folder = record("quick", optimization={"steps": 7})
    with RunFolder(folder):
        assert main(["toy/table1/quick", "--redo-stale"]) == 1
    assert statuses(capsys.readouterr().out) == {("quick", "0"): "in use"}
    assert (folder / "run.json").exists()


def test_a_signal_waits_for_the_runs_to_save(
    recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So many runs are at work as was asked: the signal waits for two."""

    def stop() -> None:
        while len(events("ready")) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=stop)
    thread.start()
    names = ["toy/table1/patient", "toy/table1/quick"]
    assert main([*names, "--seeds", "2", "--jobs", "2"]) == 128 + signal.SIGINT
    thread.join()
    assert len(events("saved")) == 2, "each run got one signal, and the sweep waited"
    groups = {os.getpgrp(), *(event[3] for event in events("ready"))}
    assert len(groups) == 3, "what a terminal sends reaches the sweep alone"
    output = capsys.readouterr().out
    assert statuses(output) == {("patient", seed): "stopped" for seed in "01"}
    assert output.endswith("\n2 stopped, 2 not started\n")
    assert signal.getsignal(signal.SIGINT) == handler


def test_a_signal_while_runs_are_planned() -> None:
    program = (
        "import os, signal; from benchmarks import studies, sweep; "
        "studies.plan = lambda *_: os.kill(os.getpid(), signal.SIGINT); sweep.main(['x'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "\nstopped\n")
