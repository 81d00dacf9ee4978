"""Sweeps on a real cluster of Ray: three nodes on this machine, killed, added and stopped in the middle."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from benchmarks import sweep
from benchmarks.records.steps import read_table
from benchmarks.studies import jobs, launching
from tests.support.processes import ROOT, TIMEOUT, TINY, environment, popen, rows

os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # read when Ray is imported
ray = pytest.importorskip("ray", reason="needs Ray: pip install '.[cluster]'")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Ray's parts

SEEDS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that runs nothing, and two nodes with room for one run each."""
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 10**8, "include_dashboard": False}
    with mock.patch.dict(os.environ, environment()):
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        try:
            for _ in range(2):
                made.add_node(num_cpus=1, num_gpus=1, **small)  # Ray takes their number as told
            yield made
        finally:
            made.shutdown()


def command(runs: Path, data: str, *options: str) -> list[str]:
    return [
        *("glyphs/demo/binomial", f"--seeds={SEEDS}", f"--runs={runs}", *options, "--", data),
        *(*TINY, "--optimization.steps=600", "--checkpoint_every=20", "--report=false"),
    ]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return popen([sys.executable, "-m", "benchmarks.sweep", *arguments])


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def results(runs: Path) -> list[dict[str, Any]]:
    """Status, metrics and losses of every run."""
    found = []
    for seed in range(SEEDS):
        folder = runs / f"glyphs-demo-binomial-seed{seed}"
        record = json.loads((folder / "run.json").read_text())
        losses = read_table(folder / "records", "training")["loss"]
        found.append({key: record[key] for key in ("status", "metrics")} | {"losses": losses})
    return found


@pytest.mark.release
def test_a_sweep_survives_its_nodes_and_its_driver(cluster, data, tmp_path):
    whole, runs = tmp_path / "whole", tmp_path / "runs"
    assert sweep.main(command(whole, data, "--jobs=2")) == 0

    folders = [runs / f"glyphs-demo-binomial-seed{seed}" for seed in range(SEEDS)]

    def writers() -> list[int]:
        """The processes that have written the runs, as far as they live."""
        locks = [folder / ".lock" for folder in folders]
        pids = [int(lock.read_text()) for lock in locks if lock.exists() and lock.read_text()]
        return [pid for pid in pids if psutil.pid_exists(pid)]

    def both_go_on() -> bool:
        """True once both runs are further than at the first call."""
        counts.setdefault("then", [rows(folder) for folder in folders])
        return all(rows(f) > n + 5 for f, n in zip(folders, counts["then"], strict=True))

    def statuses() -> list[str]:
        return [json.loads((folder / "run.json").read_text())["status"] for folder in folders]

    # A node dies, and another comes.
    counts: dict[str, list[int]] = {}
    driver = start(command(runs, data, "--ray", cluster.address))
    wait_until(both_go_on, driver)
    before = writers()
    assert len(before) == 2
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    wait_until(lambda: not all(map(psutil.pid_exists, before)), driver)
    cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=10**8)
    wait_until(lambda: len(writers()) == 2 and set(writers()) != set(before), driver)

    # Ctrl-C lets all runs save.
    counts.clear()
    wait_until(both_go_on, driver)
    driver.send_signal(signal.SIGINT)
    said, _ = driver.communicate(timeout=TIMEOUT)
    assert driver.returncode == 128 + signal.SIGINT, said
    assert said.count("stopped: rerun the same command to resume it") == 2
    assert writers() == []
    assert statuses() == ["stopped", "stopped"]

    # The command is killed: its runs save and end.
    counts.clear()
    driver = start(command(runs, data, "--ray", cluster.address))
    wait_until(both_go_on, driver)
    assert statuses() == ["running", "running"]
    driver.kill()
    driver.communicate(timeout=TIMEOUT)
    deadline = time.monotonic() + TIMEOUT
    while writers():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert statuses() == ["stopped", "stopped"]

    driver = start(command(runs, data, "--ray", cluster.address))
    said, _ = driver.communicate(timeout=TIMEOUT)
    assert driver.returncode == 0, said
    assert results(runs) == results(whole)


def test_an_address_without_a_cluster_is_told(data, tmp_path, monkeypatch, refused):
    """Before Ray connects, which would take minutes."""
    monkeypatch.setattr(ray, "init", pytest.fail)
    line = refused(sweep.main, *command(tmp_path / "runs", data, "--ray", "127.0.0.1:1"))
    assert line.startswith("--ray: 127.0.0.1:1: ")


def test_a_run_has_its_share_of_a_node(cluster, data, tmp_path, monkeypatch):
    program, runs = tmp_path / "run.py", tmp_path / "runs"
    code = "import os; print(*map(os.environ.get, ['CUDA_VISIBLE_DEVICES', 'PYTHONPATH']))"
    program.write_text(code)
    monkeypatch.setattr(launching, "RUN", program)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")  # of classes that the user trusts
    shares = ["--gpus-per-run=0.5", "--cpus-per-run=0.5"]
    assert sweep.main(command(runs, data, "--ray", cluster.address, *shares)) == 1
    logs = [path.read_text().splitlines()[-1] for path in (runs / "logs").glob("*.log")]
    assert logs == [f"0 {ROOT}:{tmp_path}"] * SEEDS


@pytest.mark.parametrize(
    ("gpus", "line"),
    [
        (2, r"--gpus-per-run: 2; no node has more than 1$"),
        (1, r": the node \S+ does not see /none/benchmarks/run.py; all nodes need the runs, "),
    ],
)
def test_what_no_node_has_is_told(gpus, line, cluster, data, tmp_path, monkeypatch, refused):
    monkeypatch.setattr("benchmarks.studies.cluster.RUN", Path("/none/benchmarks/run.py"))
    options = ["--ray", cluster.address, f"--gpus-per-run={gpus}"]
    assert re.search(line, refused(sweep.main, *command(tmp_path / "runs", data, *options)))
    assert not list(tmp_path.glob("runs/*"))
    assert not ray.is_initialized()


ENDED = "import sys; open('run.json', 'w').write('{{\"status\": \"{}\"}}'); sys.exit(1)"


@pytest.mark.parametrize(
    ("program", "again"),
    [
        (ENDED.format("stopped"), True),  # by `accelerate launch` or `torchrun`, which hide it
        (ENDED.format("failed"), False),
        (f"raise SystemExit({jobs.IN_USE})", True),  # a lost node's run still has the folder
    ],
    ids=["stopped", "failed", "in use"],
)
def test_what_nobody_asked_to_stop_is_started_again(program, again, tmp_path):
    from benchmarks.studies.cluster import EndedFromOutsideError, execute

    words = [sys.executable, "-c", program]
    with pytest.raises(EndedFromOutsideError) if again else nullcontext():
        assert execute(words, tmp_path / "log", tmp_path, tmp_path / "run.json") == 1
