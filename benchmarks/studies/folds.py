"""The runs of a fair evaluation: every seed on every fold."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.building import build_datasets, show_to
from benchmarks.settings import Experiment
from benchmarks.studies.sweep import Job
from benchmarks.training import try_one_step


def fold_run(settings: Sequence[str], fold: int, folder: Path) -> Job:
    """A run that trains on all folds except one, its log beside its folder."""
    log = folder.with_name(f"{folder.name}.log")
    return Job([*settings, f"--data.fold={fold}"], folder, log, folder.name)


def check(experiment: Experiment, folds: Sequence[Experiment] = ()) -> None:
    """Refuse, with a ConfigError, what cannot be built or moved a step, and folds whose data are not there."""
    found = [build_datasets(fold.data, seed=fold.seed, fair=True) for fold in folds]
    model = try_one_step(experiment)
    for fold, datasets in zip(folds, found, strict=True):
        show_to(model.trunk, datasets, fold.data)


def evaluation_runs(
    recipe: str, settings: Sequence[str], seeds: Sequence[int], folder: Path
) -> list[Job]:
    """A run for every seed and fold, known to be buildable, on data that are there.

    Raises:
        ConfigError, RunFolderError: if one is not, or is there with other settings.
    """

    def run(seed: int, fold: int) -> Job:
        arguments = ["--recipe", recipe, *settings, "--protocol=fair", "--data.split=test"]
        arguments += [f"--seed={seed}", "--evaluation.save_embeddings=true"]
        return fold_run(arguments, fold, folder / f"seed{seed}-fold{fold}")

    first = run(seeds[0], 0).command.experiment
    folds = range(first.data.folds)
    check(first, [run(seeds[0], fold).command.experiment for fold in folds])
    runs = [run(seed, fold) for seed in seeds for fold in folds]
    for one in runs:
        one.result()
    return runs
