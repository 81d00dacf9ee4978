"""Compares finished runs: a table on the terminal and one self-contained HTML file.

    python -m benchmarks.report RUN_FOLDER [RUN_FOLDER ...] [--output FILE.html] [--baseline LABEL] [--markdown]

Runs of one label are one method with several seeds. Their mean carries the half-width of its 95 %
Student-t interval; methods are compared by the paired differences of the seeds both of them have.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import console, records, reporting


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the markdown and the path of the HTML file; 2 if the runs cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    where = "default: report.html in the run folder, comparison.html in the first of several"
    parser.add_argument("--output", type=Path, metavar="FILE.html", help=where)
    parser.add_argument("--baseline", metavar="LABEL", help="default: the first run's")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, to be pasted")
    options = parser.parse_args(arguments)
    # Not beside the run folders: `runs/*` would take it for one of them the next time.
    name = "report.html" if len(options.folders) == 1 else "comparison.html"
    output = options.output or options.folders[0] / name
    try:
        runs = [records.load_run(folder) for folder in options.folders]
        comparison = reporting.compare(runs, options.baseline)
        text = comparison.markdown() if options.markdown else comparison.terminal()
        reporting.write_html(runs, output, options.baseline)
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    console.say(f"{text}\nReport: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
