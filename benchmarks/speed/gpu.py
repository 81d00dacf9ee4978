"""Checks and measures everything that needs a GPU, part by part, and writes docs/gpu.md.

    python -m benchmarks.speed.gpu [--parts PART ...] [--tiny] [--output docs/gpu.md]

Each part runs in its own process, at most eight minutes. As long as commit and machine stay those of the page, a
part that has passed does not run again. The first wrong number ends the command with one line. Nothing is
downloaded; a part whose packages are missing says so.
"""

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.speed.arguments import page_parser

LIMIT = 480  # seconds for each part

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

    from benchmarks.speed.gpu_parts import PARTS
    from benchmarks.speed.measuring import current_device, origin

    if options.run is not None:
        name, file = options.run
        Path(file).write_text(run_here(name, options.tiny))
        return 0
    if unknown := set(options.parts or ()) - set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}; got {min(unknown)!r}")
    command = "python -m benchmarks.speed.gpu" + " --tiny" * options.tiny
    measured = origin(command, current_device(), options.commit)
    results = read_page(options.output, measured)
    status = 0
    for name in options.parts or PARTS:
        if results.get(name, "").startswith("passed"):
            continue
        results[name] = run_apart(name, options.tiny)
        said = results[name].splitlines()[0]
        print(f"{name}: {said}", flush=True)
        if options.output is not None:
            write_page(options.output, measured, results)
        if said.startswith(("wrong", "failed")):
            status = 1
        if said.startswith("wrong"):
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


def run_apart(name: str, tiny: bool) -> str:
    """Run a part in its own process, which ends with this one or when its time is over."""
    from benchmarks.console import signals_handled

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.md"
        words = [sys.executable, "-m", "benchmarks.speed.gpu", "--run", name, str(file)]
        variables = {"TRITON_INTERPRET": "1"} if tiny else {}
        with signals_handled(lambda number, frame: sys.exit(128 + number)):
            try:
                ended = subprocess.run(
                    words + ["--tiny"] * tiny,
                    env=os.environ | variables,
                    start_new_session=True,
                    timeout=LIMIT,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"failed: takes more than {LIMIT} seconds."
        return file.read_text() if file.exists() else f"failed: status {ended.returncode}."


def run_here(name: str, tiny: bool) -> str:
    """Run a part in this process up to the first wrong number or missing package; return its results as Markdown."""
    import torch

    from benchmarks.reporting import Table
    from benchmarks.speed.gpu_parts import PARTS, WrongNumberError
    from benchmarks.speed.measuring import current_device

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # as for matrix products; bfloat16 stays as fast
    checks, tables, started = [], [], time.monotonic()
    try:
        for result in PARTS[name](tiny, current_device()):
            if isinstance(result, str):
                tables.append(result.strip())
            else:
                checks.append(result)
    except WrongNumberError as error:
        said = f"wrong: {error}"
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("benchmarks", "pml_regularizers")):
            raise
        said = f"not run: needs {error.name}"
    else:
        said = f"passed in {time.monotonic() - started:.0f} s"
    if checks:
        tables.insert(0, Table(["value", "error", "at most"], checks).markdown())
    return "\n\n".join([f"{said}.", *tables])


def read_page(path: Path | None, origin: str) -> dict[str, str]:
    """The results of the parts on a page, by name; none if it is missing or of another origin."""
    text = path.read_text() if path is not None and path.exists() else ""
    head, *sections = text.split("\n## ")
    if head != INTRODUCTION.format(origin=origin):
        return {}
    results = (section.split("\n`--parts ", 1)[1].split("`: ", 1) for section in sections)
    return {name: result.strip() for name, result in results}


def write_page(path: Path, origin: str | None, results: Mapping[str, str]) -> None:
    """Write the page with the results so far; without an origin, it only describes the parts."""
    from benchmarks.records import replace_file
    from benchmarks.speed.gpu_parts import PARTS

    text = INTRODUCTION.format(origin=origin or "**Nobody has run this on a GPU yet.**")
    for name, part in PARTS.items():
        title, about = str(part.__doc__).split("\n\n", 1)
        text += f"\n## {title.rstrip('.')}\n\n{textwrap.fill(' '.join(about.split()), 116)}\n"
        text += f"\n`--parts {name}`: {results.get(name, 'not run yet.')}\n"
    replace_file(path, text.encode())


if __name__ == "__main__":
    sys.exit(main())
