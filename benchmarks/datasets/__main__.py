"""Fetches and unpacks a dataset, or checks every file of one.

    python -m benchmarks.datasets download NAME --data.root DIR
    python -m benchmarks.datasets verify NAME --data.root DIR

Exit status: 0 if all is well, 1 if something is wrong with the data, 2 if the command cannot run, 130 after Ctrl-C.
"""

import argparse
import shutil
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.console import PrintableError, at_least, columns, command_parser
from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.datasets.fetch import fetch_file
from benchmarks.datasets.listing import DatasetError, DatasetInfo, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; a usage error raises SystemExit, as in argparse."""
    parser = command_parser("datasets", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    root = argparse.ArgumentParser(add_help=False)
    root.add_argument("--data.root", dest="root", type=Path, metavar="DIR", required=True)
    fetched = commands.add_parser("download", parents=[root], allow_abbrev=False)
    linked = [name for name, info in IMAGE_DATASETS.items() if info.url]
    fetched.add_argument("name", choices=linked, help="fetch others by hand: docs/datasets.md")
    names = commands.add_parser("verify").add_subparsers(dest="name", required=True)
    add = partial(names.add_parser, parents=[root], allow_abbrev=False)
    for name in IMAGE_DATASETS:
        add(name)
    own = add("folder", help="of your own images")
    own.add_argument(
        "--data.test_classes",
        dest="test_classes",
        type=_file_or_fraction,
        metavar="FILE|FRACTION",
        default=0.5,
        help="a file that names the test classes, or their fraction; default: half",
    )
    own.add_argument(
        "--data.class_level",
        dest="class_level",
        type=at_least(1),
        metavar="N",
        help="the first N folders of a path are the class; default: all, the folder with the images",
    )
    options = parser.parse_args(argv)
    try:
        if options.command == "verify":
            return check(options)
        return download(IMAGE_DATASETS[options.name], options.root)
    except (PrintableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(f"--data.{error}")
    except KeyboardInterrupt:  # pooch has deleted what it had fetched
        print("\nstopped", file=sys.stderr)
        return 128 + signal.SIGINT


def _file_or_fraction(text: str) -> Path | float:
    try:
        return float(text)
    except ValueError:
        return Path(text)


def download(info: DatasetInfo, root: Path) -> int:
    archive = root / info.archive
    folder = archive.with_suffix("")
    try:
        print(_summary(info, root))
    except DatasetError as error:
        if folder.exists():
            again = f"{error}; or move {folder} away, to fetch the dataset anew"
            raise DatasetError(again) from error
        fetch_file(info.url, archive, f"sha256:{info.sha256}")
        print(f"unpacking {archive}", file=sys.stderr)
        shutil.unpack_archive(archive, folder, filter=None if archive.suffix == ".zip" else "data")
        print(_summary(info, root))
    return 0


def _summary(info: DatasetInfo, root: Path) -> str:
    """Report of a dataset that is there and complete."""
    listing = load(info, root)
    return f"{info.name}: all {len(listing):,} images are in {listing.root}, fingerprint {listing.fingerprint}"


def check(options: argparse.Namespace) -> int:
    from benchmarks.datasets import folder
    from benchmarks.datasets.verify import verify

    if options.name == "folder":
        listing = folder.read(options.root, options.test_classes, options.class_level)
        checks, broken = verify(listing)
    else:
        info = IMAGE_DATASETS[options.name]
        checks, broken = verify(info.read(options.root), info.counts)
    print(columns([("check", "result", "detail"), *checks]))
    if broken:
        print("\nThese files cannot be used:", *broken, sep="\n")
    return int(any(result == "FAILED" for _, result, _ in checks))


if __name__ == "__main__":
    sys.exit(main())
