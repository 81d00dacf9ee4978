"""A paper's table with our results beside its numbers, or a paper's figure from our runs.

    python -m benchmarks.tables PAPER/TABLE [--runs FOLDER ...] [--format markdown] [--output FILE]
    python -m benchmarks.tables PAPER/FIGURE --figure FILE [--runs FOLDER ...]

Runs are found by their run.json below the folders. A row is the mean over seeds: its runs differ in no other
setting that can change a number. A run whose settings differ from the recipe's is *stale*: docs/tables.md.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import console, records, reporting, settings


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table or write it to a file; return 2 if the table or a folder does not exist."""
    parser = console.command_parser("tables", __doc__)
    parser.add_argument("table", metavar="PAPER/TABLE")
    parser.add_argument("--runs", nargs="+", type=Path, metavar="FOLDER", help="default: runs")
    parser.add_argument("--format", choices=("terminal", "markdown"))
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the terminal")
    drawn = "also draw the figure: png, svg or pdf, by the suffix"
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
                    f"--runs: {folder} is not a folder; expected one with runs below it"
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
