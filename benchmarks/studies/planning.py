"""From recipes, seeds and folds to jobs, each of which `benchmarks/run.py` accepts; nothing is written."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from benchmarks.building import build_datasets, show_to
from benchmarks.settings import ConfigError, Experiment, read_entry, recipe_names
from benchmarks.studies.jobs import Job
from benchmarks.training import try_one_step

OURS = ("--recipe", "--seed", "--output", "--resume", "--list", "--print_config", "--help", "-h")
"""Options of benchmarks/run.py that the commands set themselves."""


def check_settings(settings: Sequence[str], ours: Sequence[str] = OURS) -> None:
    """Refuse options behind -- that are not the user's to set."""
    for option in settings:
        if option.partition("=")[0] in ours:
            raise ConfigError(
                f"{option}: is set by this command; leave it out behind --, and see its --help"
            )


def trainings(patterns: Sequence[str]) -> list[str]:
    """The distinct trainings of entries, tables and patterns, in their order."""
    found: dict[str, None] = {}
    everything = recipe_names()
    for pattern in patterns:
        names = fnmatch.filter(everything, pattern) or fnmatch.filter(everything, f"{pattern}/*")
        found |= dict.fromkeys(read_entry(name).training for name in names or [pattern])
    return list(found)


def plan(
    patterns: Sequence[str], seeds: Sequence[int], runs: Path, settings: Sequence[str]
) -> list[Job]:
    """A job for every training and seed, its log in a folder of logs."""
    check_settings(settings)
    jobs = []
    for training in trainings(patterns):
        for seed in seeds:
            name = f"{training.replace('/', '-')}-seed{seed}"
            arguments = ["--recipe", training, f"--seed={seed}", *settings]
            log = runs / "logs" / f"{name}.log"
            jobs.append(Job(arguments, runs / name, log, f"{training}, seed {seed}"))
            weights = jobs[-1].command.experiment.model.weights
            if weights is not None and not weights.is_file():
                raise ConfigError(f"model.weights: {weights}: No such file")
    return jobs


def plan_folds(
    recipe: str, settings: Sequence[str], seeds: Sequence[int], folder: Path
) -> list[Job]:
    """A job for every seed and fold, known to be buildable, on data that are there.

    Raises:
        ConfigError, RunFolderError: if one is not, or is there with other settings.
    """

    def of_seed(seed: int, folds: Sequence[int]) -> list[Job]:
        arguments = ["--recipe", recipe, *settings, "--protocol=fair", "--data.split=test"]
        arguments += [f"--seed={seed}", "--evaluation.save_embeddings=true"]
        return fold_jobs(arguments, folds, folder / f"seed{seed}")

    [first] = of_seed(seeds[0], [0])
    folds = range(first.command.experiment.data.folds)
    jobs = [job for seed in seeds for job in of_seed(seed, folds)]
    check([job.command.experiment for job in jobs[: len(folds)]])
    for job in jobs:
        job.result()
    return jobs


def fold_jobs(settings: Sequence[str], folds: Sequence[int], name: Path) -> list[Job]:
    """A training on all folds except one, for each of these; its log lies beside its folder."""
    jobs = []
    for fold in folds:
        folder = name.with_name(f"{name.name}-fold{fold}")
        log = folder.with_name(f"{folder.name}.log")
        jobs.append(Job([*settings, f"--data.fold={fold}"], folder, log, folder.name))
    return jobs


def check(experiments: Sequence[Experiment], data: bool = True) -> None:
    """Refuse, with a ConfigError, what cannot be built or moved a step, and folds whose data are not there."""
    found = [build_datasets(e.data, seed=e.seed, fair=True) for e in experiments if data]
    model = try_one_step(experiments[0])
    for experiment, datasets in zip(experiments, found, strict=False):
        show_to(model.trunk, datasets, experiment.data)
