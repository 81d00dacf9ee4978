"""The folder of one run: its lock, and its checkpoints, which are complete or absent.

The name of a checkpoint ends with the SHA-256 of its bytes, and the checkpoint names its run. It is used only if
both are right.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.console import InUseError, OwnedFolder, PrintableError, replacing
from benchmarks.records.files import file_digest
from benchmarks.settings import changes_of_results, config_changes

EMBEDDINGS = "test_embeddings.npz"
KEPT = 2  # checkpoints
PATIENCE = (
    8  # seconds: data-loader workers of a killed run share its lock until they notice, 5 s later
)
DIGEST = re.compile(r"-([0-9a-f]{64})\.pt$")


class RunFolderError(PrintableError, RuntimeError):
    """Error: the run folder cannot be used; one line with the reason and the remedy."""


class RunFolderInUseError(RunFolderError):
    """Error: another process is writing there."""


class RunFolder(OwnedFolder):
    """Exclusive use of a run folder, from construction to `close` or the end of the process.

    Incomplete files of killed processes are removed.

    Raises:
        RunFolderInUseError: if another process is writing there.
        OSError: if it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.checkpoints = path / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        try:
            super().__init__(path, patience=PATIENCE)
        except InUseError as error:
            raise RunFolderInUseError(f"output: {error}") from error
        for place in (path, self.checkpoints, path / "records"):
            for left in place.glob("*.tmp"):  # by processes that were killed
                left.unlink()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint: completely under its name, or not at all. The last two are kept."""
        _write(self.checkpoints, f"step_{step:09d}", {"step": step, **state})
        for old in saved_checkpoints(self.path)[:-KEPT]:
            old.unlink()

    def save_best(self, step: int, state: dict[str, Any]) -> None:
        """Write the best weights so far, beside those of earlier steps."""
        _write(self.checkpoints, f"best_{step:09d}", {"step": step, **state})

    def keep_best(self, step: int | None) -> None:
        """Delete all best weights except those that the checkpoint names."""
        kept = [] if step is None else _saved(self.path, "best", step)
        for path in self.checkpoints.glob("best_*.pt"):
            if path not in kept:
                path.unlink()


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse settings that differ from those that a folder was started with.

    Raises:
        RunFolderError: naming the first setting that differs.
    """
    for change in config_changes(before, now):
        raise RunFolderError(
            f"{change.key}: {folder} was started with {change.before!r}, not {change.now!r}; resume with the same "
            "settings, or choose another folder"
        )


def holds_other_files(run: Path) -> bool:
    """True if a folder without run.json is not just a run that was killed at its start."""
    return any(
        path.is_file() and path.name != ".lock" and path.suffix != ".tmp" for path in run.rglob("*")
    )


def saved_checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return _saved(run, "step")


def _saved(run: Path, kind: str, step: int | None = None) -> list[Path]:
    number = r"\d{9}" if step is None else f"{step:09d}"
    name = re.compile(rf"{kind}_{number}(-[0-9a-f]{{64}})?\.pt")
    return sorted(path for path in (run / "checkpoints").glob("*.pt") if name.fullmatch(path.name))


def load_checkpoint(run: Path, identity: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The last checkpoint of a run, on the CPU; None if there is none.

    Args:
        identity: The required entry "run" of the checkpoint, for a run that continues from it: see `OpenRun`.

    Raises:
        RunFolderError: if it is damaged or of another run; the message offers the one before it, if that is good.
    """
    paths = saved_checkpoints(run)
    if not paths:
        return None
    *before, last = paths
    try:
        return _load(run, last, identity)
    except RunFolderError as error:
        remedy = f"delete {run / 'checkpoints'} to start again from the first step"
        for path in reversed(before):
            with suppress(RunFolderError):
                step = _load(run, path, identity)["step"]
                remedy = f"delete it to continue from the one before it, of step {step}, which is undamaged"
                break
        raise RunFolderError(f"{error}; {remedy}") from error


def load_best(run: Path, step: int) -> dict[str, Any]:
    """Load the weights that validation classes chose, on the CPU.

    Raises:
        RunFolderError: if they are damaged or missing.
    """
    try:
        default = run / "checkpoints" / f"best_{step:09d}.pt"
        return _read(next(iter(_saved(run, "best", step)), default))
    except RunFolderError as error:
        raise RunFolderError(f"{error}; run that training again") from error


def _load(run: Path, path: Path, identity: Mapping[str, Any] | None) -> dict[str, Any]:
    """Load and check a checkpoint, and check the best weights that it names, if they exist."""
    state = _read(path)
    if identity is None:
        return state
    try:
        _check_identity(path, state, identity)
        for best in _saved(run, "best", state["best"]["step"]) if state["best"] else []:
            _read(best)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path}: is not a run's checkpoint ({error!r})") from error
    return state


def _check_identity(path: Path, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    if not DIGEST.search(path.name) or "run" not in state:
        raise RunFolderError(
            f"{path}: expected a checkpoint with its SHA-256 in its name and its run inside, got another file or "
            "one of an earlier version; only that version can finish the run"
        )
    saved = state["run"]
    others = config_changes({**saved, "config": {}}, {**identity, "config": {}})
    for change in [*others, *changes_of_results(saved["config"], identity["config"])]:
        raise RunFolderError(
            f"{path}: is of a run with {change.key}: {change.before!r}, expected {change.now!r}"
        )


def _write(folder: Path, stem: str, state: dict[str, Any]) -> None:
    temporary = folder / f"{stem}.tmp"
    with replacing(temporary) as file:
        torch.save(state, file)
    digest = file_digest(temporary)
    for old in folder.glob(f"{stem}*.pt"):
        old.unlink()
    temporary.replace(folder / f"{stem}-{digest}.pt")


def _read(path: Path) -> dict[str, Any]:
    """Load a checkpoint, which must have the SHA-256 of its name if that has one."""
    if path.exists() and not path.is_file():  # a pipe would never end
        raise RunFolderError(f"{path}: is not a file")
    try:
        if (said := DIGEST.search(path.name)) and said[1] != file_digest(path):
            raise RunFolderError(f"{path}: damaged (its SHA-256 is not the one in its name)")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state["step"], int):
            raise TypeError("step")
    except RunFolderError:
        raise
    except Exception as error:
        raise RunFolderError(
            f"{path}: not a readable checkpoint ({type(error).__name__})"
        ) from error
    return state
