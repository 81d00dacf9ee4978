"""Runs as processes: signals reach them, and none outlives a launcher."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.records import write_json
from benchmarks.studies import launching
from benchmarks.studies.launching import Launcher, SubRun
from tests.benchmarks.studies.test_sweep import RECORD

# Stands in for benchmarks/run.py: saves when it is told to stop.
PATIENT = """
import os, signal, sys, time
def stop(number, frame):
    print("saved", number, flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SubRun:
    monkeypatch.setattr(launching, "RUN", tmp_path / "run.py")
    return SubRun([], tmp_path / "run", tmp_path / "logs" / "run.log")


def test_a_signal_reaches_the_run(run: SubRun) -> None:
    launching.RUN.write_text(PATIENT + "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)\n")
    before = signal.getsignal(signal.SIGINT)
    with Launcher() as launcher:
        child = launcher.run(run)
    assert launcher.stop.signal == signal.SIGINT
    assert child.process.returncode == 128 + signal.SIGTERM
    lines = run.log.read_text().splitlines()
    assert lines == [
        f"$ {sys.executable} {launching.RUN} --output={run.folder} --resume",
        "ready",
        f"saved {signal.SIGTERM.value}",
    ]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_leaves_no_run_behind(run: SubRun) -> None:
    launching.RUN.write_text(PATIENT + "time.sleep(60)\n")
    with pytest.raises(ZeroDivisionError), Launcher() as launcher:
        launcher.start(run)
        [child] = launcher.children
        while "ready" not in run.log.read_text().splitlines():
            launcher.ended()
        raise ZeroDivisionError
    assert child.process.returncode == 128 + signal.SIGTERM
    assert "saved" in run.log.read_text()


@pytest.mark.parametrize(
    ("code", "record", "problem"),
    [
        (1, '"status": "failed", "error": "the loss is nan"', "the loss is nan"),
        (1, '"status": "running", "error": null', "error: of the log"),
        (2, '"status": "failed", "error": "of before"', "error: of the log"),
    ],
    ids=["failed", "killed", "refused"],
)
def test_why_a_run_did_not_finish(run: SubRun, code: int, record: str, problem: str) -> None:
    launching.RUN.write_text(
        f"import sys; print('error: of the log'); print('more'); sys.exit({code})"
    )
    run.folder.mkdir()
    write_json(run.folder / "run.json", RECORD | json.loads(f"{{{record}}}"))
    with Launcher() as launcher:
        assert launcher.run(run).problem() == problem


def test_a_folder_that_another_process_writes(run: SubRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.records.run_folder.PATIENCE", 0.1)
    assert not run.in_use()
    run.folder.mkdir()
    lock = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
    lock += "print(1, flush=True); input()"
    arguments = [sys.executable, "-c", lock, os.fspath(run.folder / ".lock")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        assert run.in_use()
        writer.communicate(b"\n")
    assert not run.in_use()
