"""The papers' claims, tested: trains what is missing, paired over seeds, and writes the page and its figure.

    python -m benchmarks.claims [--only NAME ...] [--seeds 10] [--jobs 2 | --ray [ADDRESS]] [--page-only]
        [-- --any.setting value]

The claims, their rows and how they are tested stand in benchmarks/recipes/claims.yaml. The same command goes on
where it was stopped: what finished runs measured is kept beside the page, in docs/claims.json, and no longer needs
their folders. Each run has one thread unless OMP_NUM_THREADS says otherwise. Exit status: 1 if a run failed, 2 for
what cannot be started, 128 + signal if it was stopped.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Rooms import late: `--help` needs no torch.
from benchmarks import records, reporting, studies
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
    path = {"type": Path, "metavar": "PATH"}
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="train for these claims; default: all"
    )
    parser.add_argument("--seeds", type=at_least(2), default=10, metavar="N", help="0 to N - 1")
    studies.add_arguments(parser, "so many runs at once; default: 2, with --ray as many as fit")
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
    claims = reporting.read_claims(CLAIMS)
    names = [claim.name for claim in claims.claims]
    if unknown := set(options.only or []) - set(names):
        raise ConfigError(f"--only: no claim {min(unknown)}; there are {', '.join(names)}")
    jobs = {}
    for row in dict.fromkeys(row for claim in claims.claims for row in claim.rows()):
        recipe = f"{claims.recipes}/{row}"
        further = ["--report=false", *claims.settings.get(row, []), *settings]
        jobs[row] = studies.plan([recipe], range(options.seeds), options.runs, further)
    results = reporting.Results(options.output.with_suffix(".json"))
    chosen = [claim for claim in claims.claims if claim.name in (options.only or names)]
    rows = dict.fromkeys(row for claim in chosen for row in claim.rows())
    queue = [job for row in rows for job in jobs[row] if results.of(job) is None]
    stopped_by = None
    if queue and not options.page_only:
        launcher = studies.launcher(options, options.runs, jobs=2)
        stopped_by = studies.Sweep(queue, launcher).run()
        print(studies.summary(queue))
    finished = [job for of in jobs.values() for job in of if job.is_finished()]
    results.add([job for job in finished if results.of(job) is None and not job.changes()])
    if stopped_by is not None:
        return 128 + stopped_by
    found = {
        row: {job.seed: result for job in of if (result := results.of(job)) is not None}
        for row, of in jobs.items()
    }
    findings = reporting.judge(claims, found)
    if not findings:
        raise ConfigError(f"--runs: {options.runs} has no claim's rows finished at two seeds")
    figure = options.output.with_suffix(".png")
    reporting.save_forest(claims, findings, figure)
    page = reporting.claims_page(claims, findings, found, figure.name)
    records.replace_file(options.output, page.encode())
    print(page, end="")
    return int(studies.some_are_missing(queue))


if __name__ == "__main__":
    sys.exit(main())
