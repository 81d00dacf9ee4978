"""Runs the parts of `make gpu` into a page: `python -m tools.gpu [--page FILE] [--commit HASH]`.

Each part has a process of its own: one that dies or hangs costs no other part.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.gpu.page import NO_GPU, PARTS, run_part


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.gpu", description=__doc__)
    parser.add_argument("--page", type=Path, default=Path("docs/gpu.md"))
    parser.add_argument("--commit", help="of these files, if git does not know it")
    options = parser.parse_args(argv)
    statuses = []
    for name in PARTS:
        statuses.append(run_apart(name, options.page, options.commit))
        if statuses[-1] == NO_GPU:
            break
    return next(filter(None, statuses), 0)


def run_apart(name: str, page: Path, commit: str | None) -> int:
    """The exit status of a part in a process forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.gpu.page"])
    process = context.Process(target=run_part, args=(name, page, commit))
    process.start()
    process.join()
    return int(process.exitcode or 0)


if __name__ == "__main__":
    sys.exit(main())
