"""A search for settings on the validation classes: an Optuna study whose trials are runs.

Sampled by TPE (Bergstra et al., "Algorithms for hyper-parameter optimization", NIPS 2011) as Optuna has it. Trial n
draws from the generator of (seed, n), so that a study that was stopped goes on as if it never was.

No trial can see a test class: all are runs of `data.split: validation`, which do not load them.
"""

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import optuna
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from benchmarks.building import resolved
from benchmarks.console import progress_bar
from benchmarks.records import check_same, replace_file
from benchmarks.settings import Command, ConfigError, changed, dump, parse
from benchmarks.studies.folds import FoldRun, check, fold_run
from benchmarks.studies.launching import Launcher
from benchmarks.studies.search_space import Space, corners

MEASURED = "validation MAP@R"


class UnfinishedRunError(RuntimeError):
    """A run was stopped or ended from outside, or could not begin: nothing that its settings are to blame for."""


class FailedRunError(RuntimeError):
    """A run failed by its settings; values that do not go together are a ConfigError before."""


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

    def _settings(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:04d}.yaml"

    def runs(self, settings: Path) -> list[FoldRun]:
        """The runs of a trial with these settings, one for each fold."""
        arguments = ["--recipe", self.recipe, "--config", str(settings)]
        arguments += [f"--trust={module}" for module in self.command.trusted]
        return [
            fold_run(arguments, fold, settings.with_name(f"{settings.stem}-fold{fold}"))
            for fold in self.folds
        ]

    def check(self) -> None:
        """Build the ends of all ranges and all choices, and move them one step; writes nothing."""
        with TemporaryDirectory() as folder:
            for i, values in enumerate(corners(self.space)):
                path = Path(folder) / f"{i}.yaml"
                path.write_text(dump(self.changed(values)))
                experiments = [run.command.experiment for run in self.runs(path)]
                check(experiments[0], experiments if i == 0 else [])

    # ---------------------------------------------------------------------------------------- study

    def study(self) -> optuna.Study:
        """The study in the folder, begun if there is none.

        Raises:
            ConfigError, RunFolderError: if it was begun otherwise.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder.mkdir(parents=True, exist_ok=True)
        storage = optuna.storages.RDBStorage(f"sqlite:///{self.folder.resolve() / 'study.db'}")
        study = optuna.create_study(
            study_name="search", storage=storage, direction="maximize", load_if_exists=True
        )
        asked = {
            "RECIPE": self.recipe,
            "--trials": self.trials,
            "--fold": self.folds,
            "--seed": self.seed,
            "--space": {key: repr(kind) for key, kind in self.space.items()},
        }
        settings = self.changed({})
        if "settings" not in study.user_attrs:  # the last one: now it is begun
            for name, value in (asked | {"settings": settings}).items():
                study.set_user_attr(name, value)
        begun = study.user_attrs
        for name, value in asked.items():
            if begun[name] != value:
                raise ConfigError(
                    f"{name}: the search in {self.folder} was begun with {begun[name]}, not {value}, and is "
                    "fixed since; give the same, or choose another --runs"
                )
        check_same(begun["settings"], settings, self.folder)
        return study

    def execute(self) -> int:
        """Run the trials that are left; the exit status."""
        study = self.study()
        self._take_up(study)
        done = len(counted(study))
        bar = progress_bar(total=self.trials, initial=done, desc="trials", unit="trial")
        try:
            with Launcher() as launcher, bar:
                for number in range(done, self.trials):
                    [seed] = np.random.SeedSequence([self.seed, number]).generate_state(1)
                    study.sampler = TPESampler(seed=int(seed))
                    self._try(study, number, launcher)
                    bar.update()
        except UnfinishedRunError as error:
            if launcher.stop.signal is None:
                print(f"error: {error}", file=sys.stderr)
                return 1
        self._write_table(study)
        if launcher.stop.signal is not None:
            done = len(counted(study))
            print(
                f"\nstopped after {done} of {self.trials} trials; the same command goes on from there"
            )
            return 128 + launcher.stop.signal
        return self._report(study)

    def _take_up(self, study: optuna.Study) -> None:
        """Queue the values of a trial that has no result, for its number is the next one again."""
        for trial in study.get_trials(states=[TrialState.RUNNING]):
            study.tell(trial.number, state=TrialState.FAIL)
        for last in study.trials[-1:]:
            drawn = last.params.keys() == self.space.keys()  # all of its values
            if last.state is TrialState.FAIL and drawn:
                study.enqueue_trial(last.params)

    def _try(self, study: optuna.Study, number: int, launcher: Launcher) -> None:
        """A trial; its value is the mean over the folds."""
        trial = study.ask(self.space)
        path = self._settings(number)
        path.parent.mkdir(exist_ok=True)
        replace_file(path, dump(self.changed(trial.params)).encode())
        found = []
        for run in self.runs(path):
            try:
                result = run.result() or self._train(run, number, launcher)
            except (ConfigError, FailedRunError) as error:
                trial.set_user_attr("failed", str(error))
                study.tell(trial, state=TrialState.PRUNED)  # TPE learns nothing from a failed one
                return
            for checkpoint in (run.folder / "checkpoints").glob("*.pt"):
                checkpoint.unlink()  # hundreds of runs would fill the disk
            found.append(result["selection"]["value"])
        study.tell(trial, float(np.mean(found)))

    def _train(self, run: FoldRun, number: int, launcher: Launcher) -> dict[str, Any]:
        problem = "stopped"
        if launcher.stop.signal is None:
            check(run.command.experiment)
            child = launcher.run(run)
            if (result := run.result()) is not None:
                return result
            problem, record = child.problem(), run.record()
            if child.process.returncode == 1 and record and record["status"] == "failed":
                raise FailedRunError(problem)
        raise UnfinishedRunError(
            f"trial {number}: {problem} ({run.log}); the same command goes on with this trial"
        )

    # --------------------------------------------------------------------------------------- report

    def _report(self, study: optuna.Study) -> int:
        done = counted(study)
        values = {n: t.value for n, t in enumerate(done) if t.value is not None}
        print(f"All trials, and why some failed: {self.folder / 'trials.csv'}")
        if not values:
            print("No trial succeeded: there is no best.yaml.")
            return 1
        best = max(values, key=lambda n: values[n])
        settings = self.changed(done[best].params)
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

    def _write_table(self, study: optuna.Study) -> None:
        text = io.StringIO()
        writer = csv.writer(text)
        names = [f"{MEASURED}, fold {fold}" for fold in self.folds]
        writer.writerow(["trial", MEASURED, *names, *self.space, "failed"])
        for n, trial in enumerate(counted(study)):
            results = [
                run.record() if run.is_finished() else None for run in self.runs(self._settings(n))
            ]
            values = [result and result["selection"]["value"] for result in results]
            params = [trial.params[key] for key in self.space]
            writer.writerow([n, trial.value, *values, *params, trial.user_attrs.get("failed")])
        replace_file(self.folder / "trials.csv", text.getvalue().encode())


def counted(study: optuna.Study) -> list[FrozenTrial]:
    """The trials of the budget that are over; a trial's number is its place among them."""
    return study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])
