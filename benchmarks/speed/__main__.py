"""Measures speed and memory, each as a ratio to a named alternative in the same run.

python -m benchmarks.speed [CASE ...] [--tiny] [--output docs/speed.md]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.console import command_parser
from benchmarks.records import replace_file
from benchmarks.speed.cases import CASES
from benchmarks.speed.measuring import current_device, origin

INTRODUCTION = """# Speed and memory

{origin}
`make speed` measures all cases; `--help` lists them.

Rows are measured alternately, for the number of rounds given. The time of a row is the median of its ratios to
the first row's time in the same round. The next column has the smallest and the largest ratio, or the seconds of
the first row. Memory is the peak of a call, without its inputs and its results.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("speed", __doc__)
    names = ", ".join(CASES)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {names}; default: all")
    text = "use tiny sizes, only to show that it runs"
    parser.add_argument("--tiny", action="store_true", help=text)
    parser.add_argument("--output", type=Path, metavar="PAGE", help="default: print only")
    options = parser.parse_args(argv)
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"CASE: expected some of {names}, got {min(unknown)!r}")

    device = current_device()
    command = "python -m benchmarks.speed CASE" + " --tiny" * options.tiny
    text = INTRODUCTION.format(origin=origin(command, device))
    print(text)
    for name in options.cases or CASES:
        torch.manual_seed(0)
        measured = CASES[name](options.tiny, device).section(options.tiny, level=2)
        print(measured, flush=True)
        text += "\n" + measured
    if options.output is not None:
        replace_file(options.output, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
