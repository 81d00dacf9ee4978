"""The record of a run, for those who read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records.files import file_digest, read_json

REQUIRED = {
    *("label", "seed", "protocol", "status", "steps", "config", "data"),
    *("metrics", "hardware", "wall_time_s"),
}
"""Entries of run.json that older code may not have written, and that every reader needs."""


@dataclass(frozen=True)
class Run:
    """A run that was made, as its folder tells: the contents of its run.json."""

    folder: Path
    info: dict[str, Any]

    @property
    def label(self) -> str:
        return str(self.info["label"])

    @property
    def seed(self) -> int:
        return int(self.info["seed"])

    @property
    def outcome(self) -> str:
        return outcome(self.info)

    def file(self, name: str) -> Path:
        """Return the path of a file of the run, which may be missing.

        Raises:
            ValueError: if it is not the file that the run ended with.
        """
        path, wanted = self.folder / name, self.info.get("files", {}).get(name)
        if wanted and path.exists() and file_digest(path) != wanted:
            raise ValueError(
                f"{path}: is damaged (run.json has the SHA-256 {wanted}); put it back, or run that training again"
            )
        return path

    def table(self, name: str) -> dict[str, list[float]]:
        """Read a table of its records, as `read_table` does; raises ValueError as `file` does."""
        from benchmarks.records.steps import read_table  # imports torch

        return read_table(self.file(f"records/{name}.csv").parent, name)


class NonFiniteError(ValueError):
    """Error: a loss, weights or embeddings are NaN or infinite; with the same settings, they would be so again."""


def digests(folder: Path) -> dict[str, str]:
    """SHA-256, by path in the folder, of the files that reports and exports read beside run.json."""
    patterns = ("config.yaml", "*.npz", "records/*.csv")
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    return {str(path.relative_to(folder)): file_digest(path) for path in paths}


DONE = ("finished", "diverged")
"""Outcomes after which nothing is left to run."""


def outcome(info: Mapping[str, Any]) -> str:
    """The status of a run; "diverged" if it failed by a loss or an embedding that was not finite.

    With the same settings, it would diverge again.
    """
    has_diverged = info["status"] == "failed" and info.get("diverged")
    return "diverged" if has_diverged else str(info["status"])


def has_thresholds(info: Mapping[str, Any]) -> bool:
    """True if the test had enough images for some threshold: of two images, or of one and its nearest."""
    tests = [info.get(name) or {} for name in ("verification", "identification")]
    return any(row["threshold"] is not None for test in tests for row in test.get("rates", []))


def about_as_long(info: Mapping[str, Any], steps: int) -> bool:
    """True if validation classes chose a run's length, and chose about so many steps."""
    chosen = (info.get("selection") or {"step": 0})["step"]
    return bool(chosen <= 2 * steps <= 4 * chosen)


def load_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ValueError: if its run.json is missing, unreadable or damaged.
    """
    path = folder / "run.json"
    try:
        info = read_json(path)
        if missing := REQUIRED - info.keys():
            raise ValueError(f"it has no {min(missing)}")
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; expected a folder of benchmarks/run.py"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path}: is damaged or of an earlier version ({error}); run that training again"
        ) from error
    return Run(folder, info)
