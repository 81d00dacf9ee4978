"""Comparison of functions by time and memory, within one run.

Each round calls every function once, so that a phase in which the machine is slow affects all of them. The time of
a function is the median over the rounds of its ratio to another function's time in the same round.
"""

import argparse
import gc
import math
import multiprocessing
import os
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.console import HelpFormatter, progress_bar
from benchmarks.records import describe_code, describe_hardware, describe_versions
from benchmarks.reporting import Table

Sizes = Mapping[str, int]


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
        against: {candidate: the candidate whose time is 1 for it}; default: the first.
        grids: {size: further values at which the candidates are measured}.
        base: All sizes of `candidates`, the base point.
        at: Function from sizes to the same candidates at these sizes.
    """

    name: str
    size: str
    candidates: Mapping[str, Callable[[], object]]
    memory_against: str | None = None
    targets: Mapping[str, Target] = field(default_factory=dict)
    rounds: int = 7
    memory: Callable[[Callable[[], object]], int] | None = None
    against: Mapping[str, str] = field(default_factory=dict)
    grids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    base: Sizes = field(default_factory=dict)
    at: Callable[[Sizes], Mapping[str, Callable[[], object]]] | None = None

    def table(
        self, measured: Mapping[str, "Measured"], sweeps: Mapping[str, "Sweep"] | None = None
    ) -> str:
        """The size in words and a Markdown table, without columns that would be empty.

        Args:
            measured: The candidates.
            sweeps: Measurements over each size; each gets a column with the slopes of time and of memory.
        """
        columns = ["", "time", "least to most", "target", "memory", "MB", "target"]
        columns += [f"over {size}" for size in sweeps or ()]
        rows = []
        for name, found in measured.items():
            target = self.targets.get(name, Target())
            spread = f"{min(found.ratios):.2f} to {max(found.ratios):.2f}"
            if not rows or self.against.get(name) == name:
                spread = f"{found.seconds:.3g} s"
            row = [name, f"{found.ratio:.2f}", spread, _held_against(target.time, found.ratio)]
            if self.memory_against is not None:
                share = found.bytes / measured[self.memory_against].bytes
                megabytes = f"{found.bytes / 1e6:,.1f}"
                row += [f"{share:.3f}", megabytes, _held_against(target.memory, share)]
            row += [""] * (7 - len(row))
            for size, sweep in (sweeps or {}).items():
                times, bytes_ = zip(*((p.ratio, p.bytes) for p in sweep[name]), strict=True)
                steep = (slope(self.grids[size], values) for values in (times, bytes_))
                row.append(", ".join(f"{value:.2f}" for value in steep))
            rows.append(row)
        shown = [k for k in range(len(rows[0])) if k == 0 or any(row[k] for row in rows)]
        header, *rows = [[row[k] for k in shown] for row in (columns, *rows)]
        rounds = len(next(iter(measured.values())).ratios)
        size = f"{self.size}; {rounds} round{'s' * (rounds > 1)}."
        return f"{textwrap.fill(size, 116)}\n\n{Table(header, rows).markdown()}\n"


def _held_against(bound: float | None, found: float) -> str:
    if bound is None:
        return ""
    met = round(found, 2) <= bound  # as printed
    return f"{bound:.3g}, {'met' if met else '**missed**'}"


@dataclass(frozen=True)
class Measured:
    """Measurements of one candidate: seconds, ratios to another's seconds in each round, and bytes."""

    seconds: float
    ratios: Sequence[float]
    bytes: int

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def measure(comparison: Comparison, *, tiny: bool = False) -> dict[str, Measured]:
    """Call each candidate once to measure its memory, then time all of them in rounds; if `tiny`, in one."""
    candidates = comparison.candidates
    gc.freeze()  # the collector skips existing objects between the timed calls
    memory = {name: (comparison.memory or tensor_bytes)(run) for name, run in candidates.items()}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    rounds = range(1 if tiny else comparison.rounds)
    for _ in progress_bar(rounds, desc=comparison.name, unit="round", leave=False):
        for name, run in candidates.items():
            seconds[name].append(_seconds(run))
    gc.unfreeze()
    first = next(iter(seconds))
    found = {}
    for name, own in seconds.items():
        other = seconds[comparison.against.get(name, first)]
        ratios = [a / b for a, b in zip(own, other, strict=True)]
        found[name] = Measured(statistics.median(own), ratios, memory[name])
    return found


def section(comparison: Comparison, tiny: bool, level: int = 3) -> str:
    """Measure the candidates; their table below a heading of that level, as Markdown."""
    measured = measure(comparison, tiny=tiny)
    return f"{'#' * level} {comparison.name}\n\n{comparison.table(measured)}"


Sweep = Mapping[str, Sequence[Measured]]
"""Measurements of each candidate, at all values of one size."""


def measure_over(
    comparison: Comparison, *, tiny: bool = False
) -> tuple[dict[str, Measured], dict[str, Sweep]]:
    """Measure the candidates at all values of each size; 1 is the time of the first at the base point.

    Returns:
        The measurements at the base point, from the sweep over the first size, and all measurements by size.
    """
    assert comparison.at is not None
    points: dict[str, Measured] = {}
    sweeps: dict[str, Sweep] = {}
    names = list(comparison.candidates)
    for size, values in comparison.grids.items():
        base = comparison.base[size]
        at = {value: comparison.at({**comparison.base, size: value}) for value in values}
        order = dict.fromkeys([(names[0], base), *product(names, values)])  # the first once
        turns = {f"{name}, {value}": at[value][name] for name, value in order}
        title = f"{comparison.name} over {size}"
        found = measure(replace(comparison, name=title, candidates=turns), tiny=tiny)
        points = points or {name: found[f"{name}, {base}"] for name in names}
        sweeps[size] = {name: [found[f"{name}, {value}"] for value in values] for name in names}
    return points, sweeps


def slope(x: Iterable[float], y: Iterable[float]) -> float:
    """The slope of a line fitted to the logarithms of the upper half of the points, including the middle one."""
    logarithms = ([math.log(value) for value in values] for values in (x, y))
    return statistics.linear_regression(*(all_[len(all_) // 2 :] for all_ in logarithms)).slope


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


def tensor_bytes(run: Callable[[], object]) -> int:
    """The peak of the bytes in tensors that a call makes, including backward passes, without its results.

    They are counted after every operation: memory that an operation allocates and frees inside does not show.
    """
    with _Storages() as storages:
        result = run()
    return storages.most(without=_tensors(result))


def peak_bytes(run: Callable[[], object]) -> int:
    """The growth of the peak of torch's allocator on a GPU during a call; elsewhere `tensor_bytes`."""
    if not torch.cuda.is_available():
        return tensor_bytes(run)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


class _Storages(TorchDispatchMode):
    """A history, one entry per operation, of the storages that operations have made and that are not freed."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, _Storage] = {}  # by an address, which a later storage may have again
        self._history: list[list[_Storage]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        self._live = {key: held for key, held in self._live.items() if not held.weak.expired()}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known | self._live.keys():
                self._live[storage._cdata] = _Storage(StorageWeakRef(storage), storage.nbytes())
        self._history.append(list(self._live.values()))
        return result

    def most(self, without: Sequence[Tensor]) -> int:
        results = [self._live.get(tensor.untyped_storage()._cdata) for tensor in without]
        return max(
            (sum(held.bytes for held in then if held not in results) for then in self._history),
            default=0,
        )


@dataclass(frozen=True, eq=False)
class _Storage:
    weak: StorageWeakRef
    bytes: int


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


def current_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def origin(command: str, device: torch.device, commit: str | None = None) -> str:
    """Commit, command and machine of measured numbers, in the words that the tests of the documents expect."""
    code = {"commit": commit, "dirty": False} if commit else describe_code()
    commit = f"`{code['commit'][:7]}`" if code["commit"] else "an unknown commit"
    dirty = " (with uncommitted changes)" if code["dirty"] else ""
    wanted = ("OMP_", "MALLOC_")
    settings = [f"{key}={value} " for key, value in os.environ.items() if key.startswith(wanted)]
    command = "".join(sorted(settings)) + command
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


def page_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The arguments that the commands of all measured pages share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="use tiny sizes, only to show that it runs"
    )
    parser.add_argument("--output", type=Path, metavar="PAGE", help="default: print only")
    return parser
