"""Writes a run's network as files for use without this package: for timm, with a model card.

    python -m benchmarks.export RUN_FOLDER --output FOLDER [--thresholds RUN_FOLDER] [--trust MODULE]

Only the network of the last checkpoint is exported, without loss or regularizer; an attention is folded into the
embedding layer: docs/export.md.
"""

import sys
from collections.abc import Sequence

from benchmarks.console.arguments import command_parser, refusing, user_path
from benchmarks.settings.trusted import TRUST, trust


@refusing
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the folder with its error, and return the exit status: 2 if nothing was written."""
    parser = command_parser("export", __doc__)
    parser.add_argument("run", type=user_path, metavar="RUN_FOLDER")
    parser.add_argument(
        "--output", type=user_path, required=True, metavar="FOLDER", help="new or empty"
    )
    parser.add_argument(
        "--thresholds",
        type=user_path,
        metavar="RUN_FOLDER",
        help="a tested run of the same method, for a network of all classes; default: the run's own",
    )
    parser.add_argument("--trust", action="append", default=[], metavar="MODULE", help=TRUST)
    options = parser.parse_args(arguments)
    from benchmarks.export import writing  # imports torch, which --help does without

    trust(options.trust)
    lines = writing.export(options.run, options.output, options.thresholds)
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
