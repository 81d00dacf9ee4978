"""Results of a part of `make gpu`, and the page that keeps them."""

import ast
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import replace_file
from benchmarks.reporting import Table
from benchmarks.speed.measuring import Comparison

INTRODUCTION = """# On a GPU

{origin}

`make gpu` writes this page on a machine with a GPU; `make gpu PYTHON=python3` uses that Python and its packages,
pytest among them, without making `.venv`. It downloads nothing, and a part whose packages are missing says so. A
part takes at most eight minutes. After a stop, the same command continues with the next part. It ends at the first
part that fails.

An error is the largest difference to the expected entries, divided by the largest of them. The expected entries
come from float64 on the CPU, unless a part says otherwise. Rows of times are measured alternately, for the number
of rounds given, each between two calls of `torch.cuda.synchronize`. A time is the median of the ratios to the first
row's time in the same round. The next column has the smallest and the largest ratio, or the seconds of the first
row.
"""


class Part:
    """Checks and measures on a device, and collects what is found."""

    def __init__(self, tiny: bool, device: torch.device) -> None:
        self.tiny, self.device = tiny, device
        self.checks: list[list[str]] = []
        self.tables: list[str] = []

    def check(self, name: str, found: Any, expected: Any, bound: float) -> None:
        """Compare a number, a tensor or a list of them with the expected ones.

        Raises:
            AssertionError: if an error exceeds the bound times the largest expected entry, or if one of them is not
                finite. In a list, this largest entry is at least a thousandth of the largest entry of all tensors.
        """
        largest = 0.0
        found, expected = (
            [
                torch.as_tensor(x).detach().cpu().double().flatten()
                for x in (y if type(y) is list else [y])
            ]
            for y in (found, expected)
        )
        least = max(b.abs().max().item() for b in expected) / 1000
        for index, (a, b) in enumerate(zip(found, expected, strict=True), start=1):
            scale = max(b.abs().max().item(), least)
            errors = (a - b).abs().nan_to_num(torch.inf)
            worst = int(errors.argmax())
            error = errors[worst].item() / scale if 0 < scale < torch.inf else torch.inf
            largest = max(largest, error)
            assert largest <= bound, (
                f"{name}: tensor {index} of {len(found)}, entry {worst}: got {a[worst]:.6g}, expected "
                f"{b[worst]:.6g} to {bound:.1e} of {scale:.3g}"
            )
        self.checks.append([name, f"{largest:.1e}", f"{bound:.1e}"])

    def measure(self, comparison: Comparison) -> None:
        """Measure the candidates, and keep their table."""
        self.tell(comparison.section(self.tiny))

    def tell(self, markdown: str) -> None:
        self.tables.append(markdown.strip())

    def results(self, said: str) -> str:
        """The outcome of the part and everything that it found, as Markdown."""
        header = ["value", "error", "at most"]
        checks = [Table(header, self.checks).markdown()] if self.checks else []
        return "\n\n".join([f"{said}.", *checks, *self.tables])


def descriptions() -> dict[str, str]:
    """The docstrings of the parts, by name."""
    module = ast.parse(Path(__file__).with_name("test_parts.py").read_text())
    return {
        node.name.removeprefix("test_"): str(ast.get_docstring(node))
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def read_page(path: Path, origin: str) -> dict[str, str]:
    """The results of the parts on a page, by name; none if it is missing or of another origin."""
    head, *sections = (path.read_text() if path.exists() else "").split("\n## ")
    if head != INTRODUCTION.format(origin=origin):
        return {}
    found = [re.search(r"\n`(\w+)`: (.*)", section, re.DOTALL) for section in sections]
    return {match[1]: match[2].strip() for match in found if match}


def write_page(path: Path, origin: str | None, results: Mapping[str, str]) -> None:
    """Write the page with the results so far; without an origin, it only describes the parts."""
    text = INTRODUCTION.format(origin=origin or "**Nobody has run this on a GPU yet.**")
    for name, description in descriptions().items():
        title, about = description.split("\n\n", 1)
        text += f"\n## {title.rstrip('.')}\n\n{textwrap.fill(' '.join(about.split()), 116)}\n"
        text += f"\n`{name}`: {results.get(name, 'not run yet.')}\n"
    replace_file(path, text.encode())
