"""Batches that fit a folder of few classes."""

from benchmarks.building import build_datasets
from benchmarks.settings import ConfigError
from benchmarks.studies.study import Study


def fitted(study: Study) -> list[str]:
    """Settings with which a batch fits the training with the fewest classes; [] if it fits as it is.

    Raises:
        ConfigError: if the folder has too few classes to choose settings on.
    """
    data = study.first_job(study.rows[0]).command.experiment.data
    if data.dataset != "folder" or not data.root.is_dir():
        return []
    choosing = [row for row in study.rows if study.file.rows[row].choose]
    # The first row of each test set, of those that choose if there are any.
    blocks = {study.file.tested_on(row): row for row in reversed([*choosing, *study.rows])}
    fewest = min(_fewest(study, row) for row in blocks.values())
    size = fewest * (data.samples_per_class or data.batch_size)
    given = any(setting.startswith("--data.batch_size") for setting in study.settings)
    return [] if given or size >= data.batch_size else [f"--data.batch_size={size}"]


def _fewest(study: Study, row: str) -> int:
    """The classes of a row's smallest training."""
    draws = range(study.file.choice.draws if study.file.rows[row].choose else 0)
    data = study.first_job(row).command.experiment.data
    classes = build_datasets(data).train.num_classes
    if draws and classes < 2 * data.folds:
        raise ConfigError(
            f"data.root: {data.root} has {classes} classes to train on, and choosing settings needs "
            f"{2 * data.folds}, two in each of data.folds; add classes, or name fewer for the test with "
            "-- --data.test_classes"
        )
    held = (study.first_job(row, draw).command.experiment.data for draw in draws)
    return min([classes, *(build_datasets(of).train.num_classes for of in held)])
