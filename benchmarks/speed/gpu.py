"""Checks and measures everything that needs a GPU, part by part, and writes docs/gpu.md.

    python -m benchmarks.speed.gpu [--parts PART ...] [--tiny] [--output docs/gpu.md]

Each part runs in its own process, at most eight minutes. docs/gpu.json, beside the page, keeps the results: as long
as commit and machine stay the same, a part that has passed does not run again. The first wrong number ends the
command with one line. Nothing is downloaded; a part whose packages are missing says so.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.speed.arguments import page_parser

LIMIT = 480  # seconds for each part

Found = dict[str, Any]
"""Result of a part: "status", "why" it did not pass, "seconds", "checks" and "tables"."""

INTRODUCTION = """# On a GPU

{origin}

`make gpu` writes this page on a machine with a GPU; `make gpu PYTHON=python3` uses that Python and its packages,
without making `.venv`. It downloads nothing, and a part whose packages are missing says so. A part takes at most
eight minutes. After a stop, the same command continues with the next part. It ends at the first wrong number.

An error is the largest difference to the expected entries, divided by the largest of them. The expected entries
come from float64 on the CPU, unless a part says otherwise. Rows of times are measured alternately, for the number
of rounds given, each between two calls of `torch.cuda.synchronize`. A time is the median of the ratios to the first
row's time in the same round. The next column has the smallest and the largest ratio, or the seconds of the first
row.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = page_parser("benchmarks.speed.gpu", __doc__)
    parser.add_argument("--parts", nargs="+", metavar="PART", help="default: all; see docs/gpu.md")
    parser.add_argument("--commit", help="commit of these files, if git does not know it")
    parser.add_argument(
        "--run", nargs=2, metavar=("PART", "FILE"), help="run one part, in this process"
    )
    options = parser.parse_args(argv)
    if reason := _no_gpu(options.tiny):
        print(f"skipped: {reason}")
        return 0

    from benchmarks.records import read_json, write_json
    from benchmarks.speed.gpu_parts import PARTS
    from benchmarks.speed.measuring import current_device, origin

    if options.run is not None:
        name, file = options.run
        write_json(Path(file), run_here(name, options.tiny))
        return 0
    if unknown := set(options.parts or ()) - set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}; got {min(unknown)!r}")
    command = "python -m benchmarks.speed.gpu" + " --tiny" * options.tiny
    state = {"origin": origin(command, current_device(), options.commit), "parts": {}}
    page: Path | None = options.output
    if page is not None:
        with suppress(OSError, ValueError):  # missing or damaged
            before = read_json(page.with_suffix(".json"))
            state = before if before.get("origin") == state["origin"] else state
    status = 0
    for name in options.parts or PARTS:
        if state["parts"].get(name, {}).get("status") == "passed":
            continue
        found = state["parts"][name] = run_apart(name, options.tiny)
        print(f"{name}: {found['status']} {found['why']}".rstrip(), flush=True)
        if page is not None:
            write_json(page.with_suffix(".json"), state)
            write_page(page, state["origin"], state["parts"])
        if found["status"] in ("wrong", "failed"):
            status = 1
        if found["status"] == "wrong":
            break
    return status


def _no_gpu(tiny: bool) -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return f"{sys.executable} has no torch"
    if tiny or torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} finds no GPU here"


def run_apart(name: str, tiny: bool) -> Found:
    """Run a part in its own process, which ends with this one or when its time is over."""
    from benchmarks.console import signals_handled

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = [sys.executable, "-m", "benchmarks.speed.gpu", "--run", name, str(file)]
        variables = {"TRITON_INTERPRET": "1"} if tiny else {}
        process = subprocess.Popen(
            words + ["--tiny"] * tiny, env=os.environ | variables, start_new_session=True
        )
        with signals_handled(lambda number, frame: sys.exit(128 + number)):
            try:
                status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                return _found("failed", f"takes more than {LIMIT} seconds", LIMIT)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and all processes that it started
                process.wait()
        seconds = time.monotonic() - started
        if not file.exists():
            return _found("failed", f"ended with status {status}", seconds)
        return {**json.loads(file.read_text()), "seconds": seconds}


def run_here(name: str, tiny: bool) -> Found:
    """Run a part in this process; return its results up to the first wrong number or missing package."""
    import torch

    from benchmarks.speed.gpu_parts import PARTS, WrongNumberError
    from benchmarks.speed.measuring import current_device

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # as for matrix products; bfloat16 stays as fast
    found = _found("passed", "", 0)
    try:
        for result in PARTS[name](tiny, current_device()):
            found["tables" if isinstance(result, str) else "checks"].append(result)
    except WrongNumberError as error:
        found.update(status="wrong", why=str(error))
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("benchmarks", "pml_regularizers")):
            raise
        found.update(status="not run", why=f"needs {error.name}")
    return found


def _found(status: str, why: str, seconds: float) -> Found:
    return {"status": status, "why": why, "seconds": seconds, "checks": [], "tables": []}


def write_page(path: Path, origin: str | None, parts: Mapping[str, Found]) -> None:
    """Write the page with the results so far; without an origin, it only describes the parts."""
    from benchmarks.records import replace_file
    from benchmarks.reporting import Table
    from benchmarks.speed.gpu_parts import PARTS

    text = INTRODUCTION.format(origin=origin or "**Nobody has run this on a GPU yet.**")
    for name, part in PARTS.items():
        found = parts.get(name) or _found("not run yet", "", 0)
        title, about = str(part.__doc__).split("\n\n", 1)
        text += f"\n## {title.rstrip('.')}\n\n{textwrap.fill(' '.join(about.split()), 116)}\n"
        said = f"{found['status']}: {found['why']}" if found["why"] else found["status"]
        seconds = f" in {found['seconds']:.0f} s" if found["seconds"] else ""
        text += f"\n`--parts {name}`: {said}{seconds}.\n"
        if checks := found["checks"]:
            text += f"\n{Table(['value', 'error', 'at most'], checks).markdown()}\n"
        text += "".join(f"\n{table.strip()}\n" for table in found["tables"])
    replace_file(path, text.encode())


if __name__ == "__main__":
    sys.exit(main())
