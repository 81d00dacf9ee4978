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

from benchmarks.console import at_least, columns, command_parser, decimal, leave, signals_handled
from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.datasets.listing import DatasetError


@signals_handled(leave)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; a usage error raises SystemExit, as in argparse."""
    parser = command_parser("datasets", __doc__)
    parser.add_argument("command", choices=["verify"])
    names = parser.add_subparsers(dest="name", required=True, prog=f"{parser.prog} verify")
    for name in (*IMAGE_DATASETS, "folder", "table"):
        named = names.add_parser(name, allow_abbrev=False)
        named.add_argument("--data.root", dest="root", type=Path, metavar="DIR", required=True)
        if name in ("folder", "table"):
            named.add_argument(
                "--data.test_classes",
                dest="test_classes",
                type=_file_or_fraction,
                metavar="FILE|FRACTION",
                help="a file that names the test classes, or their fraction; default: half"
                + ", or as the table splits" * (name == "table"),
            )
        if name == "table":
            named.add_argument(
                "--data.table",
                dest="table",
                type=Path,
                metavar="FILE",
                required=True,
                help="CSV or Parquet; docs/datasets.md describes its columns",
            )
            named.add_argument(
                "--data.known_classes",
                dest="known_classes",
                choices=["true", "false"],
                default="false",
                help="allow test classes that are also trained on",
            )
        if name == "folder":
            named.add_argument(
                "--data.class_level",
                dest="class_level",
                type=lambda text: text if text == "last" else at_least(1)(text),
                metavar="N|last",
                help="the first N folders of a path, or the last, are the class; default: all",
            )
    options = parser.parse_args(argv)
    from benchmarks.datasets import folder, table  # import torch, which --help does without
    from benchmarks.datasets.verify import verify

    try:
        published = None
        if options.name == "folder":
            chosen = 0.5 if options.test_classes is None else options.test_classes
            listing = folder.read(options.root, chosen, options.class_level)
        elif options.name == "table":
            known = options.known_classes == "true"
            listing = table.read(
                options.table, options.root, options.test_classes, known_classes=known
            )
        else:
            info = IMAGE_DATASETS[options.name]
            listing, published = info.read(options.root), info.counts
        checks, broken = verify(listing, published)
    except (DatasetError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(f"--data.{error}")
    print(columns([("check", "result", "detail"), *checks]))
    if broken:
        print("\nThese files cannot be used:", *broken, sep="\n")
    return int(any(result == "FAILED" for _, result, _ in checks))


def _file_or_fraction(text: str) -> Path | float:
    try:
        return decimal(text)
    except ArgumentTypeError:
        return Path(text)


if __name__ == "__main__":
    sys.exit(main())
