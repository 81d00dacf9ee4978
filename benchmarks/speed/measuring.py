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
from dataclasses import dataclass
from functools import partial
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
    storages = _Storages()
    with storages:
        result = run()
    results = _sizes(result).keys()
    return max(sum(live[storage] for storage in live.keys() - results) for live in storages.history)


class _Storages(TorchDispatchMode):
    """The storages that operations have made and that are not freed, with their bytes, after each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        # Weak references compare by address, which no later storage has while they are kept.
        self.history: list[dict[StorageWeakRef, int]] = [{}]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _sizes((args, kwargs))
        result = op(*args, **(kwargs or {}))
        made = {storage: size for storage, size in _sizes(result).items() if storage not in given}
        live = {old: size for old, size in self.history[-1].items() if not old.expired()}
        self.history.append(made | live)
        return result


def _sizes(tree: object) -> dict[StorageWeakRef, int]:
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


def process_bytes(run: partial[object]) -> int:
    """The peak growth of a fresh process in a call on tensors, including numpy and faiss.

    It reads Linux's own count: other systems have none.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_growth, run).result()


def _growth(run: partial[object]) -> int:
    for tensor in run.args:
        tensor.sum()  # reads the arguments before the measurement begins
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
    before = _peak()
    run()
    return _peak() - before


def _peak() -> int:
    [kilobytes] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


@dataclass(frozen=True)
class Comparison:
    """Functions that do the same work, or larger and smaller parts of it."""

    name: str
    size: str  # in words
    candidates: Mapping[str, Callable[[], object]]  # by name; their results do not count as memory
    rounds: int = 7  # each candidate is timed so often
    memory: Callable[[Any], int] | None = tensor_bytes  # `process_bytes` if torch does not allocate

    def section(self, tiny: bool, level: int = 3) -> str:
        """Measure the candidates; their table below a heading of that level, as Markdown."""
        return f"{'#' * level} {self.name}\n\n{table(self.size, *self.measure(tiny))}"

    def measure(self, tiny: bool = False) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Call each candidate once to measure its memory, then time all of them in rounds; if `tiny`, in one.

        Returns:
            The seconds of each round and the bytes, by candidate.
        """
        gc.freeze()  # the collector skips existing objects between the timed calls
        memory: dict[str, int] = {}
        for name, run in self.candidates.items():
            if self.memory is None:
                run()
            else:
                memory[name] = self.memory(run)
        seconds: dict[str, list[float]] = {name: [] for name in self.candidates}
        rounds = range(1 if tiny else self.rounds)
        for _ in progress_bar(rounds, desc=self.name, unit="round", leave=False):
            for name, run in self.candidates.items():
                seconds[name].append(_seconds(run))
        gc.unfreeze()
        return seconds, memory


def table(size: str, seconds: Mapping[str, Sequence[float]], memory: Mapping[str, int]) -> str:
    """The size in words and a Markdown table: the time of the first is 1, and the first memory above 0 is 1."""
    header = ["", "time", "least to most"] + ["memory", "MB"] * bool(memory)
    first = next(iter(seconds.values()))
    unit = next(filter(None, memory.values()), 1)
    rows: list[list[str]] = []
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, first, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        of_first = f"{statistics.median(own):.3g} s"
        rows.append([name, f"{statistics.median(ratios):.2f}", spread if rows else of_first])
        if memory:
            rows[-1] += [f"{memory[name] / unit:.3f}", f"{memory[name] / 1e6:,.1f}"]
    size = f"{size}; {len(first)} round{'s' * (len(first) > 1)}."
    return f"{textwrap.fill(size, 116)}\n\n{Table(header, rows).markdown()}\n"


def _seconds(run: Callable[[], object]) -> float:
    gc.collect()
    clock = time.process_time if _one_thread() else time.perf_counter
    wait: Any = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = clock()
    _result = run()  # freed after the clock has stopped
    wait()
    return clock() - start


def _one_thread() -> bool:
    """True on a CPU with one thread: the processor's clock then leaves out the time of other processes."""
    return current_device().type == "cpu" and torch.get_num_threads() == 1


def current_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def origin(command: str, commit: str | None = None) -> str:
    """Commit, command and machine of measured numbers, in the words that the tests of the documents expect."""
    code: Mapping[str, Any] = {"commit": commit, "dirty": False} if commit else describe_code()
    place = f"`{code['commit'][:7]}`" if code["commit"] else "an unknown commit"
    if code["dirty"]:
        place += " (with uncommitted changes)"
    if threads := os.environ.get("OMP_NUM_THREADS"):
        command = f"OMP_NUM_THREADS={threads} {command}"
    hardware = describe_hardware()
    machine = "{processor}, {cores} cores, {torch_threads} threads".format(**hardware)
    if _one_thread():
        machine = f"{hardware['processor']}, one thread, timed by the processor's clock"
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name()
    wanted = ("torch", "pytorch-metric-learning", "faiss-cpu", "faiss-gpu", "timm")
    found = describe_versions().items()
    about = [machine, *(f"{key} {number}" for key, number in found if key in wanted)]
    return f"Measured at {place} by\n`{command}`:\n{', '.join(about)}."
