"""A search for settings on the validation classes: trials of Optuna, each a run per fold.

Sampled by TPE (Bergstra et al., "Algorithms for hyper-parameter optimization", NIPS 2011) as Optuna has it. Optuna
keeps the trials in a journal, and trial n draws each setting from the generator of (seed, n, setting), so that a
search ends as if it had never been stopped. Trials that run at the same time do not know each other's results: what
they draw depends on which of them ends first.

No trial can see a test class: all are runs of `data.split: validation`, which do not load them.

The space is a YAML file of settings by their path, each with its range or its values: docs/protocols.md has one.
"""

import csv
import io
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from benchmarks.console.writing import replace_file
from benchmarks.records.files import damage_named
from benchmarks.records.results import DONE
from benchmarks.records.run_folder import RunFolderError, check_same
from benchmarks.settings.class_paths import resolved
from benchmarks.settings.command import Command, parse
from benchmarks.settings.differences import changed, config_changes
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Experiment
from benchmarks.settings.yaml_files import dump, read_yaml
from benchmarks.studies.jobs import Job, make_job, trying_out
from benchmarks.studies.launching import Launcher
from benchmarks.studies.queue import Queue
from benchmarks.training.parts import try_one_step

MEASURED = "validation MAP@R"

OVER = (*DONE, "failed")  # a trial that fails by its settings is one of the budget

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
Space = dict[str, Distribution]

FIXED = re.compile(
    r"(output|seed|protocol|label|evaluation"
    r"|data\.(dataset|root|split|folds?|test_classes|class_level|max_classes|stage))($|\.)"
)
"""Settings that say what a trial is measured on and how: a search may not choose them."""

PLAIN = (bool, int, float, str, type(None))


class UnfinishedRunError(RuntimeError):
    """A run was stopped or ended from outside, or could not begin: nothing that its settings are to blame for."""


@dataclass
class Search:
    """A search, as it was asked for; its budget of trials is fixed when it begins.

    A trial trains once for each fold and is validated on it.
    """

    recipe: str
    settings: Sequence[str]  # further arguments of `benchmarks/run.py`
    space: Space
    trials: int  # one that fails is one of them
    seed: int  # of the sampler and of all trainings
    folder: Path

    @cached_property
    def command(self) -> Command:
        """The settings that the trials change."""
        mine = [f"--seed={self.seed}", "--protocol=fair", "--data.split=validation"]
        return parse(["--recipe", self.recipe, *self.settings, *mine])

    def changed(self, values: Mapping[str, Any]) -> Experiment:
        """The settings of a trial; first its classes, which say what arguments there are."""
        classes = {key: value for key, value in values.items() if key.endswith(".class_path")}
        experiment: Experiment = resolved(changed(self.command.experiment, classes))
        return changed(experiment, values)

    @property
    def folds(self) -> list[int]:
        return [*range(self.command.experiment.data.folds)]

    def jobs(self, values: Mapping[str, Any], number: int = 0) -> list[Job]:
        """The trainings of a trial with these values, one for each fold."""
        command = replace(self.command, experiment=self.changed(values))
        trial = self.folder / "trials" / f"{number:04d}"
        return [
            make_job(command, trial.with_name(f"{trial.name}-fold{fold}"), {"data.fold": fold})
            for fold in self.folds
        ]

    def check(self) -> None:
        """Build the run of the low ends and first choices, and move it one step; writes nothing."""
        least = {
            key: kind.choices[0] if isinstance(kind, CategoricalDistribution) else kind.low
            for key, kind in self.space.items()
        }
        list(trying_out(self.jobs(least)))

    def begin(self) -> optuna.Study:
        """The study in its journal; a RunFolderError if the search was begun otherwise."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "journal.log"
        Path(f"{path}.lock").unlink(missing_ok=True)  # by a killed search: this one owns the folder
        if path.exists():  # a full disk cuts a line off
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        elif (self.folder / "trials").exists():
            raise RunFolderError(
                f"{path}: is missing, but {self.folder} has trials, perhaps of an earlier version; restore it, or "
                "choose another --runs"
            )
        with damage_named(path, "restore it, or choose another --runs"):
            storage = JournalStorage(JournalFileBackend(str(path)))
            study = optuna.create_study(
                storage=storage, study_name="search", direction="maximize", load_if_exists=True
            )
        asked = {"RECIPE": self.recipe, "--trials": self.trials, "--seed": self.seed}
        asked["--space"] = {key: repr(kind) for key, kind in self.space.items()}
        asked |= settings_of(self.changed({}))
        before = study.user_attrs.get("asked", asked)
        check_same(config_changes(before, asked), self.folder)
        study.set_user_attr("asked", asked)
        return study

    def execute(self, launcher: Launcher) -> int:
        """Run the trials that are left; the exit status. No other process may have the folder meanwhile."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = self.begin()
        trials = (self._trial(study, number) for number in range(self.trials))  # each in its turn
        at_work: dict[Iterator[Job], Job] = {}

        def ready() -> list[Job]:
            """The next run of each trial at work; as these end, of further ones."""
            ended = [runs for runs, job in at_work.items() if job.status != "not started"]
            for runs in ended:
                del at_work[runs]
            left = chain(ended, trials)
            while len(at_work) < launcher.jobs and (free := next(left, None)):
                if job := next(free, None):
                    at_work[free] = job
            return [*at_work.values()]

        try:
            stopped = Queue(ready, self.trials * len(self.folds), launcher).run()
        except UnfinishedRunError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        over = [trial for trial in study.trials if trial.state.is_finished()]
        self._write_table(over)
        if stopped:
            print(
                f"\nstopped after {len(over)} of {self.trials} trials; rerun the same command to resume"
            )
            return stopped
        print(f"All trials, and why some failed: {self.folder / 'trials.csv'}")
        complete = [trial for trial in over if trial.state == TrialState.COMPLETE]
        if complete:
            self._write_best(max(complete, key=lambda trial: trial.values[0]))
        else:
            print("No trial succeeded: there is no best.yaml.")
        return int(not complete)

    def _trial(self, study: optuna.Study, number: int) -> Iterator[Job]:
        """A trial's runs that are left, one after the other; its value is the mean over the folds."""
        begun = study.trials[number:]
        if begun and begun[0].state.is_finished():
            return
        trial = Trial(study, begun[0]._trial_id) if begun else study.ask()
        for key, kind in self.space.items():
            [seed] = np.random.SeedSequence([self.seed, number, *key.encode()]).generate_state(1)
            study.sampler = TPESampler(seed=int(seed))
            trial._suggest(key, kind)  # Optuna's `ask` has it for new trials alone
        try:
            for fold, job in zip(self.folds, self.jobs(trial.params, number), strict=True):
                if job.outcome() not in OVER:
                    try_one_step(job.experiment)
                    yield job
                if job.outcome() not in OVER:
                    raise UnfinishedRunError(
                        f"trial {number}: {job.why} ({job.log}); rerun the same command to resume this trial"
                    )
                trial.set_user_attr(f"{MEASURED}, fold {fold}", _value(job))
            study.tell(trial, float(np.mean([*trial.user_attrs.values()])))
        except ConfigError as error:
            trial.set_user_attr("failed", str(error))
            study.tell(trial, state=TrialState.PRUNED)  # a bad one for TPE

    def _write_best(self, best: FrozenTrial) -> None:
        settings = settings_of(self.changed(best.params))
        # The run that uses them says these.
        del settings["seed"], settings["protocol"]
        del settings["data"]["split"], settings["data"]["fold"]
        value = f"{MEASURED} {100 * best.values[0]:.2f} %"
        head = (
            f"# {self.recipe}, trial {best.number} of {self.trials}: {value}, the "
            "largest of all trials,\n# and therefore no estimate of what other classes give.\n"
        )
        replace_file(self.folder / "best.yaml", (head + dump(settings)).encode())
        print(f"Best settings, {value}: {self.folder / 'best.yaml'}")

    def _write_table(self, trials: Sequence[FrozenTrial]) -> None:
        text = io.StringIO()
        folds = [f"{MEASURED}, fold {fold}" for fold in self.folds]
        writer = csv.DictWriter(text, ["trial", MEASURED, *folds, *self.space, "failed"])
        writer.writeheader()
        for trial in trials:
            measured = {"trial": trial.number, MEASURED: trial.value}
            writer.writerow(measured | trial.params | trial.user_attrs)
        replace_file(self.folder / "trials.csv", text.getvalue().encode())


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """All settings, except for the folder."""
    return {name: value for name, value in experiment.config().items() if name != "output"}


def _value(job: Job) -> float:
    """The validation MAP@R by which a run's weights were chosen; a ConfigError if it failed by its settings."""
    if (result := job.record()) is None or job.outcome() != "finished":
        raise ConfigError(job.problem())
    for checkpoint in (job.folder / "checkpoints").glob("*.pt"):
        checkpoint.unlink()  # hundreds of runs would fill the disk
    return float(result["selection"]["value"])


def read_space(path: Path) -> Space:
    """The ranges of a YAML file; a ConfigError, naming the file and the key, if it is not as described above."""
    content = read_yaml(path)
    if not content:
        raise ConfigError(f"{path}: expected at least one setting and its range, got none")
    return {str(key): _distribution(f"{path}: {key}", given) for key, given in content.items()}


def _distribution(place: str, given: Any) -> Distribution:
    if FIXED.match(place.rpartition(": ")[2]):
        raise ConfigError(f"{place}: says what a trial is measured on or how; leave it out")
    with suppress(TypeError, ValueError):  # of Optuna, too
        match given:
            case {"choices": [_, _, *_] as choices, **others} if not others:
                if all(isinstance(choice, PLAIN) for choice in choices):
                    return CategoricalDistribution(choices)
            case {"low": low, "high": high, **others} if -math.inf < low < high < math.inf:
                flags: Any = others
                whole, log = flags.pop("int", False), flags.pop("log", False)
                kinds = {int} if whole is True else {int, float}
                if {type(low), type(high)} <= kinds and {type(whole), type(log)} == {bool}:
                    kind = IntDistribution if whole else FloatDistribution
                    return kind(low, high, log=log, **flags)
    raise ConfigError(
        f"{place}: expected {{low: NUMBER, high: LARGER NUMBER}}, with int: true (of whole numbers) or "
        f"log: true (of numbers above 0) if need be, or {{choices: [two or more different values]}}, got {given!r}"
    )
