"""The runs of a fair evaluation: every seed on every fold."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from benchmarks.building import build_datasets, parse_resolved
from benchmarks.console import progress_bar
from benchmarks.records import check_same
from benchmarks.settings import Command, ConfigError, Experiment
from benchmarks.studies.launching import Launcher, SubRun
from benchmarks.training import try_one_step


@dataclass
class FoldRun(SubRun):
    """A run that trains on all folds except one."""

    @cached_property
    def command(self) -> Command:
        return parse_resolved([*self.settings, f"--output={self.folder}"])

    def result(self) -> dict[str, Any] | None:
        """Its run.json, once it is finished; a RunFolderError if it is that of other settings."""
        if not self.is_finished() or (record := self.record()) is None:
            return None
        check_same(record["config"], self.command.config, self.folder)
        return record


def fold_run(settings: Sequence[str], fold: int, folder: Path) -> FoldRun:
    """A run, with its log beside its folder."""
    log = folder.with_name(f"{folder.name}.log")
    return FoldRun([*settings, f"--data.fold={fold}"], folder, log)


def check(experiment: Experiment, folds: Sequence[Experiment] = ()) -> None:
    """Refuse, with a ConfigError, what cannot be built or moved a step, and folds whose data are not there."""
    model = try_one_step(experiment)
    for fold in folds:
        build_datasets(fold.data, model.trunk, seed=fold.seed, fair=True)


@contextmanager
def exclusively(folder: Path) -> Iterator[None]:
    """Nobody else works in the folder meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout as error:
        raise ConfigError(
            f"--runs: {folder} is in use by another process; wait for it, or choose another"
        ) from error
    with lock:
        yield


def evaluation_runs(
    recipe: str, settings: Sequence[str], seeds: Sequence[int], folder: Path
) -> list[FoldRun]:
    """A run for every seed and fold, known to be buildable, on data that are there."""

    def run(seed: int, fold: int) -> FoldRun:
        arguments = ["--recipe", recipe, *settings, "--protocol=fair", "--data.split=test"]
        arguments += [f"--seed={seed}", "--evaluation.save_embeddings=true"]
        return fold_run(arguments, fold, folder / f"seed{seed}-fold{fold}")

    first = run(seeds[0], 0).command.experiment
    folds = range(first.data.folds)
    check(first, [run(seeds[0], fold).command.experiment for fold in folds])
    return [run(seed, fold) for seed in seeds for fold in folds]


def train_all(runs: Sequence[FoldRun]) -> tuple[list[str], int | None]:
    """Run what is not finished; what failed and why, and the signal that stopped it."""
    waiting = [run for run in runs if run.result() is None]
    failed = []
    bar = progress_bar(total=len(runs), initial=len(runs) - len(waiting), desc="runs", unit="run")
    with Launcher() as launcher, bar:
        for run in waiting:
            child = launcher.run(run)
            if launcher.stop.signal is not None:
                break
            try:
                problem = child.problem() if run.result() is None else None
            except ValueError as error:
                problem = str(error)
            if problem is not None:
                failed.append(f"{run.folder.name}: {problem} ({run.log})")
            bar.update()
    return failed, launcher.stop.signal
