"""Measures speed and memory, each as a ratio to a named alternative in the same run; prints tables in Markdown.

python -m benchmarks.speed [CASE ...] [--tiny]
"""

import sys
from collections.abc import Sequence

import torch

from benchmarks.console import command_parser
from benchmarks.speed.cases import CASES
from benchmarks.speed.measuring import current_device, origin


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("speed", __doc__)
    names = ", ".join(CASES)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {names}; default: all")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, only to show that it runs")
    options = parser.parse_args(argv)
    if unknown := set(options.cases) - CASES.keys():  # Python 3.11 fails on choices without a CASE
        parser.error(f"CASE: expected some of {names}, got {min(unknown)!r}")
    words = ["python", "-m", "benchmarks.speed", *options.cases, *["--tiny"] * options.tiny]
    print(origin(" ".join(words)))
    for name in options.cases or CASES:
        torch.manual_seed(0)
        comparison = CASES[name](options.tiny, current_device())
        print("\n" + comparison.section(options.tiny, level=2), end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
