"""Fetches, checks and unpacks a dataset, or checks every file of one.

    python -m benchmarks.datasets download NAME --data.root DIR
    python -m benchmarks.datasets verify NAME --data.root DIR

A broken download starts again: if that takes too long, fetch the archive into DIR with a browser or `curl -L -C -`,
and run this again. Exit status: 0 if all is well, 1 if something is wrong with the data, 2 if the command cannot
run, 130 after Ctrl-C.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.console import PrintableError, at_least, columns, command_parser
from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.datasets.fetch import fetch_file, unpack
from benchmarks.datasets.listing import DatasetError, DatasetInfo, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; a usage error raises SystemExit, as in argparse."""
    parser = command_parser("datasets", __doc__)
    parser.add_argument("command", choices=["download", "verify"])
    parser.add_argument("name", choices=[*IMAGE_DATASETS, "folder"])
    parser.add_argument("--data.root", dest="root", type=Path, metavar="DIR", required=True)
    parser.add_argument(
        "--data.test_classes",
        dest="test_classes",
        type=_file_or_fraction,
        metavar="FILE|FRACTION",
        help="for folder: a file that names the test classes, or their fraction; default: half",
    )
    parser.add_argument(
        "--data.class_level",
        dest="class_level",
        type=at_least(1),
        metavar="N",
        help="for folder: the first N folders of a path are the class; default: all, the folder with the images",
    )
    options = parser.parse_args(argv)
    info = IMAGE_DATASETS.get(options.name)  # None: a folder of one's own
    for name in ("test_classes", "class_level"):
        if info and getattr(options, name) is not None:
            parser.error(
                f"--data.{name}: {info.name} has its published classes and split; leave it out"
            )
    try:
        if options.command == "verify":
            return check(options, info)
        if info is None:
            parser.error("folder: is your own, and cannot be downloaded; name a published dataset")
        return download(info, options.root)
    except (PrintableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(f"--data.{error}")
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 128 + signal.SIGINT


def _file_or_fraction(text: str) -> Path | float:
    try:
        return float(text)
    except ValueError:
        return Path(text)


def download(info: DatasetInfo, root: Path) -> int:
    try:
        print(_summary(info, root))
    except DatasetError as error:
        if not info.url:
            print(f"{error}\n\n{info.by_hand}", file=sys.stderr)
            return 2
        archive = root / info.archive
        folder = archive.with_suffix("")
        if folder.exists():
            again = f"{error}; or move {folder} away, to fetch the dataset anew"
            raise DatasetError(again) from error
        fetch_file(info.url, archive, f"sha256:{info.sha256}")
        print(f"unpacking {archive}", file=sys.stderr)
        unpack(archive, folder)
        print(_summary(info, root))
    return 0


def _summary(info: DatasetInfo, root: Path) -> str:
    """Report of a dataset that is already there and complete."""
    listing = load(info, root)
    return f"{info.name}: all {len(listing):,} images are in {listing.root}, fingerprint {listing.fingerprint}"


def check(options: argparse.Namespace, info: DatasetInfo | None) -> int:
    from benchmarks.datasets import folder
    from benchmarks.datasets.verify import verify

    if info is None:
        testing = 0.5 if options.test_classes is None else options.test_classes
        checks, broken = verify(folder.read(options.root, testing, options.class_level))
    else:
        checks, broken = verify(info.read(options.root), info.counts)
    print(columns([("check", "result", "detail"), *checks]))
    if broken:
        print("\nThese files cannot be used:", *broken, sep="\n")
    if any(result == "FAILED" for _, result, _ in checks):
        return 1
    if info is None:
        print(f"\nNext: python -m benchmarks.study photographs/own --data.root {options.root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
