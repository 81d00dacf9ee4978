"""Checks every file of a dataset, or of your own images, and reports all faults at once.

    python -m benchmarks.datasets verify NAME --data.root DIR
    python -m benchmarks.datasets verify folder --help
    python -m benchmarks.datasets verify table --help

Exit status: 0 if all is well, 1 if a check fails, 2 if the lists cannot be read, 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.console.arguments import at_least, columns, command_parser, decimal
from benchmarks.console.stopping import leave, signals_handled
from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.datasets.listing import DatasetError, Listing


def _file_or_fraction(text: str) -> Path | float:
    try:
        return decimal(text)
    except argparse.ArgumentTypeError:
        return Path(text)


def _level(text: str) -> int | str:
    return text if text == "last" else at_least(1)(text)


SHOWN = 100
"""Lines on files that cannot be used."""

FLAG = {"choices": ["true", "false"], "default": "false"}
CLASSES = (
    "a file that names the test classes, or their fraction; default: half, or as a table splits"
)
OPTIONS: dict[str, dict[str, Any]] = {
    "root": {"type": Path, "metavar": "DIR", "required": True},
    "download": {**FLAG, "help": "let PML download the dataset if it is not there"},
    "test_classes": {"type": _file_or_fraction, "metavar": "FILE|FRACTION", "help": CLASSES},
    "class_level": {
        "type": _level,
        "metavar": "N|last",
        "help": "the first N folders of a path, or the last, are the class; default: all",
    },
    "table": {
        "type": Path,
        "metavar": "FILE",
        "required": True,
        "help": "CSV or Parquet; docs/datasets.md describes its columns",
    },
    "known_classes": {**FLAG, "help": "allow test classes that are also trained on"},
    "camera": {
        "metavar": "COLUMN",
        "help": "images of a query's class and camera leave its ranking",
    },
    "sequence": {"metavar": "COLUMN", "help": "images of a query's sequence leave its ranking"},
}
USED = {
    **{name: ("root", *["download"] * bool(info.pml)) for name, info in IMAGE_DATASETS.items()},
    "folder": ("root", "test_classes", "class_level"),
    "table": ("root", "test_classes", "table", "known_classes", "camera", "sequence"),
}


def _listing(options: argparse.Namespace) -> Listing:
    from benchmarks.datasets import folder, table

    given = {name: getattr(options, name) for name in USED[options.name]}
    flags = {name: given[name] == "true" for name in ("download", "known_classes") if name in given}
    if options.name == "folder":
        fraction = 0.5 if options.test_classes is None else options.test_classes
        return folder.read(options.root, fraction, options.class_level)
    if options.name == "table":
        file = given.pop("table")
        return table.read(file, **given | flags)
    return IMAGE_DATASETS[options.name].listing(options.root, fetch=flags.get("download", False))


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
    from benchmarks.datasets.verify import verify  # imports torch, which --help does without

    info = IMAGE_DATASETS.get(options.name)
    published = info.counts if info else None
    try:
        checks, broken = verify(_listing(options), published)
    except (OSError, ValueError) as error:
        setting = "" if isinstance(error, (DatasetError, OSError)) else "--data."
        print(f"error: {setting}{error}", file=sys.stderr)
        return 2
    print(columns([("check", "result", "detail"), *checks]))
    if broken:
        more = [f"and {len(broken) - SHOWN:,} more"] if len(broken) > SHOWN else []
        print("\nThese files cannot be used:", *broken[:SHOWN], *more, sep="\n")
    return int(any(result == "FAILED" for _, result, _ in checks))


if __name__ == "__main__":
    sys.exit(main())
