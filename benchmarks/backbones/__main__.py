"""Published weights of the backbones.

python -m benchmarks.backbones list
python -m benchmarks.backbones download NAME --output FOLDER
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.backbones.published import KNOWN_WEIGHTS
from benchmarks.console import PrintableError
from benchmarks.datasets import fetch_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 2 if the file cannot be fetched."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.backbones", description="Published weights of the backbones."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="list the files and where they come from")
    fetching = commands.add_parser("download", help="fetch a file and check it")
    known = {weights.model: weights for weights in KNOWN_WEIGHTS}
    fetching.add_argument("name", choices=known, metavar="NAME", help=", ".join(known))
    fetching.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.command == "list":
        show()
        return 0
    chosen = known[options.name]
    path = options.output / chosen.file
    try:
        fetch_file(chosen.url, path, chosen.checksum, chosen.size)
    except (PrintableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path} (use it with --model.trunk {chosen.model} --model.weights {path})")
    return 0


def show() -> None:
    for known in KNOWN_WEIGHTS:
        about = f"{known.checksum}, licence: {known.licence}"
        print(known.model, known.url, about, known.note, sep="\n    ", end="\n\n")


if __name__ == "__main__":
    sys.exit(main())
