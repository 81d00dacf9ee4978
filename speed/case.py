"""A case: it checks and measures, keeps at once what it finds, and looks at the clock."""

import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.reporting.table import Table
from speed.measuring import Comparison

FLOAT32, TF32 = 1e-4, 2**-8
"""Bounds of errors in float32. TF32 rounds to 10 bits; five factors and their sums come to 2^-10 (simulated)."""


@dataclass
class Case:
    """Checks and measures on a device, within a limit of seconds from now on.

    Neither a check that fails nor an error ends it: they become `failures`, and it goes on with its other checks.
    """

    tiny: bool  # tiny sizes, only to show that it runs
    device: torch.device
    seconds: float = math.inf
    keep: Callable[["Case"], None] = lambda case: None  # called after each finding
    blocks: list[str | Table] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds

    def run(self, what: str, seconds: float, step: Callable[[], object]) -> None:
        """Take a step of the case if so many seconds are left; its error is kept."""
        left = self.end - time.monotonic()
        if left < seconds:
            self.left_out.append(f"{what} (no time)")
            self.keep(self)
            return
        print(f"  {left:7.1f} s left: {what}", file=sys.stderr, flush=True)
        try:
            # Free what earlier steps have left, and count the peak anew.
            if torch.cuda.is_initialized():
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            step()
        except Exception as error:
            traceback.print_exc()
            said = " ".join(str(error).split())[:300]
            self._fail(f"{what}: {type(error).__name__}: {said}")

    def check(self, name: str, found: Any, expected: Any, bound: float) -> None:
        """Compare a number, a tensor or a list of them with the expected ones.

        It fails if an error exceeds the bound times the largest expected entry, or if an entry is not finite. In a
        list, this largest entry is at least a thousandth of the largest entry of all tensors.
        """
        found, expected = (x if isinstance(x, list) else [x] for x in (found, expected))
        expected = [torch.as_tensor(x).detach().double().flatten() for x in expected]
        least = max(b.abs().max().item() for b in expected) / 1000
        largest, fault = 0.0, ""
        for index, (a, b) in enumerate(zip(found, expected, strict=True), start=1):
            a = torch.as_tensor(a).detach().to(b.device).double().flatten()
            scale = max(b.abs().max().item(), least)
            errors = (a - b).abs().nan_to_num(torch.inf)
            worst = int(errors.argmax())
            error = errors[worst].item() / scale if 0 < scale < torch.inf else torch.inf
            if error > max(bound, largest):
                fault = (
                    f"{name}: tensor {index} of {len(found)}, entry {worst}: got {a[worst]:.6g}, expected "
                    f"{b[worst]:.6g} to {bound:.1e} of {scale:.3g}"
                )
            largest = max(largest, error)
        if not (self.blocks and isinstance(self.blocks[-1], Table)):
            self.blocks.append(Table(["compared", "error", "at most"], []))
        row = [name, f"**{largest:.1e}**" if fault else f"{largest:.1e}", f"{bound:.1e}"]
        self.blocks[-1].rows.append(row)  # type: ignore[union-attr]
        if fault:
            self._fail(fault)
        self.keep(self)

    def tell(self, markdown: str) -> None:
        """Keep a table or a text."""
        self.blocks.append(markdown.strip())
        self.keep(self)

    def compare(
        self, title: str, size: str, rows: Mapping[str, Callable[[], object]], **options: Any
    ) -> None:
        """Measure functions, and keep the table: options are those of a `Comparison`."""
        self.tell(Comparison(title, size, rows, **options).section(self.tiny))

    def _fail(self, fault: str) -> None:
        self.failures.append(fault)
        self.keep(self)

    def results(self, outcome: str) -> str:
        """The outcome and everything that was found, as Markdown."""
        blocks = [x.markdown() if isinstance(x, Table) else x for x in self.blocks]
        if self.left_out:
            blocks.append(f"Left out: {'; '.join(self.left_out)}.")
        return "\n\n".join([f"{outcome}.", *blocks])
