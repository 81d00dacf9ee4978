"""`torchrun` as on two hosts, a launcher each: losses and gradients of one process, also after one host is gone."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.records.run_folder import saved_checkpoints
from tests.benchmarks.runs import assert_same_trace
from tests.end_to_end.test_stops import wait_for_rows
from tests.support.processes import (
    NO_BATCH_STATISTICS,
    ROOT,
    TIMEOUT,
    TINY,
    environment,
    horde,
    run,
)

SCRIPT = ROOT / "tests" / "benchmarks" / "traced_run.py"
STEPS = 50


def launch(arguments: list[str], trace: Path) -> list[subprocess.Popen[str]]:
    """One launcher per host, each with a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    launcher += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    return [
        subprocess.Popen(
            [*launcher, f"--node_rank={rank}", str(SCRIPT), *arguments],
            cwd=ROOT,
            env=environment() | {"TRACE": str(trace)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]


@pytest.mark.slow
def test_two_hosts_train_as_one_process_and_go_on_without_one(data: str, tmp_path: Path) -> None:
    settings = [data, *TINY, *NO_BATCH_STATISTICS, horde(), f"--optimization.steps={STEPS}"]
    settings += ["--precision=float64", "--checkpoint_every=10", "--report=false", "--resume"]
    trace = tmp_path / "one"
    variables = {"TRACE": str(trace)}
    run([*settings, f"--output={tmp_path / 'whole'}"], script=SCRIPT, variables=variables)
    expected = torch.load(f"{trace}-0")

    folder = tmp_path / "run"
    arguments = [*settings, f"--output={folder}"]
    first, second = launch(arguments, tmp_path / "lost")
    wait_for_rows(first, folder, 15)
    for process in [*psutil.Process(second.pid).children(recursive=True), second]:
        process.kill()
    said, _ = first.communicate(timeout=TIMEOUT)
    assert first.returncode != 0, said
    second.communicate(timeout=TIMEOUT)
    begin = int(saved_checkpoints(folder)[-1].name.split("-")[0].removeprefix("step_"))
    assert 10 <= begin < STEPS

    for process in launch(arguments, tmp_path / "two"):
        said, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, said
    for rank in (0, 1):
        found = torch.load(f"{tmp_path / 'two'}-{rank}")
        assert len(found) == STEPS - begin
        assert_same_trace(found, expected[begin:], tolerance=1e-6)
