"""Runs as tasks of Ray, on whatever nodes its cluster has."""

import json
import os
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Self

import ray
from ray.exceptions import RayError, TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.console.printing import reason
from benchmarks.console.stopping import leave
from benchmarks.settings.errors import ConfigError
from benchmarks.studies.jobs import IN_USE, Job
from benchmarks.studies.launching import POLL, RUN, Launcher, start

CONNECTING = 10  # seconds to wait for the cluster's address

RETRIES = 20  # of a run that was ended from outside, or whose folder a lost node's run still has


class EndedFromOutsideError(RuntimeError):
    """A run was stopped or killed though nobody asked, or refused a folder in use: Ray starts it again."""


def execute(command: Sequence[str], log: Path, folder: Path, record: Path) -> int:
    """A run on this node; its exit status. It saves and ends when the task is cancelled, and with this process."""
    # Where Ray was started with SIGINT ignored, as by a script in the background, it could cancel nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = record.read_bytes() if record.exists() else b""
    asked, process = False, start(command, log, folder)
    try:
        while process.poll() is None:
            try:
                time.sleep(POLL)
            except KeyboardInterrupt:  # Ray cancels the task
                asked = True
                process.terminate()
    finally:
        process.terminate()
        status = process.wait()
    # Its run.json tells that it was stopped where its launcher's exit status does not.
    now = record.read_bytes() if record.exists() else b""
    stopped = now != before and json.loads(now)["status"] == "stopped"
    again = (128 + signal.SIGINT, 128 + signal.SIGTERM, IN_USE)
    if not asked and (stopped or status < 0 or status in again):
        raise EndedFromOutsideError(status)
    return status


class Task:
    """A run that Ray places."""

    def __init__(self, reference: Any, log: Path) -> None:
        self.reference, self.ended, self.log = reference, reference.future(), log

    def poll(self) -> int | None:
        if not self.ended.done():
            return None
        try:
            return int(self.ended.result())
        except TaskCancelledError:  # before it had begun
            return -signal.SIGTERM
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), EndedFromOutsideError):
                return int(cause.args[0])
            with self.log.open("a") as log:
                log.write(f"error: Ray: {' '.join(str(error).split())}\n")
            return 1

    def terminate(self) -> None:
        ray.cancel(self.reference)


class Cluster(Launcher):
    """Starts runs as tasks of Ray, on the nodes of its cluster, all of which see the folder of runs."""

    def __init__(self, options: Namespace, runs: Path) -> None:
        super().__init__(options.launcher, options.jobs or 1000)  # Ray lets them wait
        self.runs, self.address = runs, options.ray
        self.share = {"gpu": options.gpus_per_run, "cpu": options.cpus_per_run or 1}

    def __enter__(self) -> Self:
        inherited = ("OMP_NUM_THREADS", "ACCELERATE_")
        variables = {
            name: value for name, value in os.environ.items() if name.startswith(inherited)
        }
        paths = filter(None, [str(RUN.parents[1]), os.environ.get("PYTHONPATH")])
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        if sys.platform == "linux":  # a run gets a SIGTERM then, and saves; Ray's is a SIGKILL
            variables["RAY_kill_child_processes_on_worker_exit"] = "0"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would be told to Ray's makers
        about = {"log_to_driver": False, "logging_level": "error"}
        about |= {"object_store_memory": 10**8} if self.address == "local" else {}
        host, _, port = self.address.rpartition(":")
        try:
            if host:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), timeout=CONNECTING).close()
            context = ray.init(self.address, runtime_env={"env_vars": variables}, **about)
            self._check_nodes()
            share = {f"num_{kind}s": share for kind, share in self.share.items()}
            again = {"max_retries": RETRIES, "retry_exceptions": [EndedFromOutsideError]}
            self.task = ray.remote(**share, **again)(execute)
        except SystemExit:  # of Ray's handler of SIGTERM
            ray.shutdown()
            leave(signal.SIGTERM, None)
        except (OSError, OverflowError, RayError, RuntimeError, ValueError) as error:
            ray.shutdown()
            raise ConfigError(f"--ray: {self.address}: {reason(error)}") from error
        token = f", token {os.environ['RAY_AUTH_TOKEN']}" if self.address == "local" else ""
        if context.dashboard_url:
            print(f"dashboard: http://{context.dashboard_url}{token}")
        return self

    def __exit__(self, *exception: object) -> None:
        ray.shutdown()

    def place(self, command: Sequence[str], job: Job) -> Task:
        log, record = job.log.resolve(), (job.folder / "run.json").resolve()
        return Task(self.task.remote(command, log, Path.cwd(), record), job.log)

    def _check_nodes(self) -> None:
        """Raise a ConfigError unless all nodes see the runs and one is large enough."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        for kind, share in self.share.items():
            most = max(node["Resources"].get(kind.upper(), 0) for node in nodes)
            self.share[kind] = min(most, 1) if share is None else share
            if self.share[kind] > most:
                raise ConfigError(f"--{kind}s-per-run: {share:g}; no node has more than {most:g}")
        self.runs.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=self.runs.resolve(), prefix=".seen-") as marker:
            paths = [RUN, Path.cwd(), Path(marker.name)]
            # Sent as it is: the node may not have this module.
            look = ray.remote(num_cpus=0)(lambda: [path for path in paths if not path.exists()])
            places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
            answers = ray.get([look.options(scheduling_strategy=p).remote() for p in places])
        for node, lacks in zip(nodes, answers, strict=True):
            if lacks:
                raise ConfigError(
                    f"the node {node['NodeManagerHostname']} does not see {lacks[0]}; all nodes need the runs, the "
                    "repository and the data under the same paths"
                )
