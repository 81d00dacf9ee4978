"""Comparison of functions by time and memory, within one run.

Each round calls every function once, so that a phase in which the machine is slow affects all of them. The time of
a function is the median over the rounds of its ratio to the first function's time in the same round.
"""

import gc
import multiprocessing
import os
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.console import progress_bar
from benchmarks.records import describe_code, describe_hardware, describe_versions
from benchmarks.reporting import Table


def tensor_bytes(run: Callable[[], object]) -> int:
    """The peak of the bytes in tensors that a call makes, including backward passes, without its results.

    They are counted after every operation: memory that an operation allocates and frees inside does not show.
    """
    with _Storages() as storages:
        result = run()
    return storages.most(without=_tensors(result))


class _Storages(TorchDispatchMode):
    """The storages that operations have made and that are not freed, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        # By address. The history keeps the weak references, so that no later storage has the same address.
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._history = [self._live]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known | self._live.keys():
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._history.append(self._live)
        return result

    def most(self, without: Sequence[Tensor]) -> int:
        results = {tensor.untyped_storage()._cdata for tensor in without}
        return max(
            sum(size for key, (_, size) in then.items() if key not in results)
            for then in self._history
        )


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def process_bytes(run: Callable[[], object]) -> int:
    """The peak growth of a fresh process in a call, including numpy and faiss; the call must be picklable.

    It reads Linux's own count: other systems have none.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_growth, run).result()


def _growth(run: Callable[[], object]) -> int:
    for tensor in _tensors((getattr(run, "args", ()), getattr(run, "keywords", {}))):
        tensor.sum()  # reads the arguments before the measurement begins
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@dataclass(frozen=True)
class Target:
    """Largest time and memory of a candidate, as multiples of those of the candidate it is compared with."""

    time: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Functions that do the same work, or larger and smaller parts of it.

    Attributes:
        name: Title of the comparison.
        size: The sizes, in words.
        candidates: The functions, by name, called without arguments; their results do not count as memory. The
            time of the first is 1.
        memory_against: Name of the candidate whose memory is 1; None: the table does not show memory.
        targets: Bounds, by candidate.
        rounds: Number of times that each candidate is timed.
        memory: Function that measures memory: `tensor_bytes`, or `process_bytes` if torch does not allocate it.
    """

    name: str
    size: str
    candidates: Mapping[str, Callable[[], object]]
    memory_against: str | None = None
    targets: Mapping[str, Target] = field(default_factory=dict)
    rounds: int = 7
    memory: Callable[[Callable[[], object]], int] = tensor_bytes

    def section(self, tiny: bool, level: int = 3) -> str:
        """Measure the candidates; their table below a heading of that level, as Markdown."""
        return f"{'#' * level} {self.name}\n\n{self.table(*self.measure(tiny))}"

    def measure(self, tiny: bool = False) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Call each candidate once to measure its memory, then time all of them in rounds; if `tiny`, in one.

        Returns:
            The seconds of each round and the bytes, by candidate.
        """
        gc.freeze()  # the collector skips existing objects between the timed calls
        memory = {name: self.memory(run) for name, run in self.candidates.items()}
        seconds: dict[str, list[float]] = {name: [] for name in self.candidates}
        rounds = range(1 if tiny else self.rounds)
        for _ in progress_bar(rounds, desc=self.name, unit="round", leave=False):
            for name, run in self.candidates.items():
                seconds[name].append(_seconds(run))
        gc.unfreeze()
        return seconds, memory

    def table(self, seconds: Mapping[str, Sequence[float]], memory: Mapping[str, int]) -> str:
        """The size in words and a Markdown table, without columns that would be empty."""
        header = ["", "time", "least to most", "target", "memory", "MB", "target"]
        first = next(iter(seconds.values()))
        rows: list[list[str]] = []
        for name, own in seconds.items():
            target = self.targets.get(name, Target())
            ratios = [a / b for a, b in zip(own, first, strict=True)]
            ratio = statistics.median(ratios)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            row = [name, f"{ratio:.2f}", spread if rows else f"{statistics.median(own):.3g} s"]
            row += [_held_against(target.time, ratio), "", "", ""]
            if self.memory_against is not None:
                share = memory[name] / memory[self.memory_against]
                megabytes = f"{memory[name] / 1e6:,.1f}"
                row[4:] = [f"{share:.3f}", megabytes, _held_against(target.memory, share)]
            rows.append(row)
        shown = [k for k in range(len(header)) if k == 0 or any(row[k] for row in rows)]
        header, *rows = [[row[k] for k in shown] for row in (header, *rows)]
        size = f"{self.size}; {len(first)} round{'s' * (len(first) > 1)}."
        return f"{textwrap.fill(size, 116)}\n\n{Table(header, rows).markdown()}\n"


def _held_against(bound: float | None, found: float) -> str:
    if bound is None:
        return ""
    met = round(found, 2) <= bound  # as printed
    return f"{bound:.3g}, {'met' if met else '**missed**'}"


def _seconds(run: Callable[[], object]) -> float:
    gc.collect()
    clock = time.process_time if _one_thread() else time.perf_counter
    synchronize()
    start = clock()
    result = run()
    synchronize()
    end = clock()
    del result  # not timed, as in a training loop
    return end - start


def _one_thread() -> bool:
    """True on a CPU with one thread: the processor's clock then leaves out the time of other processes."""
    return current_device().type == "cpu" and torch.get_num_threads() == 1


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def current_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def origin(command: str, device: torch.device, commit: str | None = None) -> str:
    """Commit, command and machine of measured numbers, in the words that the tests of the documents expect."""
    code = {"commit": commit, "dirty": False} if commit else describe_code()
    commit = f"`{code['commit'][:7]}`" if code["commit"] else "an unknown commit"
    dirty = " (with uncommitted changes)" if code["dirty"] else ""
    threads = os.environ.get("OMP_NUM_THREADS")
    command = f"OMP_NUM_THREADS={threads} " * (threads is not None) + command
    return f"Measured at {commit}{dirty} by\n`{command}`:\n{_machine(device)}."


def _machine(device: torch.device) -> str:
    hardware = describe_hardware()
    name = "{processor}, {cores} cores, {torch_threads} threads".format(**hardware)
    if _one_thread():
        name = "{processor}, one thread, timed by the processor's clock".format(**hardware)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    wanted = ("torch", "pytorch-metric-learning", "faiss-cpu", "faiss-gpu", "timm")
    found = describe_versions().items()
    return ", ".join([name, *(f"{key} {number}" for key, number in found if key in wanted)])
