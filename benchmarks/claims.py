"""The papers' claims, tested: trains what is missing, paired over seeds, and writes the page and its figure.

    python -m benchmarks.claims [--only NAME ...] [--seeds 10] [--jobs 2] [--page-only] [-- --any.setting value]

The claims, their rows and how they are tested stand in benchmarks/recipes/claims.yaml. The same command goes on
where it was stopped; each run has one thread unless OMP_NUM_THREADS says otherwise. Exit status: 1 if a run failed,
2 for what cannot be started, 128 + signal if it was stopped.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.console import at_least, split_settings
from benchmarks.settings import ConfigError

CLAIMS = Path(__file__).parent / "recipes" / "claims.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    argv, settings = split_settings(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    number, path = at_least(1), {"type": Path, "metavar": "PATH"}
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="train for these claims; default: all"
    )
    parser.add_argument("--seeds", type=at_least(2), default=10, metavar="N", help="0 to N - 1")
    parser.add_argument("--jobs", type=number, default=2, metavar="N", help="so many runs at once")
    parser.add_argument("--runs", default=Path("runs/claims"), **path)
    parser.add_argument("--output", default=Path("docs/claims.md"), **path)
    parser.add_argument("--page-only", action="store_true", help="train nothing")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        return _run(options, settings)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    from benchmarks.records import replace_file
    from benchmarks.reporting import claims_page, judge, read_claims, save_forest
    from benchmarks.studies import Sweep, plan, summary

    claims = read_claims(CLAIMS)
    names = [claim.name for claim in claims.claims]
    if unknown := set(options.only or []) - set(names):
        raise ConfigError(f"--only: no claim {min(unknown)}; there are {', '.join(names)}")
    jobs = {}
    for row in dict.fromkeys(row for claim in claims.claims for row in claim.rows()):
        further = ["--report=false", *claims.settings.get(row, []), *settings]
        jobs[row] = plan([f"{claims.recipes}/{row}"], range(options.seeds), options.runs, further)
    chosen = [claim for claim in claims.claims if claim.name in (options.only or names)]
    rows = dict.fromkeys(row for claim in chosen for row in claim.rows())
    queue = [] if options.page_only else [job for row in rows for job in jobs[row]]
    if queue:
        devices = [None] * options.jobs
        sweep = Sweep(queue, launcher=[sys.executable], devices=devices, redo_stale=False)
        stopped_by = sweep.run()
        print(summary(queue))
        if stopped_by is not None:
            return 128 + stopped_by
    finished = {
        row: {job.seed: job.folder for job in of if job.is_finished() and not job.changes()}
        for row, of in jobs.items()
    }
    findings, runs = judge(claims, finished)
    if not findings:
        raise ConfigError(f"--runs: {options.runs} has no claim's rows finished at two seeds")
    figure = options.output.with_suffix(".png")
    save_forest(claims, findings, figure)
    page = claims_page(claims, findings, runs, figure.name)
    replace_file(options.output, page.encode())
    print(page, end="")
    return int(any(job.status in ("failed", "stale") for job in queue))


if __name__ == "__main__":
    sys.exit(main())
