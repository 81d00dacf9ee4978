"""A study's trainings: candidates on validation classes, then the chosen settings on test classes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial, wraps
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from benchmarks.records.results import DONE
from benchmarks.reporting.names import told_apart
from benchmarks.reporting.study_tables import Candidate, best
from benchmarks.reporting.verdicts import judge
from benchmarks.settings.command import Command
from benchmarks.settings.differences import changed, flat
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.study_files import StudyFile, digest
from benchmarks.studies.choosing import finalists, first_bounds, left_out, widened
from benchmarks.studies.jobs import Job, read, read_for, seeded
from benchmarks.studies.kept import Result, Results

Values = tuple[tuple[str, float], ...]
"""Settings and their values."""

FOR_USE = {
    **{"data.split": "all", "protocol": "paper", "evaluation.every": 0, "evaluation.parts": None},
    **{"evaluation.oracle": False, "evaluation.divergence": False},
}  # settings of a training on all classes, which leaves none to measure on

Found = dict[str, dict[int, Result]]
"""Results of tests, by row and seed."""


Method = TypeVar("Method", bound=Callable[..., Any])


def remembered(method: Method) -> Method:
    """Keep a method's answers until results are read anew: a queue asks for all of them after each run."""

    @wraps(method)
    def answer(study: "Study", *given: Any) -> Any:
        key = study.results.readings, method.__name__, *given
        if key not in study.answers:
            study.answers[key] = method(study, *given)
        return study.answers[key]

    return cast(Method, answer)


class Study:
    """The jobs of all rows, as far as they are known, and their results; all runs get the settings."""

    def __init__(
        self, file: StudyFile, results: Results, runs: Path, settings: Sequence[str] = ()
    ) -> None:
        self.file, self.results, self.runs, self.settings = file, results, runs, list(settings)
        self._jobs, self._asked = cache(self._planned), cache(self._asked_anew)
        self._read = cache(lambda recipe, *settings: read([f"--recipe={recipe}", *settings]))
        self.answers: dict[Any, Any] = {}  # of methods that are `remembered`

    def with_settings(self, *more: str) -> "Study":
        """The same with more settings; no recipe is read again."""
        study = Study(self.file, self.results, self.runs, [*self.settings, *more])
        study._read = self._read
        return study

    @property
    def rows(self) -> list[str]:
        """The untrained rows, the compared ones, and those whose settings they take, each after these."""
        compared = chain(*(of.all_rows() for of in self.file.comparisons))
        return self.file.needed([*self.file.untrained(), *compared])

    @property
    def final(self) -> StudyFile:
        """The file with the comparisons that are tested, as far as these are known."""
        return self._finalists() or self.file

    @remembered
    def _finalists(self) -> StudyFile | None:
        return finalists(self.file, self.tried)

    def _tested(self) -> list[str]:
        """The rows that are tested, as far as they are known."""
        if (known := self._finalists()) is self.file:
            return self.rows
        compared = chain(*(of.all_rows() for of in known.comparisons)) if known else ()
        return [*self.file.untrained(), *compared]

    def labels(self) -> dict[str, str]:
        """The labels of the rows, each once."""
        return told_apart({row: self.first_job(row).experiment.label for row in self.rows})

    @remembered
    def tried(self, row: str) -> list[Candidate]:
        """The candidates of a row with their scores; [] as long as one is not trained."""
        return self._scored(self.candidates(row)) or []

    def chosen(self, row: str) -> Values | None:
        """The chosen settings of a row; None as long as one is not chosen."""
        taken = self._taken(row)
        if taken is None or not self.file.rows[row].choose:
            return taken
        found = best(self.tried(row))
        return None if found is None else (*taken, *found.values.items())

    def _taken(self, row: str) -> Values | None:
        given = [self.chosen(other) for other in self.file.rows[row].takes]
        return None if None in given else tuple(dict(chain(*given)).items())  # type: ignore[arg-type]

    def _scored(self, candidates: dict[Values, list[Job]]) -> list[Candidate] | None:
        tried = []
        for values, jobs in candidates.items():
            found = [result for job in jobs if (result := self.results.checked(job)) is not None]
            if len(found) < len(jobs):
                return None
            scores = [of["metrics"].get(self.file.choice.metric, np.nan) for of in found]
            diverged = [draw for draw, score in enumerate(scores) if not np.isfinite(score)]
            mean = None if diverged else float(np.mean(scores))
            tried.append(Candidate(dict(values), mean, diverged))
        return tried

    @remembered
    def candidates(self, row: str) -> dict[Values, list[Job]]:
        """The trainings of each candidate to try now; none until the settings that the row takes are chosen.

        Of each setting the first values are tried, then one more beyond the best as long as that lies at the edge,
        or one more on both sides as long as all diverge.
        """
        taken, choose = self._taken(row), self.file.rows[row].choose
        if taken is None or not choose or left_out(self.file, row, self.tried) is not False:
            return {}
        draws, bounds = range(self.file.choice.draws), first_bounds(choose, self.file.choice.first)
        while True:
            lists = ([(name, v) for v in of[slice(*bounds[name])]] for name, of in choose.items())
            found = {
                values: [self._jobs(row, (*taken, *values), range(1), draw)[0] for draw in draws]
                for values in product(*lists)
            }
            if (scored := self._scored(found)) is None:
                return found
            before, bounds = bounds, widened(choose, bounds, best(scored))
            if bounds == before:
                return found

    def first_job(self, row: str, draw: int | None = None) -> Job:
        """The test with the first seed, or the training of a draw, before any setting is chosen."""
        first = self.file.seeds.first if draw is None else 0
        return self._jobs(row, (), range(first, first + 1), draw)[0]

    def tests(self, row: str, more: bool | None = None) -> list[Job]:
        """The trainings to test, one per seed; none until the settings are chosen.

        Args:
            more: Also with the further seeds; default: if the first ones call for them.
        """
        if (values := self.chosen(row)) is None or row not in self._tested():
            return []
        seeds = self.file.seeds.numbers(row in self.extended() if more is None else more)
        return self._jobs(
            row, values, seeds[:1] if self.file.rows[row].same_for_all_seeds else seeds
        )

    def finish(self, row: str) -> Job:
        """The training of a row on all classes, for use: with the chosen settings, as long as the tested ones.

        Where validation classes chose the step of the tested networks, it ends at the median of these steps.
        """
        tests, values = self.tests(row), self.chosen(row)
        assert values is not None, "a row is recommended once it is tested"
        chosen = [(job.own_record() or {}).get("selection") for job in tests]
        steps = [best["step"] for best in chosen if best]
        length = {"optimization.steps": int(np.median(steps))} if steps else {}
        command = self._settled(row, {**dict(values), "data.split": "test"})
        command = replace(command, experiment=changed(command.experiment, FOR_USE | length))
        [job] = seeded(command, [self.file.seeds.first], self.runs / "finished" / row)
        job.name = f"{row} on all classes"
        return job

    def found(self, more: bool | None = None) -> Found:
        """The results of these tests."""
        found: Found = {}
        for row in self.rows:
            jobs = self.tests(row, more)
            found[row] = {job.seed: result for job in jobs if (result := self.results.checked(job))}
            if self.file.rows[row].same_for_all_seeds:
                seeds = self.file.seeds.numbers(more=True)
                found[row] = {seed: result for result in found[row].values() for seed in seeds}
        return found

    @remembered
    def extended(self) -> set[str]:
        """The rows that get more seeds: those of main comparisons that the first seeds leave too wide."""
        seeds = self.file.seeds
        if not seeds.more or seeds.wider_than is None:
            return set()
        main = [
            f for f in judge(self.final, self.found(more=False)) if f.comparison.family == "main"
        ]
        wide = (f for f in main if f.tested and f.tested.half_width > seeds.wider_than)
        return {row for finding in wide for row in finding.comparison.all_rows()}

    def known(self, rows: Sequence[str] | None = None) -> list[Job]:
        """The trainings whose settings are known, because those they depend on have a result; of some rows."""
        every = self.rows if rows is None else rows
        trainings = (chain(*self.candidates(row).values(), self.tests(row)) for row in every)
        return [*chain(*trainings)]

    def missing(self, rows: Sequence[str] | None = None) -> list[Job]:
        """Those of them without a result."""
        return [job for job in self.known(rows) if self.results.checked(job) is None]

    def keep_finished(self) -> None:
        """Keep the results of finished runs, and then of the runs whose settings these results determine."""
        while done := [
            job for job in self.missing() if job.outcome() in DONE and not job.changes()
        ]:
            self.results.add(done)

    def left(self) -> list[Job]:
        """The trainings without a result, with settings of their row where theirs are not known yet."""
        found = self.missing()
        for row in self.rows:
            choose, choice = self.file.rows[row].choose, self.file.choice
            out = left_out(self.file, row, self.tried)
            if choose and not out and (out is None or self._taken(row) is None):
                tried = prod(len(values[: choice.first]) for values in choose.values())
                found += [self.first_job(row, draw) for draw in range(choice.draws)] * tried
            if self.chosen(row) is None and self.file.choice.finalists is None:
                found += [self.first_job(row)] * self.file.seeds.count
        if self._finalists() is None:  # these stand for those to come
            main = [of.rows() for of in self.file.comparisons if of.family == "main"]
            some = chain(*main[: self.file.choice.finalists])
            found += [self.first_job(row) for row in some] * self.file.seeds.count
        return found

    def due(self) -> int:
        """The number of further seeds that the first ones have called for, and that are not tested yet."""
        further = (job for row in self.extended() for job in self.tests(row, True))
        return sum(self.results.checked(job) is None for job in further)

    def register(self, queue: Sequence[Job]) -> None:
        """Write the plan down if a test is about to begin."""
        if any(job.config["data"]["split"] == "test" for job in queue):
            self.results.register(self.digest, self.file.words())

    @cached_property
    def digest(self) -> str:
        """The plan's `own_digest`, or the one that it was registered under, if settings have new names since."""
        return self.results.renamed.get(self.own_digest, self.own_digest)

    @cached_property
    def own_digest(self) -> str:
        """SHA-256 of the rule, and of all settings of the rows before any is chosen."""
        rows = {row: self.first_job(row).digest for row in self.rows}
        return digest(json.dumps([self.file.rule(), rows], sort_keys=True))

    def _planned(
        self, row: str, values: Values, seeds: range, draw: int | None = None
    ) -> list[Job]:
        fixed: dict[str, Any] = {**dict(values), "data.split": "test"}
        if draw is None:
            jobs = seeded(self._settled(row, fixed, tested=True), seeds, self.runs / row)
            for job in jobs:
                job.name = f"test of {row}, seed {job.seed}"
            return jobs
        fixed |= {"data.split": "validation", "data.fold": draw}
        own = values[-len(self.file.rows[row].choose) :]
        tried = "-".join(f"{value}" for _, value in own)
        runs = self.runs / row / "validation" / tried / f"draw{draw}"
        jobs = seeded(self._settled(row, fixed), seeds, runs)
        told = ", ".join(f"{name.rpartition('.')[2]} {value:g}" for name, value in own)
        for job in jobs:
            job.name = f"{row} with {told}" + f", draw {draw}" * (self.file.choice.draws > 1)
        return jobs

    def _settled(self, row: str, fixed: Mapping[str, Any], *, tested: bool = False) -> Command:
        """A row's settings, with those that only this command may set: a study would choose by the test."""
        asked, own = self._asked(row, tested)
        for setting, value in fixed.items():
            if setting in own:
                raise ConfigError(
                    f"{setting}: {value!r} of {row} is set by this command; leave it out behind --"
                )
        report = {} if "report" in own else {"report": "neighbours" if tested else False}
        return replace(asked, experiment=changed(asked.experiment, {**fixed, **report}))

    def _asked_anew(self, row: str, tested: bool) -> tuple[Command, set[str]]:
        """A row's settings before any is chosen, and the names of those that differ from its recipe's."""
        about = self.file.rows[row]
        own = [*self.file.settings, *about.settings, *about.measures * tested]
        # A row that trains nothing stays what it is, whatever length and layer the trainings get.
        again = about.settings if row in self.file.untrained() else []
        read_row, at = partial(self._read, about.recipe), f"study {self.file.name}: rows.{row}"
        recipe, asked = read_row(), read_for(read_row, own, [*self.settings, *again], at)
        before, now = (flat(command.experiment.config()) for command in (recipe, asked))
        return asked, {name for name in now if now[name] != before.get(name)}
