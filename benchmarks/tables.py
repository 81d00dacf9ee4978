"""A paper's table with ours beside it, or a paper's figure of ours.

    python -m benchmarks.tables PAPER/TABLE [--runs FOLDER ...] [--format markdown|latex] [--output FILE]
    python -m benchmarks.tables PAPER/FIGURE --figure FILE [--runs FOLDER ...]

Runs are found by their run.json below the folders. One row is the mean over the seeds of runs that differ in
nothing else that can move a number; a run of other settings than the recipe's is *stale*: docs/tables.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import console, records, reporting, settings


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table or writes it to a file; 2 if there is no such table, folder or place for the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", metavar="PAPER/TABLE")
    parser.add_argument("--runs", nargs="+", type=Path, metavar="FOLDER", help="default: runs")
    parser.add_argument("--format", choices=("terminal", "markdown", "latex"))
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the terminal")
    drawn = "draw the figure as well: png, svg, pdf, by the suffix"
    parser.add_argument("--figure", type=Path, metavar="FILE", help=drawn)
    parser.add_argument(
        "--trust", action="append", default=[], metavar="MODULE", help=settings.TRUST
    )
    options = parser.parse_args(argv)
    settings.trust(options.trust)
    written = ""
    try:
        table = settings.read_table(options.table)
        for folder in options.runs or []:
            if not folder.is_dir():
                raise settings.ConfigError(
                    f"--runs: {folder} is no folder; expected one with runs below it"
                )
        folders = options.runs or [reporting.RUNS]
        if options.figure is not None:
            written = f"--figure: {options.figure}"
            reporting.save_figure(table, folders, options.figure)
        written = f"--output: {options.output}"
        page = reporting.paper_page(table, folders)
        text = getattr(page, options.format or ("markdown" if options.output else "terminal"))()
        if options.output is None:
            console.say(text, end="")
        else:
            records.replace_file(options.output, text.encode())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {written}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
