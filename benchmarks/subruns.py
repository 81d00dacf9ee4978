"""Runs of `benchmarks/run.py` as processes of their own, one after the other."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType

from benchmarks.building import check_memory, try_one_step
from benchmarks.config_changes import check_same
from benchmarks.data import build_datasets
from benchmarks.experiment import Command, Experiment, parse
from benchmarks.results import Run, load_run
from benchmarks.signals import StopHandler

RUN = Path(__file__).parent / "run.py"


@dataclass(frozen=True)
class SubRun:
    """A run, its folder, and its log beside it.

    Args:
        settings: Its command line, but for --output and --resume.
    """

    settings: Sequence[str]
    folder: Path

    @property
    def arguments(self) -> list[str]:
        return [*self.settings, f"--output={self.folder}", "--resume"]

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @cached_property
    def command(self) -> Command:
        """What it will do.

        Raises:
            ConfigError: as the run itself would.
        """
        return parse(self.arguments)

    def result(self) -> Run | None:
        """The run, once it is finished.

        Raises:
            RunFolderError: if it is that of other settings.
            ValueError: if its run.json is damaged.
        """
        if self.status() != "finished":
            return None
        run = load_run(self.folder)
        check_same(run.info["config"], self.command.config, self.folder)
        return run

    def status(self) -> str | None:
        """What its run.json says; None if there is none."""
        path = self.folder / "run.json"
        if not path.exists():
            return None
        status: str = json.loads(path.read_text(encoding="utf-8"))["status"]
        return status

    def problem(self) -> str:
        """Why it ended before its end, as its log says."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        if errors:
            return errors[-1].removeprefix("error: ")
        return f"it ended at {lines[-1]!r}" if lines else "it ended before it wrote a line"


class Launcher(StopHandler):
    """Starts runs; hands a signal on to the one at work, which saves.

    Attributes:
        stopped_by: The signal that came; whoever starts runs starts no more of them then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stopped_by: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = number
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, subrun: SubRun) -> None:
        """Run it to its end, going on from its last checkpoint; its folder then tells how it ended."""
        subrun.log.parent.mkdir(parents=True, exist_ok=True)
        with subrun.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(RUN), *subrun.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's Ctrl-C reaches this process alone
            )
            if self.stopped_by is not None:  # between the caller's look and now
                self._process.send_signal(self.stopped_by)
            self._process.wait()
            self._process = None


def check(experiment: Experiment, folds: Sequence[Experiment] = ()) -> None:
    """Refuse what cannot be built or moved one step, and folds whose data are not there.

    Raises:
        ConfigError: naming the key.
    """
    check_memory(experiment)
    model = try_one_step(experiment)
    for fold in folds:
        build_datasets(fold.data, model.trunk, fair=True)
