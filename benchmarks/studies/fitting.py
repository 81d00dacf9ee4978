"""Batches that fit a folder of few classes."""

from benchmarks.building import build_datasets
from benchmarks.settings import ConfigError
from benchmarks.studies.study import Study


def fitted(study: Study) -> list[str]:
    """Settings with which a batch fits the training with the fewest classes; [] if it fits as it is.

    Raises:
        ConfigError: if the folder has too few classes to choose settings on.
    """
    row = next((row for row in study.rows if study.file.rows[row].choose), study.rows[0])
    draws = range(study.file.choice.draws if study.file.rows[row].choose else 0)
    data = study.first_job(row).command.experiment.data
    if data.dataset != "folder" or not data.root.is_dir():
        return []
    fewest = classes = build_datasets(data).train.num_classes
    if draws and classes < 2 * data.folds:
        raise ConfigError(
            f"data.root: {data.root} has {classes} classes to train on, and choosing settings needs "
            f"{2 * data.folds}, two in each of data.folds; add classes, or name fewer for the test with "
            "-- --data.test_classes"
        )
    for draw in draws:
        held = study.first_job(row, draw).command.experiment.data
        fewest = min(fewest, build_datasets(held).train.num_classes)
    size = fewest * (data.samples_per_class or data.batch_size)
    given = any(setting.startswith("--data.batch_size") for setting in study.settings)
    return [] if given or size >= data.batch_size else [f"--data.batch_size={size}"]
