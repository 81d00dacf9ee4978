"""Compares finished runs: a table on the terminal and one self-contained HTML file.

    python -m benchmarks.report RUN_FOLDER [RUN_FOLDER ...] [--output FILE.html] [--baseline LABEL] [--markdown]

Runs of one label are one method with several seeds. Their mean carries the half-width of its 95 %
Student-t interval; methods are compared by paired differences over the seeds that both have.
"""

import sys
from collections.abc import Sequence

from benchmarks.console.arguments import command_parser, refusing, say, user_path
from benchmarks.records.results import load_run


@refusing
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and the path of the HTML file; return 2 if the runs cannot be compared."""
    parser = command_parser("report", __doc__)
    parser.add_argument("folders", nargs="+", type=user_path, metavar="RUN_FOLDER")
    where = "default: report.html in the run folder, comparison.html in the first of several"
    parser.add_argument("--output", type=user_path, metavar="FILE.html", help=where)
    parser.add_argument("--baseline", metavar="LABEL", help="default: the first run's")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for pasting")
    options = parser.parse_args(arguments)

    from benchmarks.reporting.comparison import compare
    from benchmarks.reporting.report import write_html

    # Not beside the run folders: the next `runs/*` would match it, too.
    name = "report.html" if len(options.folders) == 1 else "comparison.html"
    output = options.output or options.folders[0] / name
    runs = [load_run(folder) for folder in options.folders]
    comparison = compare(runs, options.baseline)
    text = comparison.markdown() if options.markdown else comparison.terminal()
    output.parent.mkdir(parents=True, exist_ok=True)
    write_html(runs, comparison, output)
    say(f"{text}\nReport: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
