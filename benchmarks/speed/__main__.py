"""Measures speed and memory, each as a ratio to a named alternative in the same run.

python -m benchmarks.speed [CASE ...] [--tiny] [--output docs/speed.md]
"""

import sys
from collections.abc import Sequence

import torch

from benchmarks.records import replace_file
from benchmarks.speed import cases
from benchmarks.speed.measuring import current_device, origin, page_parser, section

CASES = (
    *("horde_moments", "horde_sketch_stored", "horde_sketch_recomputed"),
    *("horde_resnet50", "horde_googlenet", "joint_similarity"),
    *("energy_confusion", "vem", "retrieval", "query_gallery"),
    *("parts_resnet50", "parts_googlenet"),
)

INTRODUCTION = """# Speed and memory

{origin}
`make speed` measures all cases; `--help` lists them.

Rows are measured alternately, for the number of rounds given. The time of a row is the median of its ratios to
the first row's time in the same round. The next column has the smallest and the largest ratio, or the seconds of
the first row. Memory is the peak of a call, without its inputs and its results.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = page_parser("benchmarks.speed", __doc__)
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"one of {', '.join(CASES)}; default: all"
    )
    options = parser.parse_args(argv)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"CASE: expected some of {', '.join(CASES)}, got {min(unknown)!r}")

    device = current_device()
    command = "python -m benchmarks.speed CASE" + " --tiny" * options.tiny
    text = INTRODUCTION.format(origin=origin(command, device))
    print(text)
    for name in options.cases or CASES:
        torch.manual_seed(0)
        measured = section(getattr(cases, name)(options.tiny, device), options.tiny, level=2)
        print(measured, flush=True)
        text += "\n" + measured
    if options.output is not None:
        replace_file(options.output, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
