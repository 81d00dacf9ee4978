"""Runs as processes, of which none outlives a launcher, and the order in which a queue starts them."""

import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from benchmarks.console.writing import OwnedFolder
from benchmarks.settings.command import parse
from benchmarks.studies import launching
from benchmarks.studies.jobs import Job, make_job
from benchmarks.studies.launching import Launcher
from benchmarks.studies.queue import Queue
from tests.benchmarks.made import write_record
from tests.benchmarks.studies.fakes import Ended
from tests.support.processes import ROOT, TIMEOUT

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux alone")

# Stands in for benchmarks/run.py: saves when it is told to stop; a second signal would end it before that.
PATIENT = """
import signal, sys, time
def stop(number, frame):
    signal.signal(number, signal.SIG_DFL)
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""


def made(folder: Path, name: str) -> Job:
    return make_job(parse([]), folder / name, {})


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose program the test writes; a server that forks it imports only what it needs."""
    monkeypatch.setattr(launching, "RUN", tmp_path / "run.py")
    monkeypatch.setattr(Job, "changes", lambda job: [])
    context = type(multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(context, "set_forkserver_preload", lambda *_: None)
    return made(tmp_path, "run")


def wait_for(run: Job, word: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not run.log.exists() or word not in run.log.read_text().split():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_error_leaves_no_run_behind(run):
    launching.RUN.write_text(PATIENT)
    work = ((wait_for(run, "ready"), 1 / 0) for _ in range(1))  # while the queue waits for runs
    with pytest.raises(ZeroDivisionError):
        Queue(lambda: [run], 1, Launcher(), meanwhile=work).run()
    assert "saved" in run.log.read_text()


def test_one_signal_is_one_for_each_run_at_work_which_saves(run, tmp_path):
    launching.RUN.write_text(PATIENT)
    jobs = [run, *(made(tmp_path, name) for name in ("second", "third"))]

    def stop() -> None:
        for job in jobs[:2]:
            wait_for(job, "ready")
        os.kill(os.getpid(), signal.SIGINT)

    handler, thread = signal.getsignal(signal.SIGINT), threading.Thread(target=stop)
    thread.start()
    assert Queue(lambda: jobs, 3, Launcher(jobs=2)).run() == 128 + signal.SIGINT
    thread.join()
    assert [job.status for job in jobs] == ["stopped", "stopped", "not started"]
    assert all("saved" in job.log.read_text() for job in jobs[:2])
    assert signal.getsignal(signal.SIGINT) == handler


@ON_LINUX
@pytest.mark.parametrize("fork", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_launcher_leaves_no_run_behind(run, fork):
    launching.RUN.write_text(PATIENT)
    program = f"""
        import sys, time
        from pathlib import Path
        from benchmarks.studies import launching
        from benchmarks.settings.command import parse
        from benchmarks.studies.jobs import make_job
        launching.RUN, folder = map(Path, sys.argv[1:])
        launching.Launcher(fork={fork}).start(make_job(parse([]), folder, {{}}))
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), launching.RUN, run.folder]
    with subprocess.Popen(command, cwd=ROOT) as killed:
        wait_for(run, "ready")
        killed.kill()
    wait_for(run, "saved")


@ON_LINUX
def test_a_forked_run_is_as_one_of_its_own(run, monkeypatch):
    """Its arguments, name, environment, session, streams and exit status."""
    monkeypatch.setenv("SAID", "here")
    launching.RUN.write_text(
        "import os, sys; print(__name__, sys.argv, sys.stdin.read(), os.getsid(0) == os.getpid(), "
        "os.environ['SAID']); print('error: odd', file=sys.stderr); sys.exit(7)"
    )
    run.trusted = ("decimal",)
    assert Queue(lambda: [run], 1, Launcher(fork=True)).run() == 0
    assert (run.exit_status, run.problem()) == (7, "error: odd")
    said = run.log.read_text().splitlines()
    settings = run.log.with_suffix(".yaml")
    arguments = [f"--recipe={run.training}", f"--config={settings}", "--trust=decimal", "--resume"]
    assert said[0] == f"$ {shlex.join([sys.executable, str(launching.RUN), *arguments])}"
    assert f"__main__ {[str(launching.RUN), *arguments]}  True here" in said


def test_a_folder_that_another_process_writes(run):
    assert not run.in_use()
    with OwnedFolder(run.folder):
        assert run.in_use()
    assert not run.in_use()


def test_a_job_that_becomes_ready_runs_before_later_ones(run, tmp_path, monkeypatch):
    second, follows = (made(tmp_path, name) for name in ("second", "follows"))
    second.log = tmp_path / "file" / "log"  # it cannot be started
    (tmp_path / "file").touch()
    started: list[str] = []

    def place(launcher: Launcher, command: list[str], job: Job) -> Ended:
        started.append(job.name)
        write_record(job.folder)
        return Ended(lambda: 0)

    monkeypatch.setattr(Launcher, "place", place)
    queue = Queue(lambda: [run, follows, second] if started else [run, second], 2, Launcher())
    assert queue.run() == 0
    assert started == ["run", "follows"]
    statuses = {"run": "finished", "follows": "finished", "second": "failed"}
    assert {job.name: job.status for job in queue.jobs} == statuses
    assert "File exists" in str(second.why)
