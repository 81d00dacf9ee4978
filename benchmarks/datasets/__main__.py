"""Checks every file of a dataset, or of your own images, and reports all faults at once.

    python -m benchmarks.datasets verify NAME --data.root DIR
    python -m benchmarks.datasets verify folder --data.root DIR --data.test_classes 0.5
    python -m benchmarks.datasets verify table --data.root DIR --data.table FILE.csv

Exit status: 0 if all is well, 1 if a check fails, 2 if the lists cannot be read, 130 after Ctrl-C.
"""

import sys
from argparse import SUPPRESS
from collections.abc import Sequence

from benchmarks.console.arguments import columns, command_parser
from benchmarks.console.stopping import leave, signals_handled
from benchmarks.datasets.catalogue import IMAGE_DATASETS, SETTINGS
from benchmarks.settings.command import parse
from benchmarks.settings.errors import ConfigError

SHOWN = 100
"""Lines on files that cannot be used."""


@signals_handled(leave)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; a usage error raises SystemExit, as in argparse."""
    parser = command_parser("datasets", __doc__)
    parser.add_argument("command", choices=["verify"])
    parser.add_argument("name", choices=[*IMAGE_DATASETS, "folder", "table"])
    group = parser.add_argument_group("settings", "as benchmarks/run.py --help describes them")
    for name in (*SETTINGS, "download"):
        needed = name == "root"
        group.add_argument(f"--data.{name}", metavar="VALUE", default=SUPPRESS, required=needed)
    options = vars(parser.parse_args(argv))
    words = [f"--{name}={value}" for name, value in options.items() if name.startswith("data.")]
    words += [f"--data.dataset={options['name']}", "--evaluation.every=0"]  # nothing is trained
    from benchmarks.building.images import list_images, settings_named  # imports torch
    from benchmarks.datasets.verify import verify

    try:
        data = parse(words).experiment.data
        info = IMAGE_DATASETS.get(data.dataset)
        with settings_named(data):
            fetch = bool(data.download)  # also what is not as published
            listing = info.listing(data.root, fetch=fetch) if info else list_images(data, 0.5)
            checks, broken = verify(listing, info.counts if info else None)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(columns([("check", "result", "detail"), *checks]))
    if broken:
        more = [f"and {len(broken) - SHOWN:,} more"] if len(broken) > SHOWN else []
        print("\nThese files cannot be used:", *broken[:SHOWN], *more, sep="\n")
    return int(any(result == "FAILED" for _, result, _ in checks))


if __name__ == "__main__":
    sys.exit(main())
