"""Times, rates and counts on a device, and the settings under which they are measured."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Rounds = Mapping[str, list[float]]
"""Seconds of a call in each round, by row."""


def wait(device: torch.device) -> None:
    """Wait for everything that a GPU has been asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Seconds of a call, of several without a wait between them."""
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait(device)
    return (time.perf_counter() - start) / calls


def alternate(
    rows: Mapping[str, Callable[[], object]],
    device: torch.device,
    time_is_up: Callable[[], bool],
    *,
    calls: int = 1,
    most: int = 25,
) -> dict[str, list[float]]:
    """Time all rows in turn, at least once and in `most` rounds at most, until the time is up."""
    rounds: dict[str, list[float]] = {name: [] for name in rows}
    gc.collect()
    gc.disable()
    try:
        for _ in range(most):
            for name, run in rows.items():
                rounds[name].append(seconds_of(run, device, calls))
            if time_is_up():
                break
    finally:
        gc.enable()
    return rounds


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def ratios(rounds: Rounds, name: str) -> list[float]:
    """Ratios of a row to the first row in each round."""
    first = next(iter(rounds.values()))
    return [own / base for own, base in zip(rounds[name], first, strict=True)]


def extra_seconds(rounds: Rounds, name: str) -> float:
    """Median of what a row takes longer than the first row."""
    first = next(iter(rounds.values()))
    return median([own - base for own, base in zip(rounds[name], first, strict=True)])


def host_seconds(run: Callable[[], object], device: torch.device, calls: int = 10) -> float:
    """Median of the seconds until a call returns to Python, before an idle GPU has done its work."""
    seconds = []
    for _ in range(calls):
        wait(device)
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    wait(device)
    return median(seconds)


def peak_megabytes(run: Callable[[], object], device: torch.device) -> float:
    """Growth of the peak of torch's allocator during a call; 0 without a GPU."""
    if device.type != "cuda":
        run()
        return 0.0
    wait(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    wait(device)
    return (torch.cuda.max_memory_allocated() - before) / 1e6


@dataclass(frozen=True)
class Rates:
    """What the card does in a second, and the seconds of a launch.

    Attributes:
        products: Operations of a matrix product (a multiplication and an addition are two), by precision.
        copy: Bytes that a copy reads and writes.
        launch: Seconds of one of many kernels that have next to nothing to do.
    """

    products: Mapping[str, float]
    copy: float
    launch: float


PRECISIONS = {
    "bfloat16": (torch.bfloat16, "highest"),
    "TF32": (torch.float32, "high"),
    "float32": (torch.float32, "highest"),
}
"""Type of the matrices, and torch's precision of products in float32."""


def measure_rates(tiny: bool, device: torch.device) -> Rates:
    """Rates of products of 8192 x 8192, of a copy of a gibibyte, and of additions of one number."""
    n, numbers, launches = (64, 2**10, 10) if tiny else (8192, 2**28, 2000)
    products = {}
    before = torch.get_float32_matmul_precision()
    for name, (dtype, precision) in PRECISIONS.items():
        torch.set_float32_matmul_precision(precision)
        a, b = torch.randn(2, n, n, device=device).to(dtype).unbind()
        out = torch.empty_like(a)

        def multiply(a=a, b=b, out=out) -> None:  # type: ignore[no-untyped-def]
            torch.mm(a, b, out=out)

        seconds_of(multiply, device)
        products[name] = 2 * n**3 / min(seconds_of(multiply, device, 5) for _ in range(3))
        del a, b, out, multiply
    torch.set_float32_matmul_precision(before)
    source = torch.ones(numbers, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)
    target.copy_(source)
    copy = min(seconds_of(lambda: target.copy_(source), device, 5) for _ in range(3))
    one.add_(1)
    launch = min(seconds_of(lambda: one.add_(1), device, launches) for _ in range(3))
    return Rates(products, 8 * numbers / copy, launch)


def profile(run: Callable[[], object], device: torch.device) -> tuple[int, str]:
    """The number of kernels that a call launches, and its ten most expensive operations as a text.

    The number is 0 where the profiler cannot watch the device.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    wait(device)
    with torch.profiler.profile(activities=kinds) as profiler:
        run()
        wait(device)
    events = profiler.key_averages()
    launched = sum(event.count for event in events if "LaunchKernel" in event.key)
    orders = ["self_cpu_time_total"] + ["self_device_time_total"] * (device.type == "cuda")
    return launched, "\n".join(events.table(sort_by=key, row_limit=10) for key in orders)


@contextmanager
def training_settings() -> Iterator[None]:
    """Those of a training that shall be fast: products in TF32, and cuDNN's search for the fastest convolutions."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with matmul_precision("high"):
            yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """torch's precision of matrix products in float32: "highest", or "high" for TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
