"""Runs several recipes with several seeds, and goes on when one of them fails.

    python -m benchmarks.sweep RECIPE ... [--seeds N | --seeds A B C] [--runs DIR] [--jobs N] [--ray [ADDRESS]]
        [--launcher "accelerate launch --num_processes 8"] [--redo-stale] [-- --any.setting value]

A RECIPE is an entry (PAPER/TABLE/ROW), a table (PAPER/TABLE) or a quoted pattern ("horde/table*/*"); a training
that several of them name runs once. Settings behind -- go to every run. Runs lie in DIR/RECIPE-seedN, their
settings and what they print in DIR/logs/RECIPE-seedN.yaml and .log. What is finished is skipped and what was
interrupted goes on, so that the same command can be given again. A *stale* run, one of other settings that can
change its result, is an error unless --redo-stale moves it to NAME.stale-N and runs it again. With --ray, runs go
to the devices of this machine or to the nodes of a cluster: docs/cluster.md.

Exit status: 0 if all runs are finished, 1 if one is not (failed, stale, or in use by another process), 2 for a
sweep that cannot be started, 130 or 143 after Ctrl-C or SIGTERM, once the runs have saved.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.console.arguments import (
    at_least,
    command_parser,
    refusing,
    split_settings,
    user_folder,
)
from benchmarks.studies.jobs import plan
from benchmarks.studies.launching import add_arguments, make_launcher


@refusing
def main(argv: Sequence[str] | None = None) -> int:
    argv, settings = split_settings(sys.argv[1:] if argv is None else argv)
    parser = command_parser("sweep", __doc__)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    which = "one number: so many seeds, from 0 on; several: these; default: seed 0"
    parser.add_argument(
        "--seeds", nargs="+", type=at_least(0), default=[1], metavar="N", help=which
    )
    parser.add_argument("--runs", type=user_folder, default=Path("runs"), metavar="DIR")
    add_arguments(parser, "so many runs at once; default: 1, with --ray as many as fit")
    parser.add_argument("--redo-stale", action="store_true", help="move stale runs aside")
    options = parser.parse_args(argv)

    from benchmarks.studies.queue import Queue

    given = options.seeds
    seeds = list(range(given[0]) if len(given) == 1 else dict.fromkeys(given))
    if not seeds:
        parser.error("argument --seeds: expected at least one seed, got 0 of them")
    jobs = plan(options.recipes, seeds, options.runs, settings)
    launcher = make_launcher(options, options.runs)
    queue = Queue(lambda: jobs, len(jobs), launcher, redo_stale=options.redo_stale)
    options.runs.mkdir(parents=True, exist_ok=True)
    stopped = queue.run()
    found = Counter(job.status for job in jobs)
    print(", ".join(f"{count} {status}" for status, count in found.items()))
    return stopped or int(any(job.why is not None for job in jobs))


if __name__ == "__main__":
    sys.exit(main())
