"""Runs that are stopped, killed and resumed: real processes, real signals."""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.console import stopping
from benchmarks.records import run_folder
from benchmarks.records.run_folder import load_checkpoint, saved_checkpoints
from benchmarks.records.steps import read_table
from benchmarks.run import main
from tests.benchmarks.runs import ATTENTION, REGULARIZERS, finished, forget
from tests.support.processes import (
    FROZEN_STATISTICS,
    NO_BATCH_STATISTICS,
    ROOT,
    RUN,
    TIMEOUT,
    TINY,
    environment,
    horde,
    rows,
    run,
    start,
)

PML = "pytorch_metric_learning.losses."
ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no", "benchmarks/run.py"),
]
HORDE = horde().removeprefix("--losses=[").removesuffix("]")
MEMORY = (
    f"{{loss: {{class_path: {PML}CrossBatchMemory, init_args: {{memory_size: 200, "
    f"loss: {{class_path: {PML}ContrastiveLoss}}}}}}}}"
)
STEPS = 24


@pytest.fixture(scope="module")
def settings(data: str) -> list[str]:
    """Whatever could make a resumed run differ: workers, drop path, batch norm, schedules, memory, draws."""
    return [
        *(data, *TINY, f"--losses=[{HORDE}, {MEMORY}, {REGULARIZERS}]", ATTENTION),
        f"--optimization.steps={STEPS}",
        "--data.batch_size=30",
        "--data.num_workers=2",
        "--checkpoint_every=10",
        "--diagnose_every=15",
        "--evaluation.every=15",
        "--evaluation.curve_classes=10",
        "--model.trunk_args={drop_path_rate: 0.2}",
        "--optimization.scheduler={class_path: torch.optim.lr_scheduler.OneCycleLR}",
        "--report=false",
    ]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As in the processes that are started: results are compared to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def uninterrupted(
    one_thread: None, settings: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    finished(settings, folder)
    return folder


def wait_for_rows(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while rows(folder) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{rows(folder)} of {count} steps after {TIMEOUT} s"
        time.sleep(0.02)


def assert_same_run(folder: Path, expected: Path) -> None:
    for table in ("training", "evaluation", "terms", "gradient_ratios"):
        found, wanted = (read_table(path / "records", table) for path in (folder, expected))
        for name in wanted:
            if name != "images_per_second":
                assert found[name] == wanted[name], (table, name)
    assert read_table(folder / "records", "training")["step"] == list(range(1, STEPS + 1))
    found, wanted = load_checkpoint(folder), load_checkpoint(expected)
    assert found is not None
    assert wanted is not None
    assert found["step"] == wanted["step"] == STEPS
    for part in ("model", "loss"):
        for name, tensor in wanted[part].items():
            assert torch.equal(found[part][name], tensor), (part, name)
    found, wanted = (json.loads((path / "run.json").read_text()) for path in (folder, expected))
    assert found["metrics"] == wanted["metrics"]
    assert found["outputs"] == wanted["outputs"]
    assert found["status"] == "finished"


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_never_stopped(
    settings: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    """A terminal's Ctrl-C reaches the data-loader workers as well as the run."""
    folder = tmp_path / "run"
    process = start([*settings, f"--output={folder}"], start_new_session=True)
    wait_for_rows(process, folder, 12)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output
    assert "with --resume to continue" in output
    stopped = json.loads((folder / "run.json").read_text())
    assert stopped["status"] == "stopped"
    assert stopped["wall_time_s"] > 0
    [*_, last] = saved_checkpoints(folder)
    assert int(last.stem[5:14]) > 10  # saved where it stopped, not only on schedule
    run([*settings, f"--output={folder}", "--resume"])
    assert_same_run(folder, uninterrupted)
    sessions = json.loads((folder / "run.json").read_text())["sessions"]
    assert [session["from_step"] for session in sessions] == [0, int(last.stem[5:14])]


@pytest.fixture(scope="module")
def uninterrupted_pair(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run([*settings, *FROZEN_STATISTICS, f"--output={folder}"], 2)
    return folder


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kills_at_any_moment_lose_only_steps_since_the_checkpoint(
    processes: int,
    settings: list[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`pytest tests/end_to_end/test_stops.py -k kills --kills 20` kills it twenty times.

    Nobody else writes the folder meanwhile.
    """
    monkeypatch.setattr(run_folder, "PATIENCE", 0.1)
    folder, kills = tmp_path / "run", request.config.getoption("--kills")
    expected = request.getfixturevalue("uninterrupted_pair" if processes == 2 else "uninterrupted")
    if processes == 2:
        settings = [*settings, *FROZEN_STATISTICS]
    generator = random.Random(0)
    resume: list[str] = []
    for at in sorted(generator.randrange(0, STEPS - 10) for _ in range(kills)):
        process = start(
            [*settings, f"--output={folder}", *resume], processes, start_new_session=True
        )
        wait_for_rows(process, folder, at)
        time.sleep(generator.uniform(0, 0.3))
        if not resume and processes == 1:  # torchrun's others would not stand still
            assert_in_use([*settings, f"--output={folder}"], process, capsys)
        resume = ["--resume"]
        kill_all(process, folder)
        for checkpoint in saved_checkpoints(folder):
            torch.load(checkpoint, weights_only=True)
        assert not saved_checkpoints(folder) or (
            rows(folder) - load_checkpoint(folder)["step"] <= 10 + 10  # type: ignore[index]
        )
    if processes == 1:
        finished([*settings, *resume], folder)  # in this process: importing takes seconds
    else:
        run([*settings, f"--output={folder}", *resume], processes)
    assert_same_run(folder, expected)
    assert len(saved_checkpoints(folder)) == 2


def assert_in_use(
    arguments: list[str], process: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A second writer is refused, while the first one stands still."""
    os.killpg(process.pid, signal.SIGSTOP)
    for extra in ([], ["--resume"]):
        forget()
        assert main([*arguments, *extra]) == 3
        assert "being written by another process (" in capsys.readouterr().err
    os.killpg(process.pid, signal.SIGCONT)


def kill_all(process: subprocess.Popen[str], folder: Path) -> None:
    """SIGKILL to every process that was started for this folder, launcher and workers included.

    torchrun puts each into a session of its own. Again until the output is closed: a data-loader worker
    that is forked while its parent dies is in no list made before, and never learns of that death.
    """
    for _ in range(TIMEOUT):
        for found in psutil.process_iter(["cmdline"]):
            if f"--output={folder}" in (found.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
            return
    pytest.fail(f"something started for {folder} still writes {TIMEOUT} s after it was killed")


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves(data: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [data, *TINY, *NO_BATCH_STATISTICS, horde(), "--optimization.steps=100000"]
    process = start([*arguments, f"--output={folder}"], 2, start_new_session=True)
    wait_for_rows(process, folder, 20)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    assert "stopped; rerun the same command" in output, output
    state = load_checkpoint(folder)
    assert state is not None
    assert state["step"] >= 20


@pytest.mark.slow
def test_sigterm_to_accelerate_saves(data: str, tmp_path: Path) -> None:
    """`accelerate launch` of one process dies of the signal and does not pass it on."""
    folder = tmp_path / "run"
    launcher = subprocess.Popen(
        [*ACCELERATE, data, *TINY, "--optimization.steps=100000", f"--output={folder}"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_rows(launcher, folder, 5)
    launcher.terminate()
    launcher.wait(timeout=TIMEOUT)
    deadline = time.monotonic() + TIMEOUT
    while json.loads((folder / "run.json").read_text())["status"] != "stopped":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert load_checkpoint(folder) is not None


def test_signals_that_come_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[int] = []
    monkeypatch.setattr(stopping, "TOGETHER", math.inf)
    with (
        stopping.signals_handled(lambda number, frame: later.append(number)),
        stopping.StopRequest() as stop,
    ):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert (stop.signal, later) == (signal.SIGTERM, [])
        monkeypatch.setattr(stopping, "TOGETHER", -1)
        signal.raise_signal(signal.SIGINT)
        assert later == [signal.SIGINT]


@pytest.mark.slow
def test_a_list_may_be_piped_to_whoever_reads_its_head() -> None:
    process = subprocess.Popen(
        [sys.executable, str(RUN), "--list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert errors == b""
