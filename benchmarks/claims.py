"""Tests the papers' claims: trains the missing runs, compares them seed by seed, writes the page and its figure.

    python -m benchmarks.claims [--seeds 10] [--jobs 2 | --ray [ADDRESS]] [--page-only]
        [-- --any.setting value]

benchmarks/recipes/claims.yaml lists the claims, their rows, and how each is tested. The study first chooses
settings on validation classes, then tests the chosen settings once. After a stop, the same command continues:
docs/claims.json, beside the page, keeps the results of finished runs, whose folders are then no longer needed; a
folder of settings that are not chosen any more is renamed NAME.stale-N.
Each run has one thread unless OMP_NUM_THREADS says otherwise. Exit status: 1 if a run failed, 2 if the command
cannot start, 128 + signal if it was stopped.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

# Rooms import late: `--help` needs no torch.
from benchmarks import building, records, reporting, studies
from benchmarks.console import HelpFormatter, at_least, leave, signals_handled, split_settings
from benchmarks.settings import ConfigError, changed, dump, flat, parse

CLAIMS = Path(__file__).parent / "recipes" / "claims.yaml"

Values = tuple[tuple[str, float], ...]
"""Settings and their values."""


@signals_handled(leave)  # until there is a run that can save
def main(argv: Sequence[str] | None = None) -> int:
    argv, settings = split_settings(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    path = {"type": Path, "metavar": "PATH"}
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


class Study:
    """The trainings of all rows: one for each value to choose from, on validation classes, then the chosen ones."""

    def __init__(
        self, claims: Any, results: Any, runs: Path, seeds: int, settings: Sequence[str]
    ) -> None:
        self.claims, self.results, self.runs = claims, results, runs
        self.seeds, self.settings = seeds, settings
        self._plan = cache(self._plan_anew)
        self._recipe = cache(lambda name: building.resolved(parse(["--recipe", name]).config))

    def tuning(self, row: str) -> Any:
        """The scores of all values of the row's setting; None as long as one is missing."""
        return self._measured(row, self.candidates(row))

    def _measured(self, row: str, candidates: dict[float, list[Any]]) -> Any:
        measured, diverged = {}, {}
        for value, jobs in candidates.items():
            found = [self.results.of(job) for job in jobs]
            if None in found:
                return None
            scores = [result["metrics"].get(reporting.SELECTION, -np.inf) for result in found]
            measured[value] = float(np.mean(scores))
            diverged[value] = [draw for draw, result in enumerate(found) if not result["metrics"]]
        setting = next(iter(self.claims.tuned.get(row, {})), "")
        return reporting.Tuning(row, setting, measured, diverged) if measured else None

    def chosen(self, row: str) -> Values | None:
        """The chosen settings of a row; None as long as one is not chosen."""
        taken = self._taken(row)
        if taken is None or row not in self.claims.tuned:
            return taken
        tuning = self.tuning(row)
        if tuning is None or tuning.chosen is None:
            return None
        return (*taken, (tuning.setting, tuning.chosen))

    def needed(self, rows: Iterable[str]) -> list[str]:
        """The rows and all rows whose settings they take, each once and after those it depends on."""
        found: dict[str, None] = {}
        for row in rows:
            found |= dict.fromkeys([*self.needed(self.claims.takes.get(row, [])), row])
        return list(found)

    def missing(self, rows: Iterable[str]) -> list[Any]:
        """The trainings without a result that can run now, because those they depend on have one."""
        jobs = chain(*([*chain(*self.candidates(r).values()), *self.tests(r)] for r in rows))
        return [job for job in jobs if self.results.of(job) is None]

    def keep_finished(self, rows: Sequence[str]) -> None:
        """Keep the results of finished runs, and then of the runs whose settings these results determine."""
        while done := [j for j in self.missing(rows) if _has_ended(j) and not j.changes()]:
            self.results.add(done)

    def _taken(self, row: str) -> Values | None:
        given = [self.chosen(other) for other in self.claims.takes.get(row, [])]
        return None if None in given else tuple(dict(chain(*given)).items())

    def candidates(self, row: str) -> dict[float, list[Any]]:
        """The trainings with each value to try now, one per draw; none until the settings that it takes are chosen.

        These values are the first ones, then one more beyond the best as long as that lies at the edge.
        """
        taken = self._taken(row)
        if taken is None or row not in self.claims.tuned:
            return {}
        [(setting, values)] = self.claims.tuned[row].items()
        draws = range(self.claims.draws)
        low = max(0, (len(values) - self.claims.first) // 2)
        high = low + self.claims.first
        while True:
            found = {
                value: [
                    *chain(*(self._plan(row, (*taken, (setting, value)), draw) for draw in draws))
                ]
                for value in values[low:high]
            }
            tuning = self._measured(row, found)
            best = None if tuning is None or tuning.chosen is None else values.index(tuning.chosen)
            if best == low > 0:
                low -= 1
            elif best == high - 1 and high < len(values):
                high += 1
            else:
                return found

    def tests(self, row: str) -> list[Any]:
        """The trainings to test, one per seed; none until the settings are chosen."""
        values = self.chosen(row)
        return [] if values is None else self._plan(row, values)

    def _plan_anew(self, row: str, values: Values, draw: int | None = None) -> list[Any]:
        recipe, seeds, runs = f"{self.claims.recipes}/{row}", range(self.seeds), self.runs
        more, fixed = self.claims.settings.get(row, []), {"data.split": "test", **dict(values)}
        if draw is not None:
            seeds, runs = range(1), runs / "validation" / f"{values[-1][1]:g}" / f"draw{draw}"
            more = ["--data.split=validation", f"--data.fold={draw}"]
            fixed |= {"data.split": "validation", "data.fold": draw}
        if values:
            whole = changed(self._recipe(recipe), dict(values))
            groups = {re.split(r"[.\[]", setting)[0] for setting, _ in values}
            text = dump({group: whole[group] for group in sorted(groups)})
            file = runs / "settings" / f"{row}.yaml"
            if not file.exists() or file.read_text() != text:
                file.parent.mkdir(parents=True, exist_ok=True)
                records.replace_file(file, text.encode())
            more = [f"--config={file}", *more]
        jobs = studies.plan([recipe], seeds, runs, ["--report=false", *more, *self.settings])
        # Settings behind -- must not choose by the test classes, or fix what is to be chosen.
        for job in jobs:
            now = flat(job.config)
            for setting, value in fixed.items():
                if now.get(setting) != value:
                    raise ConfigError(
                        f"{setting}: {value!r} of {row} is set by this command; leave it out behind --"
                    )
        return jobs


def _has_ended(job: Any) -> bool:
    """True if a run is finished or has diverged: the same settings would diverge again."""
    record = job.record() or {"status": "missing"}
    return record["status"] == "finished" or records.has_diverged(record)


def _run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    if options.output.suffix != ".md":  # the kept results lie beside the page
        raise ConfigError(f"--output: expected a .md file, got {options.output}")
    claims = reporting.read_claims(CLAIMS)
    kept = options.output.with_suffix(".json")
    results = reporting.Results(kept)
    study = Study(claims, results, options.runs, options.seeds, settings)
    rows = study.needed(row for claim in claims.claims for row in claim.rows())
    study.keep_finished(rows)
    tried: set[Path] = set()
    while not options.page_only:
        queue = [job for job in study.missing(rows) if job.folder not in tried]
        if not queue:
            break
        launcher = studies.launcher(options, options.runs, jobs=2)
        stopped_by = studies.Queue(queue, launcher, redo_stale=True).run()
        print(studies.summary(queue))
        study.keep_finished(rows)
        if stopped_by is not None:
            return 128 + stopped_by
        tried |= {job.folder for job in queue}
    found = {
        row: {job.seed: result for job in study.tests(row) if (result := results.of(job))}
        for row in rows
    }
    findings = reporting.judge(claims, found, options.seeds)
    if not findings:
        raise ConfigError(
            f"--runs: no claim has both rows finished at {options.seeds} seeds, neither in {options.runs} nor in "
            f"{kept}; leave out --page-only to train them"
        )
    figure = options.output.with_suffix(".png")
    tunings = [tuning for row in rows if (tuning := study.tuning(row))]
    drawn = reporting.forest(claims, findings)
    page = reporting.page_of_claims(claims, findings, found, tunings, figure.name)
    for file, content in {options.output: page.encode(), figure: drawn}.items():
        records.replace_file(file, content)
    print(page, end="")
    return int(any(job.folder in tried for job in study.missing(rows)))


if __name__ == "__main__":
    sys.exit(main())
