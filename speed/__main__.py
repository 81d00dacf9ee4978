"""Measures speed and memory, each as a ratio to a named alternative in the same run, and checks what needs a GPU.

python -m speed [CASE ...] [--device cuda] [--page FILE] [--tiny]

Without a page the tables are printed. On a page each case is kept as soon as it has ended, and has a process of its
own: one that dies or hangs costs no other.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from speed.cases import CASES
from speed.measuring import origin
from speed.page import run_case

GRACE = 60
"""Seconds for a case's imports, and beyond its limit, after which it hangs."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    known = ", ".join(CASES)
    some = f"some of {known}; default: the device's own"
    parser.add_argument("cases", nargs="*", metavar="CASE", help=some)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--page", type=Path, help="file for the results, such as docs/gpu.md")
    parser.add_argument("--commit", help="of these files, if git does not know it; for a page")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, only to show that it runs")
    options = parser.parse_args(argv)
    if unknown := set(options.cases) - CASES.keys():  # Python 3.11 fails on choices without a CASE
        parser.error(f"CASE: expected some of {known}, got {min(unknown)!r}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device: torch {torch.__version__} finds no GPU here")
    names: list[str] = options.cases or [
        name for name in CASES if CASES[name].device == options.device
    ]
    if options.page is None:
        command = " ".join(["python -m speed", *(sys.argv[1:] if argv is None else argv)])
        print(origin(command, torch.device(options.device)))
    elif len(names) > 1:
        return next(filter(None, [run_apart(name, options) for name in names]), 0)
    passed = [run_case(name, options) for name in names]
    return int(not all(passed))


def run_apart(name: str, options: argparse.Namespace) -> int:
    """The exit status of a case in a process of its own, which is ended if it hangs."""
    words = [name, "--device", options.device, "--page", str(options.page)]
    words += ["--tiny"] * options.tiny + ["--commit", options.commit] * bool(options.commit)
    limit = CASES[name].seconds + GRACE
    try:
        command = [sys.executable, "-m", "speed", *words]
        return subprocess.run(command, timeout=None if limit == math.inf else limit).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: hangs, ended after {limit} s", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
