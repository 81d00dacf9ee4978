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


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text}")
    return text == "true"


SHOWN = 100
"""Lines on files that cannot be used."""

OPTIONS: dict[str, tuple[Any, str]] = {
    "root": (Path, "the folder of the images"),
    "download": (_flag, "true: let PML download the dataset if it is not there"),
    "test_classes": (
        _file_or_fraction,
        "a file that names the test classes, or their fraction; default: half, or as a table splits",
    ),
    "class_level": (_level, "the first N folders of a path, or the last, are the class"),
    "table": (Path, "CSV or Parquet; docs/datasets.md describes its columns"),
    "known_classes": (_flag, "true: allow test classes that are also trained on"),
    "camera": (str, "column; images of a query's class and camera leave its ranking"),
    "sequence": (str, "column; images of a query's sequence leave its ranking"),
}
"""The type and the help of each."""

USED = {
    **{name: ("root", *["download"] * bool(info.pml)) for name, info in IMAGE_DATASETS.items()},
    "folder": ("root", "test_classes", "class_level"),
    "table": ("root", "test_classes", "table", "known_classes", "camera", "sequence"),
}


def _listing(name: str, root: Path, **given: Any) -> Listing:
    """The images of a dataset, by the options that were given."""
    from benchmarks.datasets import folder, table

    if name == "folder":
        return folder.read(root, given.get("test_classes", 0.5), given.get("class_level"))
    if name == "table":
        return table.read(given.pop("table"), root, **given)
    return IMAGE_DATASETS[name].listing(root, fetch=given.get("download", False))


@signals_handled(leave)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; a usage error raises SystemExit, as in argparse."""
    parser = command_parser("datasets", __doc__)
    parser.add_argument("command", choices=["verify"])
    names = parser.add_subparsers(dest="name", required=True, prog=f"{parser.prog} verify")
    for name, used in USED.items():
        named = names.add_parser(name, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        for option in used:
            kind, told = OPTIONS[option]
            needed = option in ("root", "table")
            named.add_argument(
                f"--data.{option}", dest=option, type=kind, help=told, required=needed
            )
    given = vars(parser.parse_args(argv))
    from benchmarks.datasets.verify import verify  # imports torch, which --help does without

    info = IMAGE_DATASETS.get(given["name"])
    del given["command"]
    try:
        checks, broken = verify(_listing(**given), info.counts if info else None)
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
