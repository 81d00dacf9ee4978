"""A search for settings on the validation classes: an Optuna study whose trials are runs.

Sampled by TPE (Bergstra et al., "Algorithms for hyper-parameter optimization", NIPS 2011) as Optuna has it. Trial n
draws from the generator of (seed, n), so that a study that was stopped goes on as if it never was. Trials that run
at the same time do not know each other's results: what they draw depends on which of them ends first.

No trial can see a test class: all are runs of `data.split: validation`, which do not load them.
"""

import csv
import io
import json
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import optuna
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from benchmarks.building import resolved
from benchmarks.console import progress_bar, reason
from benchmarks.evaluation import SELECTED_BY
from benchmarks.records import (
    Run,
    RunFolderError,
    check_same,
    has_diverged,
    load_run,
    read_table,
    replace_file,
)
from benchmarks.settings import Command, ConfigError, changed, dump, flat, parse
from benchmarks.studies.folds import check, fold_run
from benchmarks.studies.launching import Launcher
from benchmarks.studies.search_space import Space, corners
from benchmarks.studies.sweep import Job

MEASURED = "validation MAP@R"


class UnfinishedRunError(RuntimeError):
    """A run was stopped or ended from outside, or could not begin: nothing that its settings are to blame for."""


class NoValueError(RuntimeError):
    """A run failed by its settings, or was not worth its end; values that do not go together are a ConfigError."""


@dataclass
class Curve:
    """The validation classes' curve of a run, as its trial reports it to Optuna.

    A value is the sum of what the trial's folds reached so far, and its step counts those of all folds: trials are
    compared at the same step of the same fold.

    Args:
        before: The values of the folds before.
        pruned: Why the run shall end, once it shall.
    """

    trial: Trial
    run: Job
    before: Sequence[float]
    pruned: str | None = None

    def is_low(self) -> bool:
        """Report the points that are new, before the last step, until Optuna has seen enough."""
        told = self.trial.study.get_trials(deepcopy=False)[self.trial.number].intermediate_values
        last = max(told, default=0)  # also of before it was interrupted
        table, best = read_table(self.run.folder / "records", "evaluation"), 0.0
        for step, value in zip(table.get("step", []), table.get(SELECTED_BY, []), strict=True):
            at = len(self.before) * self.run.steps + int(step)
            if not 0 < step < self.run.steps or self.pruned:  # at 0 it is the network as it was
                continue
            best = max(best, value)
            if at > last:
                self.trial.report(sum(self.before) + best, at)
            if at >= last and self.trial.should_prune():
                self.pruned = (
                    f"{self.run.name}, step {int(step)}: {MEASURED} {100 * best:.2f} % so far, below the median of "
                    "the trials before"
                )
        return self.pruned is not None


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
        prune: End trials whose curve is below the median of those before at the same step.
        folder: Where everything goes.
    """

    recipe: str
    settings: Sequence[str]
    space: Space
    some_folds: Sequence[int] | None
    trials: int
    seed: int
    prune: bool
    folder: Path
    _lock: Any = field(default_factory=threading.Lock)
    _begun: dict[int, Trial] = field(default_factory=dict)

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

    def runs(self, settings: Path) -> list[Job]:
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
        """The study in the folder, begun if there is none. No other process may have it meanwhile.

        Its journal is only a cache: if it cannot be read, or the runs' sealed records say otherwise, it is moved
        aside, and told again from them.

        Raises:
            ConfigError, RunFolderError: if it was begun otherwise.
            ValueError: if a run's record is damaged.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sealed, journal = self._sealed(), self._journal()
        try:
            for line in journal.read_bytes().splitlines() if journal.exists() else ():
                json.loads(line)  # Optuna takes a last line for one that is still being written
            study = self._begin(journal)
            problem = self._misremembered(study, sealed)
        except (ConfigError, RunFolderError, OSError):
            raise
        except Exception as error:  # whatever Optuna makes of such lines
            problem = f"cannot be read ({type(error).__name__}: {reason(error)})"
        if problem is None:
            return study
        names = (journal.with_name(f"{journal.name}.stale-{n}") for n in count(1))
        aside = journal.rename(next(path for path in names if not path.exists()))
        print(
            f"{journal}: {problem}; it is told again from the records of the runs, and is now {aside}",
            file=sys.stderr,
        )
        study = self._begin(journal)
        for number, runs in sorted(sealed.items()):
            settings = flat(next(iter(runs.values())).info["config"])
            begun = create_trial(
                state=TrialState.RUNNING,  # its runs tell the rest
                params={key: settings[key] for key in self.space},
                distributions=self.space,
                user_attrs={"number": number},
            )
            study.add_trial(begun)
        return study

    def _begin(self, journal: Path) -> optuna.Study:
        """The journal's study, which is the one that is asked for."""
        study = optuna.create_study(
            study_name="search",
            storage=JournalStorage(JournalFileBackend(str(journal))),
            pruner=MedianPruner() if self.prune else NopPruner(),
            direction="maximize",
            load_if_exists=True,
        )
        asked = {
            "RECIPE": self.recipe,
            "--trials": self.trials,
            "--fold": self.folds,
            "--seed": self.seed,
            "--prune": self.prune,
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

    def _sealed(self) -> dict[int, dict[int, Run]]:
        """The runs that have begun, {trial: {fold: run}}."""
        found: dict[int, dict[int, Run]] = {}
        for path in sorted(self.folder.glob("trials/*/run.json")):
            if name := re.fullmatch(r"(\d{4,})-fold(\d+)", path.parent.name):
                run = load_run(path.parent)
                if run.info["status"] == "finished" and not run.info.get("selection"):
                    raise ValueError(f"{path}: its selection is damaged; run that training again")
                found.setdefault(int(name[1]), {})[int(name[2])] = run
        return found

    def _misremembered(
        self, study: optuna.Study, sealed: Mapping[int, Mapping[int, Run]]
    ) -> str | None:
        """The first difference between the study and the records of its runs; None if there is none."""
        known: dict[int, FrozenTrial] = {}
        for trial in study.get_trials(deepcopy=False):
            number = trial.user_attrs.get("number")
            if number is None and trial.state in (TrialState.RUNNING, TrialState.FAIL):
                continue  # it was being drawn
            whole = isinstance(number, int) and trial.params.keys() == self.space.keys()
            if not whole or trial.state is TrialState.FAIL or number in known:
                return f"its trial {trial.number} is damaged"
            known[number] = trial
        for number, trial in known.items():
            runs = sealed.get(number, {})
            for run in runs.values():
                settings = flat(run.info["config"])
                if trial.params != {key: settings.get(key) for key in self.space}:
                    return f"its trial {number} has other settings than {run.folder}"
            finished = [run for run in runs.values() if run.info["status"] == "finished"]
            values = [float(run.info["selection"]["value"]) for run in finished]
            told = trial.value if trial.state is TrialState.COMPLETE else None
            if trial.state is not TrialState.RUNNING and not (told is None and self.prune):
                value = float(np.mean(values)) if len(values) == len(self.folds) else None
                if told != value:
                    return f"its trial {number} has the value {told}, and its runs {value}"
        if lost := sealed.keys() - known.keys():
            return f"its trial {min(lost)} is missing"
        return None

    def _journal(self) -> Path:
        """Optuna's file, without what a killed process may have left: its lock, and half a line."""
        path = self.folder / "study.journal"
        self.folder.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        content = path.read_bytes() if path.exists() else b""
        if content and not content.endswith(b"\n"):
            replace_file(path, content[: content.rfind(b"\n") + 1])
        return path

    def execute(self, launcher: Launcher) -> int:
        """Run the trials that are left; the exit status."""
        study = self.study()
        self._take_up(study)
        left = sorted({*range(self.trials)} - counted(study).keys())
        bar = progress_bar(total=self.trials, initial=self.trials - len(left), unit="trial")

        def work(number: int) -> None:
            self._try(study, number, launcher)

        try:
            with launcher, bar:
                for _, trial in launcher.each(work, left, bar):
                    trial.result()
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
        """Note the trials that have all their values and no result; end those that were still being drawn."""
        for trial in study.get_trials(states=[TrialState.RUNNING]):
            if "number" in trial.user_attrs:
                self._begun[trial.user_attrs["number"]] = Trial(study, trial._trial_id)
            else:
                study.tell(trial.number, state=TrialState.FAIL)

    def _ask(self, study: optuna.Study, number: int) -> Trial:
        """A trial with its values; it keeps them when it is interrupted."""
        with self._lock:
            if number not in self._begun:
                [seed] = np.random.SeedSequence([self.seed, number]).generate_state(1)
                study.sampler = TPESampler(seed=int(seed))
                trial = study.ask(self.space)
                trial.set_user_attr("number", number)
                self._begun[number] = trial
            return self._begun[number]

    def _try(self, study: optuna.Study, number: int, launcher: Launcher) -> None:
        """A trial; its value is the mean over the folds."""
        trial = self._ask(study, number)
        path = self._settings(number)
        path.parent.mkdir(exist_ok=True)
        replace_file(path, dump(self.changed(trial.params)).encode())
        found: list[float] = []
        for run in self.runs(path):
            curve = Curve(trial, run, found)
            try:
                found.append(self._value(curve, number, launcher))
            except (ConfigError, NoValueError) as error:
                trial.set_user_attr("pruned" if curve.pruned else "failed", str(error))
                study.tell(trial, state=TrialState.PRUNED)  # TPE learns from its curve alone
                return
        study.tell(trial, float(np.mean(found)))

    def _value(self, curve: Curve, number: int, launcher: Launcher) -> float:
        """The validation MAP@R by which a run's weights were chosen."""
        run = curve.run
        result = run.result() or self._train(curve, number, launcher)
        pruned = self.prune and curve.is_low()
        for checkpoint in (run.folder / "checkpoints").glob("*.pt"):
            checkpoint.unlink()  # hundreds of runs would fill the disk
        if pruned:
            raise NoValueError(curve.pruned)
        return float(result["selection"]["value"])

    def _train(self, curve: Curve, number: int, launcher: Launcher) -> dict[str, Any]:
        run, problem = curve.run, "stopped"
        if (told := run.record()) and has_diverged(told):
            raise NoValueError(told["error"])  # before it was told
        if launcher.stop.signal is None:
            with self._lock:
                check(run.command.experiment)
            was_started = launcher.run(run, curve.is_low if self.prune else None)
            if curve.pruned:
                return {}
            if (result := run.result()) is not None:
                return result
            if was_started:
                problem, record = run.problem(), run.record()
                if run.exit_status == 1 and record and record["status"] == "failed":
                    raise NoValueError(problem)
        raise UnfinishedRunError(
            f"trial {number}: {problem} ({run.log}); the same command goes on with this trial"
        )

    # --------------------------------------------------------------------------------------- report

    def _report(self, study: optuna.Study) -> int:
        done = counted(study)
        values = {n: t.value for n, t in done.items() if t.state is TrialState.COMPLETE}
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
        writer.writerow(["trial", MEASURED, *names, *self.space, "failed", "pruned"])
        for n, trial in counted(study).items():
            results = [
                run.record() if run.is_finished() else None for run in self.runs(self._settings(n))
            ]
            values = [result and result["selection"]["value"] for result in results]
            params = [trial.params[key] for key in self.space]
            value = trial.value if trial.state is TrialState.COMPLETE else None
            why = [trial.user_attrs.get(how) for how in ("failed", "pruned")]
            writer.writerow([n, value, *values, *params, *why])
        replace_file(self.folder / "trials.csv", text.getvalue().encode())


def counted(study: optuna.Study) -> dict[int, FrozenTrial]:
    """The trials of the budget that are over, by number."""
    over = study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])
    return dict(sorted((trial.user_attrs["number"], trial) for trial in over))
