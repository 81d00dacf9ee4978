"""The owner of a folder of runs: the study that made them."""

from pathlib import Path

from benchmarks.console.writing import replace_file
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.study_reading import study_names

OWNER = "study.txt"
"""File in the folder."""


def _name(study: str) -> str:
    """The path of a study's file, which tells it from others of its name; the name of one of the runner's own."""
    return study if study in study_names() else f"{Path(study).resolve()}"


def check_owner(runs: Path, study: str) -> None:
    """Raise a ConfigError if the folder is that of another study of this name, whose file is still there."""
    before = (runs / OWNER).read_text().strip() if (runs / OWNER).is_file() else ""
    if before and before != _name(study) and (before in study_names() or Path(before).exists()):
        raise ConfigError(
            f"--runs: {runs} holds the runs of {before}, not of {study}; give --runs and --output, or another name"
        )


def own(runs: Path, study: str) -> None:
    """Make the folder, and write the study's name into it."""
    runs.mkdir(parents=True, exist_ok=True)
    replace_file(runs / OWNER, f"{_name(study)}\n".encode())
