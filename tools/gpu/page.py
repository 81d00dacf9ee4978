"""The page docs/gpu.md: what the parts of `make gpu` have found."""

import faulthandler
import gc
import re
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.console import replace_file
from benchmarks.speed.measuring import current_device, origin
from tools.gpu.correctness import correctness, float16
from tools.gpu.part import Part
from tools.gpu.retrieval import retrieval
from tools.gpu.steps import glyphs, steps

PARTS = {part.__name__: part for part in (correctness, steps, retrieval, float16, glyphs)}
"""In the order in which they run. A docstring's first line is the title on the page, the others are the text."""

LIMITS = {"correctness": 60, "steps": 90, "retrieval": 30, "float16": 15, "glyphs": 45}
"""Seconds of the parts on a machine with one H100."""

GRACE = 30
"""Seconds beyond its limit after which a part's process is ended: it hangs."""

NO_GPU = 2
"""Exit status of a part that finds no GPU."""

INTRODUCTION = """# On a GPU

{origin}

`make gpu` measures this page again on a machine with a GPU, in a few minutes and without a network. It keeps what
each part finds at once. If it is stopped, the same command goes on with the parts that have not passed.

An error is the largest difference from the expected entries, divided by the largest of them; **bold** errors are
too large. Times are medians of rounds in which the rows take turns, and a ratio compares a row with the first row
of the same round.
"""


def run_part(name: str, page: Path, commit: str | None) -> None:
    """Run a part unless the page says that it has passed, at this commit on this machine; exit 1 if it fails."""
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no GPU here", file=sys.stderr)
        sys.exit(NO_GPU)
    measured = origin("make gpu", commit)
    others = read_page(page, measured)
    if others.get(name, "").startswith("passed"):
        print(f"{name}: it has passed", file=sys.stderr)
        sys.exit(0)

    def keep(part: Part, outcome: str = "not ended") -> None:
        """Without an outcome while the part runs; this stays if its process dies."""
        write_page(page, measured, others | {name: part.results(outcome)})

    gc.freeze()  # what is there already need not be looked through again and again
    faulthandler.dump_traceback_later(LIMITS[name] + GRACE, exit=True)
    # As for matrix products; bfloat16 stays as fast.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    started = time.monotonic()
    part = Part(False, current_device(), LIMITS[name], keep)
    keep(part)
    part.run(name, 0, lambda: PARTS[name](part))
    seconds = f"{time.monotonic() - started:.0f} s"
    if part.failures:
        outcome = f"failed after {seconds}: {'; '.join(part.failures)}"
    else:
        outcome = f"passed in {seconds}" if part.blocks else "not run"
    keep(part, outcome)
    faulthandler.cancel_dump_traceback_later()
    print(f"{name}: {outcome}", file=sys.stderr)
    sys.exit(bool(part.failures))


def read_page(path: Path, origin: str) -> dict[str, str]:
    """The results of the parts on a page, by name; none if it is missing or of another origin."""
    head, *sections = (path.read_text() if path.exists() else "").split("\n## ")
    if head.strip() != INTRODUCTION.format(origin=origin).strip():
        return {}
    found = [re.search(r"\n`(\w+)`: (.*)", section, re.DOTALL) for section in sections]
    return {match[1]: match[2].strip() for match in found if match}


def write_page(path: Path, origin: str, results: Mapping[str, str]) -> None:
    """Write the page with the results so far; one line names the parts without any."""
    text = INTRODUCTION.format(origin=origin)
    for name, part in PARTS.items():
        title, _, about = str(part.__doc__).partition("\n\n")
        if name not in results:
            continue
        text += f"\n## {title.rstrip('.')}\n\n{textwrap.fill(' '.join(about.split()), 116)}\n"
        text += f"\n`{name}`: {results[name]}\n"
    if missing := [f"`{name}`" for name in PARTS if name not in results]:
        text += f"\n## Not run\n\n{', '.join(missing)}.\n"
    replace_file(path, text.encode())
