"""Batches that fit a folder of few classes."""

from benchmarks.building import build_datasets
from benchmarks.settings import ConfigError
from benchmarks.studies.study import Study


def fitted(study: Study) -> list[str]:
    """Settings with which a batch fits the training of the study with the fewest classes; [] if it fits as it is.

    Raises:
        ConfigError: if the folder has too few classes to choose settings on.
    """
    row = next((row for row in study.rows if study.file.rows[row].choose), study.rows[0])
    draws = study.file.choice.draws if study.file.rows[row].choose else 0
    first = study.first_job(row)
    data = first.command.experiment.data
    if data.dataset != "folder" or not data.root.is_dir():
        return []
    classes = build_datasets(data, seed=first.seed).train.num_classes
    if draws and classes < 2 * data.folds:
        raise ConfigError(
            f"data.root: {data.root} has {classes} classes to train on, and choosing settings needs "
            f"{2 * data.folds}, two in each of data.folds ({data.folds}); add classes, or name fewer for the test "
            "with -- --data.test_classes"
        )
    choosing = [study.first_job(row, draw).command.experiment for draw in range(draws)]
    found = [build_datasets(one.data, seed=one.seed).train.num_classes for one in choosing]
    fewest, per_class = min([classes, *found]), data.samples_per_class
    given = any(setting.startswith("--data.batch_size") for setting in study.settings)
    if given or per_class is None or fewest * per_class >= data.batch_size:
        return []
    return [f"--data.batch_size={fewest * per_class}"]
