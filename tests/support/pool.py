"""Processes that are started once and run functions of the tests together, over gloo."""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

IMPORTED = ["benchmarks.studies.forked", "tests.support.gradients", "tests.benchmarks.runs"]
"""Modules that the processes share: importing them takes seconds. What is not installed is left out."""


@dataclass(frozen=True)
class Processes:
    """The part of `accelerate.Accelerator` that the library uses, on the CPU."""

    process_index: int
    num_processes: int
    device = torch.device("cpu")

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    def prepare(self, module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module)

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        dist.all_reduce(tensor)
        return tensor


def server() -> Any:
    """The context whose server has imported these modules, and forks processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class Pool:
    """Up to `size` processes; they start with the first function, and again after a failure."""

    def __init__(self, size: int = 3) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, processes: int) -> list[Any]:
        """Results of `function(Processes, *args)` on each process; everything must pickle.

        Raises:
            RuntimeError: with its traceback, where the function fails or waits ten minutes for others.
        """
        assert 1 <= processes <= self.size
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            job = (function, args, processes, Path(folder) / "rendezvous")
            connections = [connection for _, connection in self._workers[:processes]]
            for connection in connections:
                connection.send(job)
            return self._results(connections)

    def _results(self, connections: list[Connection]) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(connections):
            open_ones = [one for rank, one in enumerate(connections) if rank not in results]
            for connection in wait(open_ones):
                rank = connections.index(connection)
                try:
                    succeeded, results[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    succeeded, results[rank] = False, "it ended"
                if not succeeded:  # the others may wait for it
                    self.close()
                    raise RuntimeError(f"process {rank}: {results[rank]}")
        return [results[rank] for rank in range(len(connections))]

    def _start(self) -> None:
        if self._workers:
            return
        for rank in range(self.size):
            ours, theirs = server().Pipe()
            process = server().Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []


def _serve(rank: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        function, args, processes, rendezvous = connection.recv()
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=processes,
                timeout=timedelta(minutes=10),
            )
            answer = True, function(Processes(rank, processes), *args)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
