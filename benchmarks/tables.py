"""A paper's table with our results beside its numbers.

    python -m benchmarks.tables PAPER/TABLE[/ROWS] [--runs FOLDER ...] [--markdown]

ROWS is a pattern, such as "cub_*"; without it, all rows are printed, with the numbers that the paper quotes. Runs
are found by their run.json below the folders. A row is the mean over seeds. A run whose settings differ from the
recipe's is left out and named: docs/benchmarks.md.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.console.arguments import command_parser, refusing, say, user_path
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.recipe_files import read_table
from benchmarks.settings.trusted import TRUST, trust


@refusing
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 2 if the table or a folder does not exist."""
    parser = command_parser("tables", __doc__)
    parser.add_argument("table", metavar="PAPER/TABLE[/ROWS]")
    parser.add_argument("--runs", nargs="+", type=user_path, metavar="FOLDER", help="default: runs")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for pasting")
    parser.add_argument("--trust", action="append", default=[], metavar="MODULE", help=TRUST)
    options = parser.parse_args(argv)

    from benchmarks.reporting.paper_table import paper_page

    trust(options.trust)
    table = read_table(options.table)
    for folder in options.runs or []:
        if not folder.is_dir():
            raise ConfigError(f"--runs: {folder} is not a folder; expected one with runs below it")
    page = paper_page(table, options.runs or [Path("runs")])
    say(page.markdown() if options.markdown else page.terminal(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
