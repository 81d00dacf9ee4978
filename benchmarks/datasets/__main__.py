"""Lists, fetches and checks the datasets.

    python -m benchmarks.datasets list
    python -m benchmarks.datasets download NAME --data.root DIR
    python -m benchmarks.datasets verify NAME --data.root DIR [--fast] [--report FILE]

Exit status: 0 if all is well, 1 if something is wrong with the data, 2 if the command cannot run, 130 after
Ctrl-C.
"""

import argparse
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.console import HelpFormatter, at_least, columns
from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.datasets.fetch import FetchError, fetch_file, unpack
from benchmarks.datasets.listing import DatasetError, DatasetInfo, counts_text, load

MOST_THREADS = 256
SHOWN = 20  # broken files on the screen
RESULTS = {True: "ok", False: "FAILED", None: ""}
GLYPHS = """glyphs: characters in twelve faces
  images    train, test about 13,000 / 1,080 each (images / classes)
  download  none: drawn from the fonts that matplotlib brings
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; a usage error raises SystemExit, as in argparse."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.command == "list":
            return show()
        if options.command == "download":
            return download(IMAGE_DATASETS[options.name], options.root, options.keep_archive)
        return check(parser, options)
    except (DatasetError, FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.datasets",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the datasets")
    fetching = commands.add_parser(
        "download",
        help="fetch and unpack a dataset",
        description="Fetch, check and unpack a dataset. A broken download starts again: if that takes too "
        "long, fetch the archive into DIR with a browser or `curl -L -C -`, and run this again.",
    )
    fetching.add_argument("name", choices=IMAGE_DATASETS)
    fetching.add_argument(
        "--keep_archive",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the archive after unpacking",
    )
    checking = commands.add_parser("verify", help="check every file of a dataset")
    checking.add_argument("name", choices=[*IMAGE_DATASETS, "folder"])
    checking.add_argument(
        "--data.test_classes",
        dest="test_classes",
        type=_file_or_fraction,
        metavar="FILE|FRACTION",
        help="for folder: a file that names the test classes, or their fraction; default: half",
    )
    checking.add_argument(
        "--data.class_level",
        dest="class_level",
        type=at_least(1),
        metavar="N",
        help="for folder: the first N folders of a path are the class; default: all, the folder with the images",
    )
    checking.add_argument(
        "--num_workers",
        type=at_least(1, MOST_THREADS),
        metavar="N",
        help=f"threads, at most {MOST_THREADS}; default: one per core that this process may use",
    )
    checking.add_argument(
        "--fast", action="store_true", help="read only the heads of the files, without decoding"
    )
    checking.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help=f"new file for the list of all broken files; {SHOWN} are printed",
    )
    for command in (fetching, checking):
        command.add_argument("--data.root", dest="root", type=Path, metavar="DIR", required=True)
    return parser


def _file_or_fraction(text: str) -> Path | float:
    try:
        return float(text)
    except ValueError:
        return Path(text)


def show() -> int:
    print(GLYPHS)
    for info in IMAGE_DATASETS.values():
        rows = [
            ("images", f"{counts_text(info.counts)} (images / classes)"),
            ("download", f"{info.archive.size / 1e9:.2f} GB" if info.archive else "by hand"),
            *(("layout", layout) for layout in info.layouts),
            ("licence", info.licence),
            ("citation", info.citation),
        ]
        print(f"{info.name}: {info.title}")
        for name, text in rows:
            print(
                textwrap.fill(
                    f"  {name:<10}{text}", 80, subsequent_indent=12 * " ", break_on_hyphens=False
                )
            )
        print()
    return 0


def download(info: DatasetInfo, root: Path, keep_archive: bool) -> int:
    try:
        print(_summary(info, root))
        return 0
    except DatasetError as error:
        archive = info.archive
        if archive is None:
            print(f"{error}\n\n{info.by_hand}", file=sys.stderr)
            return 2
        folder, path = root / Path(archive.name).stem, root / archive.name
        if folder.exists():
            again = f"{error}; or move {folder} away, to fetch the dataset anew"
            raise DatasetError(again) from error
    fetch_file(archive.url, path, f"sha256:{archive.sha256}", archive.size)
    print(f"unpacking {path}", file=sys.stderr)
    unpack(path, folder)
    if not keep_archive:
        path.unlink()
    print(_summary(info, root))
    return 0


def _summary(info: DatasetInfo, root: Path) -> str:
    """Report of a dataset that is already there and complete."""
    listing = load(info, root)
    return f"{info.name}: all {len(listing):,} images are in {listing.root}, fingerprint {listing.fingerprint}"


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.test_classes is not None and options.name != "folder":
        parser.error(f"--data.test_classes: {options.name} has its published split; leave it out")
    if options.class_level is not None and options.name != "folder":
        parser.error(f"--data.class_level: {options.name} has its published classes; leave it out")
    if not options.root.is_dir():
        parser.error(f"--data.root: {options.root} is not a folder")
    report: Path | None = options.report
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        parser.error(f"--report: {report} cannot be a file; name one in an existing folder")
    if report is not None and (report.exists() or report.is_symlink()):
        parser.error(f"--report: {report} is there already; name a new file, or remove it")
    if report is not None and report.resolve().is_relative_to(options.root.resolve()):
        parser.error(f"--report: {report} would lie among the images; name a file elsewhere")
    from benchmarks.datasets import folder
    from benchmarks.datasets.verify import verify

    counts = None
    if options.name != "folder":
        listing, counts = (info := IMAGE_DATASETS[options.name]).read(options.root), info.counts
    else:
        try:
            testing = 0.5 if options.test_classes is None else options.test_classes
            listing = folder.read(options.root, testing, options.class_level)
        except DatasetError:
            raise
        except ValueError as error:
            parser.error(f"--data.{error}")
    checks, broken = verify(listing, counts, num_workers=options.num_workers, fast=options.fast)
    rows = [(name, RESULTS[passed], detail) for name, passed, detail in checks]
    print(columns([("check", "result", "detail"), *rows]))
    if broken:
        print("\nThese files cannot be used:", *broken[:SHOWN], sep="\n")
    if report is not None:
        with report.open("x", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in broken)
        print(f"\n{len(broken):,} broken files are listed in {report}")
    elif len(broken) > SHOWN:
        print(f"... and {len(broken) - SHOWN:,} more; --report FILE lists all")
    return 1 if any(check.passed is False for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
