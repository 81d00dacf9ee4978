"""A study of three rows and two comparisons, in a working folder of its own: the fixture `toy`."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import yaml

from benchmarks import study
from benchmarks.settings.study_reading import read_study
from benchmarks.studies.jobs import Job
from benchmarks.studies.kept import Results
from benchmarks.studies.study import Study
from tests.benchmarks.made import write_record

RATE = "optimization.learning_rate"
BETA = "losses[0].loss.init_args.beta"
COMMITS = {"old": None, "registration": "old", "new": "registration"}
"""Commits that the tests make up, each with the one before."""


def descends(commit: str | None, ancestor: str | None) -> bool:
    return commit is not None and (commit == ancestor or descends(COMMITS.get(commit), ancestor))


def change(**changes: Any) -> None:
    content = yaml.safe_load(Path("toy.yaml").read_text())
    Path("toy.yaml").write_text(yaml.safe_dump(content | changes))


def command(*options: str) -> int:
    return study.main(["toy.yaml", "--output=toy.md", *options])


def finish(job: Job, recall: float, **changes: Any) -> None:
    about = {"label": job.training.rpartition("/")[2], "seed": job.seed, "config": job.config}
    metrics = {"recall_at_1": recall, "mean_average_precision_at_r": recall / 2}
    measured = {"metrics": metrics, "hardware": {"processor": "A", "cores": 2, "gpus": []}}
    begun = {"started": "2026-03-01T00:00:00+00:00", "commit": "new", "wall_time_s": 3600.0}
    write_record(job.folder, **about | measured | begun | changes)


About = namedtuple("About", "row split seed fold rate beta")


def about(job: Job) -> About:
    data, rate = job.config["data"], job.config["optimization"]["learning_rate"]
    beta = job.config["losses"][0]["loss"]["init_args"]["beta"]
    row = job.training.rpartition("/")[2]
    return About(row, data["split"], job.seed, data["fold"], rate, beta)


def kept_study() -> Study:
    """The study, with the results that its command kept."""
    return Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs"))
