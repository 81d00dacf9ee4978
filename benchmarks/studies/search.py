"""A search for settings on the validation classes: trials of Optuna, each a run per fold.

Sampled by TPE (Bergstra et al., "Algorithms for hyper-parameter optimization", NIPS 2011) as Optuna has it. Trial n
draws from the generator of (seed, n), and its settings and runs are kept: the study is told of them again by the
next command, so that it ends as if it had never been stopped. Trials that run at the same time do not know each
other's results: what they draw depends on which of them ends first.

No trial can see a test class: all are runs of `data.split: validation`, which do not load them.
"""

import csv
import io
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import optuna
from optuna.samplers import TPESampler
from optuna.trial import Trial, TrialState

from benchmarks.building import resolved
from benchmarks.console import progress_bar
from benchmarks.records import check_same, damage_named, read_json, replace_file, write_json
from benchmarks.settings import Command, ConfigError, changed, dump, flat, parse, read_yaml
from benchmarks.studies.jobs import Job
from benchmarks.studies.launching import Launcher
from benchmarks.studies.planning import check, fold_job
from benchmarks.studies.search_space import Space, corners

MEASURED = "validation MAP@R"


class UnfinishedRunError(RuntimeError):
    """A run was stopped or ended from outside, or could not begin: nothing that its settings are to blame for."""


class NoValueError(RuntimeError):
    """A run failed by its settings; values that do not go together are a ConfigError."""


@dataclass
class Outcome:
    """A trial that is over.

    Args:
        folds: The validation MAP@R of each fold, as far as they were trained.
        value: Their mean; None if the trial failed.
    """

    params: dict[str, Any]
    folds: list[float]
    value: float | None = None
    failed: str | None = None


@dataclass
class Search:
    """A search, as it was asked for; its budget of trials is fixed when it begins.

    Args:
        recipe: PAPER/TABLE/ROW.
        settings: Further arguments of `benchmarks/run.py`.
        space: What the trials change.
        some_folds: The parts of the training classes that a trial is validated on, by a training each. None:
            all of them, as Musgrave et al. do; fewer cost less, and settings may come to suit them.
        trials: How many; one that fails is one of them.
        seed: Of the sampler and of all trainings.
        folder: Where everything goes.
    """

    recipe: str
    settings: Sequence[str]
    space: Space
    some_folds: Sequence[int] | None
    trials: int
    seed: int
    folder: Path
    _lock: Any = field(default_factory=threading.Lock)
    _outcomes: dict[int, Outcome] = field(default_factory=dict)

    @cached_property
    def command(self) -> Command:
        """The settings that the trials change."""
        mine = [f"--seed={self.seed}", "--protocol=fair", "--data.split=validation"]
        return parse(["--recipe", self.recipe, *self.settings, *mine])

    @cached_property
    def base(self) -> dict[str, Any]:
        """The settings that the trials change, their classes as they are described."""
        return {name: value for name, value in self.command.config.items() if name != "output"}

    def changed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of a trial; first its classes, which say what arguments there are."""
        classes = {key: value for key, value in values.items() if key.endswith(".class_path")}
        return changed(resolved(changed(self.base, classes)), values)

    @property
    def folds(self) -> list[int]:
        """The folds that trials are validated on."""
        return sorted(set(self.some_folds or range(self.base["data"]["folds"])))

    def jobs(self, settings: Path) -> list[Job]:
        """The trainings of a trial with these settings, one for each fold."""
        arguments = ["--recipe", self.recipe, "--config", str(settings)]
        arguments += [f"--trust={module}" for module in self.command.trusted]
        return [
            fold_job(arguments, fold, settings.with_name(f"{settings.stem}-fold{fold}"))
            for fold in self.folds
        ]

    def check(self) -> None:
        """Build the ends of all ranges and all choices, and move them one step; writes nothing."""
        with TemporaryDirectory() as folder:
            for i, values in enumerate(corners(self.space)):
                path = Path(folder) / f"{i}.yaml"
                path.write_text(dump(self.changed(values)))
                experiments = [job.command.experiment for job in self.jobs(path)]
                check(experiments[0], experiments if i == 0 else [])

    def begin(self) -> None:
        """Write what is asked, or compare it with what was asked when the search began.

        Raises:
            ConfigError, RunFolderError: if it was begun otherwise.
        """
        asked = {
            "RECIPE": self.recipe,
            "--trials": self.trials,
            "--fold": self.folds,
            "--seed": self.seed,
            "--space": {key: repr(kind) for key, kind in self.space.items()},
        }
        settings, path = self.changed({}), self.folder / "search.json"
        if not path.exists():
            write_json(path, {"asked": asked, "settings": settings})
            return
        with damage_named(path, "restore it, or choose another --runs"):
            begun = read_json(path)
        for name, value in asked.items():
            if (before := begun["asked"][name]) != value:
                raise ConfigError(
                    f"{name}: the search in {self.folder} was begun with {before}, not {value}, and is fixed "
                    "since; give the same, or choose another --runs"
                )
        check_same(begun["settings"], settings, self.folder)

    def execute(self, launcher: Launcher) -> int:
        """Run the trials that are left; the exit status. No other process may have the folder meanwhile."""
        (self.folder / "trials").mkdir(parents=True, exist_ok=True)
        self.begin()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(direction="maximize")
        bar = progress_bar(total=self.trials, unit="trial")

        def work(number: int) -> None:
            self._outcomes[number] = self._try(study, number, launcher)

        try:
            with launcher, bar:
                for _, trial in launcher.each(work, range(self.trials), bar):
                    trial.result()
                    bar.update()
        except UnfinishedRunError as error:
            if launcher.stop.signal is None:
                print(f"error: {error}", file=sys.stderr)
                return 1
        self._write_table()
        if launcher.stop.signal is not None:
            done = len(self._outcomes)
            print(
                f"\nstopped after {done} of {self.trials} trials; the same command goes on from there"
            )
            return 128 + launcher.stop.signal
        return self._report()

    def _ask(self, study: optuna.Study, number: int, path: Path) -> Trial:
        """A trial with its values, which it keeps in its file of settings."""
        with self._lock:
            if path.exists():
                with damage_named(path, "delete it and the trial's runs, or choose another --runs"):
                    known = flat(read_yaml(path))
                    study.enqueue_trial({key: known[key] for key in self.space})
            else:
                [seed] = np.random.SeedSequence([self.seed, number]).generate_state(1)
                study.sampler = TPESampler(seed=int(seed))
            trial = study.ask(self.space)
            if not path.exists():
                replace_file(path, dump(self.changed(trial.params)).encode())
            return trial

    def _try(self, study: optuna.Study, number: int, launcher: Launcher) -> Outcome:
        """A trial; its value is the mean over the folds."""
        path = self.folder / "trials" / f"{number:04d}.yaml"
        trial = self._ask(study, number, path)
        outcome = Outcome(trial.params, [])
        try:
            for job in self.jobs(path):
                outcome.folds.append(self._value(job, number, launcher))
            outcome.value = float(np.mean(outcome.folds))
            study.tell(trial, outcome.value)
        except (ConfigError, NoValueError) as error:
            outcome.failed = str(error)
            study.tell(trial, state=TrialState.PRUNED)  # a bad one for TPE
        return outcome

    def _value(self, job: Job, number: int, launcher: Launcher) -> float:
        """The validation MAP@R by which a run's weights were chosen."""
        result = job.result() or self._train(job, number, launcher)
        for checkpoint in (job.folder / "checkpoints").glob("*.pt"):
            checkpoint.unlink()  # hundreds of runs would fill the disk
        with damage_named(job.folder / "run.json"):
            return float(result["selection"]["value"])

    def _train(self, job: Job, number: int, launcher: Launcher) -> dict[str, Any]:
        problem = "stopped"
        if (told := job.record()) and told["status"] == "failed":
            raise NoValueError(job.problem())  # before a stop
        if launcher.stop.signal is None:
            with self._lock:
                check(job.command.experiment)
            was_started = launcher.run(job)
            if (result := job.result()) is not None:
                return result
            if was_started:
                problem, record = job.problem(), job.record()
                if job.exit_status == 1 and record and record["status"] == "failed":
                    raise NoValueError(problem)
        raise UnfinishedRunError(
            f"trial {number}: {problem} ({job.log}); the same command goes on with this trial"
        )

    def _report(self) -> int:
        values = {n: of.value for n, of in self._outcomes.items() if of.value is not None}
        print(f"All trials, and why some failed: {self.folder / 'trials.csv'}")
        if not values:
            print("No trial succeeded: there is no best.yaml.")
            return 1
        best = max(sorted(values), key=lambda n: values[n])
        settings = self.changed(self._outcomes[best].params)
        for key in ("seed", "protocol"):  # what the run that uses them says
            del settings[key]
        for key in ("split", "fold"):
            del settings["data"][key]
        head = (
            f"# {self.recipe}, trial {best} of {self.trials}: {MEASURED} {100 * values[best]:.2f} %, the "
            "largest of all trials,\n# and therefore no estimate of what other classes give.\n"
        )
        replace_file(self.folder / "best.yaml", (head + dump(settings)).encode())
        print(f"Best settings, {MEASURED} {100 * values[best]:.2f} %: {self.folder / 'best.yaml'}")
        return 0

    def _write_table(self) -> None:
        text = io.StringIO()
        folds = [f"{MEASURED}, fold {fold}" for fold in self.folds]
        writer = csv.DictWriter(text, ["trial", MEASURED, *folds, *self.space, "failed"])
        writer.writeheader()
        for number, of in sorted(self._outcomes.items()):
            row = {"trial": number, MEASURED: of.value, "failed": of.failed, **of.params}
            writer.writerow(row | dict(zip(folds, of.folds, strict=False)))
        replace_file(self.folder / "trials.csv", text.getvalue().encode())
