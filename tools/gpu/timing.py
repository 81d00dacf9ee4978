"""Times, rates and counts on a device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.speed.measuring import Comparison


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

    def least(run: Callable[[], object], calls: int) -> float:
        def several() -> None:  # without a wait between them
            for _ in range(calls):
                run()

        times, _ = Comparison("", "", {"": several}, rounds=3, memory=None).measure(tiny)
        return min(times[""]) / calls

    products = {}
    for name, (dtype, precision) in PRECISIONS.items():
        a, b, out = torch.randn(3, n, n, device=device).to(dtype).unbind()
        with matmul_precision(precision):
            products[name] = 2 * n**3 / least(partial(torch.mm, a, b, out=out), 5)
    source, one = torch.ones(numbers, device=device), torch.ones(1, device=device)
    copy = least(partial(torch.empty_like(source).copy_, source), 5)
    return Rates(products, 8 * numbers / copy, least(partial(one.add_, 1), launches))


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """torch's precision of matrix products in float32: "highest", or "high" for TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
