"""Checks every file of a dataset, or of your own images, and reports all faults at once.

    python -m benchmarks.datasets verify NAME --data.root DIR
    python -m benchmarks.datasets verify folder --help
    python -m benchmarks.datasets verify table --help

Exit status: 0 if all is well, 1 if something is wrong with the data, 2 if the command cannot run, 130 after Ctrl-C.
"""

import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.console.arguments import at_least, columns, command_parser, decimal
from benchmarks.console.stopping import leave, signals_handled
from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.datasets.listing import DatasetError


def _file_or_fraction(text: str) -> Path | float:
    try:
        return decimal(text)
    except ArgumentTypeError:
        return Path(text)


def _level(text: str) -> int | str:
    return text if text == "last" else at_least(1)(text)


SHOWN = 100
"""Lines on files that cannot be used."""

CLASSES = (
    "a file that names the test classes, or their fraction; default: half, or as a table splits"
)
KNOWN = "allow test classes that are also trained on"
LEVEL = "the first N folders of a path, or the last, are the class; default: all"
CAMERA = "column; images of a query's class and camera leave its ranking"
SEQUENCE = "column; images of a query's sequence leave its ranking"
TABLE = "CSV or Parquet; docs/datasets.md describes its columns"
OPTIONS: dict[str, dict[str, Any]] = {
    "root": {"type": Path, "metavar": "DIR", "required": True},
    "test_classes": {"type": _file_or_fraction, "metavar": "FILE|FRACTION", "help": CLASSES},
    "class_level": {"type": _level, "metavar": "N|last", "help": LEVEL},
    "table": {"type": Path, "metavar": "FILE", "required": True, "help": TABLE},
    "known_classes": {"choices": ["true", "false"], "default": "false", "help": KNOWN},
    "camera": {"metavar": "COLUMN", "help": CAMERA},
    "sequence": {"metavar": "COLUMN", "help": SEQUENCE},
}
USED = {
    **dict.fromkeys(IMAGE_DATASETS, ("root",)),
    "folder": ("root", "test_classes", "class_level"),
    "table": ("root", "test_classes", "table", "known_classes", "camera", "sequence"),
}


@signals_handled(leave)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; a usage error raises SystemExit, as in argparse."""
    parser = command_parser("datasets", __doc__)
    parser.add_argument("command", choices=["verify"])
    names = parser.add_subparsers(dest="name", required=True, prog=f"{parser.prog} verify")
    for name, used in USED.items():
        named = names.add_parser(name, allow_abbrev=False)
        for option in used:
            named.add_argument(f"--data.{option}", dest=option, **OPTIONS[option])
    options = parser.parse_args(argv)
    from benchmarks.datasets import folder, table  # import torch, which --help does without
    from benchmarks.datasets.verify import verify

    root, published = options.root, None
    try:
        if options.name == "folder":
            chosen = 0.5 if options.test_classes is None else options.test_classes
            listing = folder.read(root, chosen, options.class_level)
        elif options.name == "table":
            known = options.known_classes == "true"
            groups = {"camera": options.camera, "sequence": options.sequence}
            listing = table.read(
                *(options.table, root, options.test_classes), known_classes=known, **groups
            )
        else:
            info = IMAGE_DATASETS[options.name]
            listing, published = info.read(root), info.counts
        checks, broken = verify(listing, published)
    except (DatasetError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(f"--data.{error}")
    print(columns([("check", "result", "detail"), *checks]))
    if broken:
        more = [f"and {len(broken) - SHOWN:,} more"] if len(broken) > SHOWN else []
        print("\nThese files cannot be used:", *broken[:SHOWN], *more, sep="\n")
    return int(any(result == "FAILED" for _, result, _ in checks))


if __name__ == "__main__":
    sys.exit(main())
