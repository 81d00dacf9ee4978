"""What cases have found, as sections of a page: printed, or kept in a file that goes on where it was stopped."""

import argparse
import gc
import math
import re
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.console.writing import replace_file
from speed.case import Case
from speed.cases import CASES
from speed.measuring import origin

INTRODUCTION = """# On a GPU

{origin}

`make gpu` measures this page again on a machine with a GPU, in a few minutes and without a network. It keeps what
each part finds at once. If it is stopped, the same command goes on with the parts that have not passed.

An error is the largest difference from the expected entries, divided by the largest of them; **bold** errors are
too large. Times are medians of rounds in which the rows take turns, and a ratio compares a row with the first row
of the same round.
"""


def run_case(name: str, options: argparse.Namespace) -> bool:
    """Run a case, unless the page says that it has passed, at this commit on this machine; False if it fails."""
    device, page = torch.device(options.device), options.page
    measured = origin("make gpu", device, options.commit)
    others = {} if page is None else read_page(page, measured)
    if others.get(name, "").startswith("passed"):
        print(f"{name}: it has passed", file=sys.stderr)
        return True

    def keep(case: Case, outcome: str = "not ended") -> None:
        """Without an outcome while the case runs; this stays if its process dies."""
        if page is not None:
            write_page(page, measured, others | {name: case.results(outcome)})

    gc.freeze()  # what is there already need not be looked through again and again
    seconds = math.inf if page is None else CASES[name].seconds
    torch.manual_seed(0)
    # As for matrix products; bfloat16 stays as fast.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    started = time.monotonic()
    case = Case(options.tiny, device, seconds, keep)
    keep(case)
    case.run(name, 0, lambda: CASES[name].run(case))
    taken = f"{time.monotonic() - started:.0f} s"
    outcome = f"passed in {taken}" if case.blocks else "not run"
    if case.failures:
        outcome = f"failed after {taken}: {'; '.join(case.failures)}"
    keep(case, outcome)
    print(f"{name}: {outcome}", file=sys.stderr)
    if page is None:
        print("\n" + section(name, case.results(outcome)), end="", flush=True)
    return not case.failures


def section(name: str, results: str) -> str:
    """Results below the title and the text of a case."""
    run = CASES[name].run
    title, _, about = str(getattr(run, "func", run).__doc__).partition("\n\n")
    about = textwrap.fill(" ".join(about.split()), 116)
    parts = [f"## {title.rstrip('.')}", *[about] * bool(about), f"`{name}`: {results}"]
    return "\n\n".join(parts) + "\n"


def read_page(path: Path, origin: str) -> dict[str, str]:
    """The results of the cases on a page, by name; none if it is missing or of another origin."""
    head, *sections = (path.read_text() if path.exists() else "").split("\n## ")
    if head.strip() != INTRODUCTION.format(origin=origin).strip():
        return {}
    found = [re.search(r"\n`(\w+)`: (.*)", section, re.DOTALL) for section in sections]
    return {match[1]: match[2].strip() for match in found if match}


def write_page(path: Path, origin: str, results: Mapping[str, str]) -> None:
    """Write the page with the results so far; one line names a GPU's cases without any."""
    parts = [INTRODUCTION.format(origin=origin)]
    parts += [section(name, results[name]) for name in CASES if name in results]
    missing = [
        name for name, case in CASES.items() if case.device == "cuda" and name not in results
    ]
    if missing:
        parts.append(f"## Not run\n\n{', '.join(f'`{name}`' for name in missing)}.\n")
    replace_file(path, "\n".join(parts).encode())
