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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.console.printing import progress_bar
from benchmarks.records.provenance import describe_code, describe_hardware, describe_versions
from benchmarks.reporting.table import Table


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


def peak_bytes(run: Callable[[], object]) -> int:
    """Growth of the peak of torch's allocator during a call; 0 without a GPU."""
    if not torch.cuda.is_initialized():
        run()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class Comparison:
    """Functions that do the same work, or larger and smaller parts of it."""

    name: str
    size: str  # in words
    candidates: Mapping[str, Callable[[], object]]  # by name; their results do not count as memory
    rounds: int = 7  # each candidate is timed so often
    memory: Callable[[Any], int] | None = tensor_bytes  # `process_bytes` if torch does not allocate
    floors: Mapping[str, float] | None = None  # the least seconds beyond the first, of steps
    calls: int = 1  # that are timed at once, without a wait between them

    def section(self, tiny: bool) -> str:
        """Measure the candidates; their table below a heading, as Markdown."""
        seconds, memory = self.measure(tiny)
        rounds = len(next(iter(seconds.values())))
        size = f"{self.size}; {rounds} round{'s' * (rounds > 1)}"
        size += f" of {self.calls} calls." if self.calls > 1 else "."
        lines = table(seconds, memory, self.floors)
        return f"### {self.name}\n\n{textwrap.fill(size, 116)}\n\n{lines.markdown()}\n"

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
                seconds[name].append(_seconds(run, self.calls))
        gc.unfreeze()
        return seconds, memory


def table(
    seconds: Mapping[str, Sequence[float]],
    memory: Mapping[str, int],
    floors: Mapping[str, float] | None = None,
) -> Table:
    """The time of the first is 1, and the first memory above 0 is 1; steps with floors are in milliseconds."""
    header = ["", "time", "least to most"] + ["memory", "MB"] * bool(memory)
    if floors is not None:
        header = ["", "step, ms", "ratio", "least to most", "extra, ms", "floor, ms"]
        header += ["extra / floor", "MB"]
    first, rows = next(iter(seconds.values())), list[list[str]]()
    unit = next(filter(None, memory.values()), 1)
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, first, strict=True)]
        ratio, least, most = statistics.median(ratios), min(ratios), max(ratios)
        if floors is None:
            row = [f"{ratio:.2f}", f"{least:.2f} to {most:.2f}"]
            if not rows:
                row[1] = f"{statistics.median(own):.3g} s"
            if memory:
                row += [f"{memory[name] / unit:.3f}", f"{memory[name] / 1e6:,.1f}"]
        else:
            extra = statistics.median(a - b for a, b in zip(own, first, strict=True))
            row = [f"{1e3 * statistics.median(own):.2f}", f"{ratio:.3f}"]
            row += [f"{least:.3f} to {most:.3f}", f"{1e3 * extra:.2f}", f"{1e3 * floors[name]:.2f}"]
            # Launches alone take longer than a tenth of a millisecond.
            row += [f"{extra / floors[name]:.1f}" if floors[name] > 1e-4 else ""]
            row += [f"{memory[name] / 1e6:,.0f}"]
        rows.append([name, *row])
    return Table(header, rows)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """torch's precision of matrix products in float32: "highest", or "high" for TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _seconds(run: Callable[[], object], calls: int) -> float:
    gc.collect()
    gpu = torch.cuda.is_initialized()
    clock = time.process_time if _one_thread(gpu) else time.perf_counter
    wait: Any = torch.cuda.synchronize if gpu else lambda: None
    wait()
    start = clock()
    for _ in range(calls):
        _result = run()  # freed after the clock has stopped
    wait()
    return (clock() - start) / calls


def _one_thread(gpu: bool) -> bool:
    """True on a CPU with one thread: the processor's clock then leaves out the time of other processes."""
    return not gpu and torch.get_num_threads() == 1


def origin(command: str, device: torch.device, commit: str | None = None) -> str:
    """Commit, command and machine of measured numbers, in the words that the tests of the documents expect."""
    code: Mapping[str, Any] = {"commit": commit, "dirty": False} if commit else describe_code()
    place = f"`{code['commit'][:7]}`" if code["commit"] else "an unknown commit"
    if code["dirty"]:
        place += " (with uncommitted changes)"
    if threads := os.environ.get("OMP_NUM_THREADS"):
        command = f"OMP_NUM_THREADS={threads} {command}"
    hardware = describe_hardware()
    machine = "{processor}, {cores} cores, {torch_threads} threads".format(**hardware)
    if device.type == "cuda":
        machine = torch.cuda.get_device_name()
    elif _one_thread(gpu=False):
        machine = f"{hardware['processor']}, one thread, timed by the processor's clock"
    wanted = ("torch", "pytorch-metric-learning", "faiss-cpu", "faiss-gpu", "timm")
    found = describe_versions().items()
    about = [machine, *(f"{key} {number}" for key, number in found if key in wanted)]
    return f"Measured at {place} by\n`{command}`:\n{', '.join(about)}."
