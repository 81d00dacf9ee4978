"""Runs the parts of `make gpu` into a page: `python -m tests.gpu [--page FILE] [--commit HASH] [PART ...]`.

One process runs all of them, since importing takes seconds. If it dies in one, the next goes on behind that part.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.page import PARTS, descriptions, mark_dead


def main(argv: Sequence[str] | None = None) -> int:
    every = list(descriptions())
    parser = argparse.ArgumentParser(prog="tests.gpu", description=__doc__)
    parser.add_argument(
        "--page", type=Path, default=Path("docs/gpu.md"), help="default: docs/gpu.md"
    )
    parser.add_argument("--commit", help="of these files, if git does not know it")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(every))
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(every):
        parser.error(f"PART: expected some of {', '.join(every)}, got {min(unknown)!r}")
    parts = [name for name in every if name in (options.parts or every)]
    words = ["-q", "-s", "-p", "no:cacheprovider", f"--page={options.page}"]
    words += [f"--commit={options.commit}"] if options.commit else []
    worst = 0
    while parts:
        status = run_parts([*words, *(f"{PARTS}::test_{name}" for name in parts)])
        worst = worst or status
        dead = mark_dead(options.page, status)
        parts = parts[parts.index(dead) + 1 :] if dead in parts else []
    return worst


def run_parts(words: Sequence[str]) -> int:
    return subprocess.call([sys.executable, "-m", "pytest", *words])


if __name__ == "__main__":
    sys.exit(main())
