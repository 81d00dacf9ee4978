"""Runs that are stopped, killed and resumed: real processes, real signals."""

import contextlib
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.console import stopping
from benchmarks.records.run_folder import load_checkpoint, saved_checkpoints
from benchmarks.records.steps import read_table
from benchmarks.run import main
from benchmarks.studies.launching import run_forked
from tests.benchmarks.runs import ATTENTION, MEMORY, REGULARIZERS, finished, forget, record_of
from tests.support.pool import server
from tests.support.processes import (
    FROZEN_STATISTICS,
    NO_BATCH_STATISTICS,
    RUN,
    TIMEOUT,
    TINY,
    command,
    environment,
    horde,
    popen,
    rows,
    run,
    start,
    wait_for_rows,
)

ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no", str(RUN)),
]
STEPS, EVERY = 14, 4
NO_WORKERS = "--data.num_workers=0"


@pytest.fixture(scope="module")
def settings(data: str) -> list[str]:
    """Whatever could make a resumed run differ: workers, drop path, batch norm, schedules, memory, draws."""
    return [
        *(data, *TINY, horde(), MEMORY, *REGULARIZERS, ATTENTION),
        *(f"--optimization.steps={STEPS}", f"--checkpoint_every={EVERY}", "--report=false"),
        *("--data.batch_size=20", "--data.num_workers=2"),
        "--model.trunk_args={drop_path_rate: 0.2}",
        *("--diagnose_every=6", "--evaluation.every=6", "--evaluation.curve_classes=10"),
        "--optimization.scheduler={class_path: torch.optim.lr_scheduler.OneCycleLR}",
    ]


@pytest.fixture(scope="module")
def uninterrupted(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On one thread, as in the processes that are started: results are compared to the bit."""
    folder, threads = tmp_path_factory.mktemp("whole") / "run", torch.get_num_threads()
    torch.set_num_threads(1)
    finished([*settings, NO_WORKERS], folder)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def uninterrupted_pair(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run([*settings, *FROZEN_STATISTICS, f"--output={folder}"], 2)
    return folder


def assert_same_run(folder: Path, expected: Path) -> None:
    for table in ("training", "evaluation", "terms", "gradient_ratios"):
        found, wanted = (read_table(path / "records", table) for path in (folder, expected))
        for name in wanted.keys() - {"images_per_second"}:
            assert found[name] == wanted[name], (table, name)
    assert read_table(folder / "records", "training")["step"] == list(range(1, STEPS + 1))
    found, wanted = load_checkpoint(folder), load_checkpoint(expected)
    assert found is not None and wanted is not None
    assert found["step"] == wanted["step"] == STEPS
    for part in ("model", "loss"):
        torch.testing.assert_close(found[part], wanted[part], rtol=0, atol=0)
    found, wanted = map(record_of, (folder, expected))
    for name in ("metrics", "outputs", "status"):
        assert found[name] == wanted[name]


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_never_stopped(settings, uninterrupted, tmp_path):
    """A terminal's Ctrl-C reaches the data-loader workers as well as the run."""
    folder = tmp_path / "run"
    process = start([*settings, f"--output={folder}"], start_new_session=True)
    wait_for_rows(process, folder, EVERY)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output and "--resume" in output
    stopped = record_of(folder)
    assert stopped["status"] == "stopped" and stopped["wall_time_s"] > 0
    begin = int(saved_checkpoints(folder)[-1].stem[5:14])
    assert begin > EVERY  # saved where it stopped, not only on schedule
    run([*settings, f"--output={folder}", "--resume"])
    assert_same_run(folder, uninterrupted)
    sessions = record_of(folder)["sessions"]
    assert [session["from_step"] for session in sessions] == [0, begin]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kills_lose_only_steps_since_the_checkpoint(processes, settings, request, tmp_path, capsys):
    """At any moment; nobody else writes the folder meanwhile.

    `pytest tests/end_to_end/test_stops.py -k kills --kills 20` kills it twenty times, each a launch of its own.
    """
    folder, kills = tmp_path / "run", request.config.getoption("--kills")
    quick = kills == processes == 1
    expected = request.getfixturevalue("uninterrupted_pair" if processes == 2 else "uninterrupted")
    arguments = [*settings, *(FROZEN_STATISTICS if processes == 2 else ())]
    arguments += [f"--output={folder}", "--resume"]
    generator = random.Random(0)
    moments = sorted(generator.randrange(0, STEPS // 2) for _ in range(kills))
    for number, at in enumerate(moments, start=1):
        started = [Forked(arguments, tmp_path)] if quick else launched(arguments, hosts=processes)
        first, *_ = started
        wait_for_rows(first, folder, at)
        time.sleep(generator.uniform(0, 0.3))
        if number == kills and processes == 1:  # torchrun's others would not stand still
            assert_in_use(arguments, first, capsys)
        first.kill() if quick else kill_all(started, folder)
        if saved := saved_checkpoints(folder):
            step = torch.load(saved[-1], weights_only=True)["step"]
            assert rows(folder) - step <= 2 * EVERY
    if processes == 1:
        finished([*arguments, NO_WORKERS], folder)  # in this process: importing takes seconds
    else:
        run(arguments, processes)
    assert_same_run(folder, expected)
    assert len(saved_checkpoints(folder)) == 2


class Forked:
    """A run in a process and a session of its own, as a study starts it: importing takes seconds."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.log, words = folder / "log", command(arguments)
        about = (words, self.log, environment())
        self.process = server().Process(target=run_on_one_thread, args=about)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def communicate(self) -> tuple[str, None]:
        return self.log.read_text(), None

    def kill(self) -> None:
        """With its data-loader workers."""
        os.killpg(self.pid, signal.SIGKILL)
        self.process.join()


def run_on_one_thread(*about):
    torch.set_num_threads(1)
    run_forked(*about)


def assert_in_use(arguments, process, capsys) -> None:
    """A second writer is refused, while the first one stands still."""
    os.killpg(process.pid, signal.SIGSTOP)
    forget()
    assert main(arguments) == 3
    assert "being written by another process (" in capsys.readouterr().err
    os.killpg(process.pid, signal.SIGCONT)


def launched(arguments: list[str], hosts: int) -> list[subprocess.Popen[str]]:
    """One process, or `torchrun` as on two hosts: a launcher each, with a process of its own."""
    if hosts == 1:
        return [start(arguments, start_new_session=True)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _, port = free.getsockname()
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}"]
    torchrun += ["--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
    words = ([*torchrun, f"--node_rank={rank}", str(RUN), *arguments] for rank in range(hosts))
    return [*map(popen, words)]


def kill_all(started: list[subprocess.Popen[str]], folder: Path) -> None:
    """SIGKILL to every process that was started for this folder, launchers and workers included.

    torchrun puts each into a session of its own. Again until the output is closed: a data-loader worker
    that is forked while its parent dies is in no list made before, and never learns of that death.
    """
    for _ in range(TIMEOUT):
        for found in psutil.process_iter(["cmdline"]):
            if f"--output={folder}" in (found.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in started:
                process.communicate(timeout=1)
            return
    pytest.fail(f"something started for {folder} still writes {TIMEOUT} s after it was killed")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [command([], 2), ACCELERATE], ids=["torchrun", "accelerate"])
def test_sigterm_to_a_launcher_saves(launcher, data, tmp_path):
    """`accelerate launch` of one process dies of the signal and does not pass it on."""
    folder = tmp_path / "run"
    arguments = [data, *TINY, *NO_BATCH_STATISTICS, horde(), "--optimization.steps=100000"]
    process = popen([*launcher, *arguments, f"--output={folder}"])
    wait_for_rows(process, folder, 5)
    process.terminate()
    process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    deadline = time.monotonic() + TIMEOUT
    while record_of(folder)["status"] != "stopped":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    state = load_checkpoint(folder)
    assert state is not None and state["step"] >= 5


@pytest.mark.parametrize("module", ["tabulate", "numpy"])  # imported at the start, and later
def test_ctrl_c_prints_no_traceback_while_a_command_imports(module, tmp_path):
    stop = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    (tmp_path / f"{module}.py").write_text(stop)
    words = [sys.executable, "-m", "benchmarks.tables", "glyphs/demo"]
    told = {"env": environment(), "capture_output": True, "text": True, "timeout": TIMEOUT}
    done = subprocess.run(words, cwd=tmp_path, **told)
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert done.stderr.strip() in ("", "stopped")


def test_signals_that_come_together_are_one(monkeypatch):
    later: list[int] = []
    monkeypatch.setattr(stopping, "TOGETHER", math.inf)
    handled = stopping.signals_handled(lambda number, frame: later.append(number))
    with handled, stopping.StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert (stop.signal, later) == (signal.SIGTERM, [])
        monkeypatch.setattr(stopping, "TOGETHER", -1)
        signal.raise_signal(signal.SIGINT)
        assert later == [signal.SIGINT]
