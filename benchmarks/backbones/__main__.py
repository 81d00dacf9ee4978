"""Fetches the published weights of a backbone, and checks them.

python -m benchmarks.backbones download NAME --output FOLDER
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.backbones.published import KNOWN_WEIGHTS
from benchmarks.console import PrintableError, command_parser
from benchmarks.datasets import fetch_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 2 if the file cannot be fetched."""
    known = {weights.model: weights for weights in KNOWN_WEIGHTS}
    parser = command_parser("backbones", __doc__)
    parser.add_argument("command", choices=["download"])
    parser.add_argument("name", choices=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args(arguments)
    chosen = known[options.name]
    path = options.output / chosen.file
    try:
        fetch_file(chosen.url, path, chosen.checksum)
    except (PrintableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path} (use it with --model.trunk {chosen.model} --model.weights {path})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
