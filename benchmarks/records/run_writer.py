"""Writes a run's folder, which is locked and compared with the settings that it was started with."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from benchmarks.console.writing import InUseError, replace_file
from benchmarks.records.files import write_json
from benchmarks.records.provenance import describe_session
from benchmarks.records.results import load_run
from benchmarks.records.run_folder import (
    RunFolder,
    RunFolderError,
    check_same,
    run_changes,
    run_identity,
)
from benchmarks.records.steps import Row, StepTables
from benchmarks.records.trackers import Trackers
from benchmarks.settings.command import Command
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.yaml_files import dump


class RunWriter:
    """Writer of a run's folder; all processes create this object, and only the main process writes.

    Args:
        about: Entries of run.json that describe data and weights.
        look_through: Gives more entries of "data", such as the SHA-256 of the images' bytes; called by the main
            process.

    Attributes:
        path: The folder.
        info: run.json, on the main process.
        finished: True if nothing is left to do.
        identity: See `run_identity`.

    Raises:
        RunFolderError: on all processes, if the folder holds another run.
        InUseError: on all processes, if another process is writing there.
    """

    def __init__(
        self,
        command: Command,
        argv: Sequence[str],
        accelerator: Accelerator,
        about: dict[str, Any],
        look_through: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        assert command.experiment.output is not None
        self.path = command.experiment.output
        self.info: dict[str, Any] = {}
        self.folder: RunFolder | None = None
        self._steps: StepTables | None = None
        self._accelerator, self._argv = accelerator, argv
        self._trackers = Trackers(accelerator, command.experiment.trackers)
        seed = {"seed": command.experiment.seed}
        self.identity = run_identity(seed | about, command.config)
        self._agree(lambda: self._claim(command, about, look_through))
        shared = [self.info.get("status") == "finished", about["data"].get("content")]
        self.finished, self.identity["content"] = broadcast_object_list(shared)

    def _agree(self, work: Callable[[], None]) -> None:
        """Do something on the main process; all processes raise its error."""
        error: Exception | None = None
        if self._accelerator.is_main_process:
            try:
                work()
            except (ConfigError, InUseError, RunFolderError) as raised:
                error = raised
            except OSError as raised:
                place = raised.filename or self.path
                error = RunFolderError(f"output: {place}: {raised.strerror or raised}")
            except ValueError as raised:
                error = RunFolderError(str(raised))
        [error] = broadcast_object_list([error])
        if error is not None:
            self.close()
            raise error

    def _claim(
        self, command: Command, about: dict[str, Any], look_through: Callable[[], dict[str, Any]]
    ) -> None:
        used = (self.path / "run.json").exists()
        left = (".lock", ".tmp")  # by a run that was killed at its start
        inside = (path for path in self.path.rglob("*") if not path.name.endswith(left))
        if not used and any(path.is_file() for path in inside):
            raise RunFolderError(
                f"output: {self.path} holds files but no run.json; choose an empty or new folder"
            )
        if command.resume or not used:
            about["data"] |= look_through()
        self.folder = RunFolder(self.path)
        if used and not command.resume:
            raise RunFolderError(
                f"output: {self.path} already holds a run; add --resume to continue it, or choose another "
                "--output"
            )
        if used:
            self.info = load_run(self.path).info
            now = self.identity | {"content": about["data"].get("content")}
            changes = run_changes(run_identity(self.info), now, recorded=True)
            images = [change.key for change in changes if change.key in ("data", "content")]
            check_same((change for change in changes if change.key not in images), self.path)
            for key in images:
                raise RunFolderError(
                    f"data.root: an image is not the one that {self.path} was started with (another {key}); "
                    "restore it, or choose another --output"
                )
        else:
            self.info = {"name": self.path.name, "recipe": command.recipe, "config": command.config}
            self.info |= {"wall_time_s": 0.0, "metrics": {}, "before_training": None}
        experiment = command.experiment
        self.info |= {
            "label": experiment.label,
            "seed": experiment.seed,
            "protocol": experiment.protocol,
            "steps": experiment.optimization.steps,
            **about,
        }

    def begin(self, saved: Mapping[str, Any] | None) -> None:
        """Cut the records back to the checkpoint that the run continues from, and note that it is running.

        Raises:
            ConfigError: on all processes, if a tracker does not start.
            RunFolderError: on all processes, if the records do not match the checkpoint.
        """
        self._agree(lambda: self._begin(saved))

    def _begin(self, saved: Mapping[str, Any] | None) -> None:
        session = describe_session(self._argv, self._accelerator.num_processes)
        step, before = saved["step"] if saved else 0, self.info.get("sessions", [])
        work: dict[str, Any] = {"status": "running", "error": None, "traceback": None}
        work["sessions"] = [*before, {"from_step": step, **session}]
        trackers = self.info.get("trackers", {})
        if tracked := self._trackers.start(self.path.name, self.identity["config"], trackers):
            work["trackers"] = tracked
        if not before:  # the sessions show whether other code or another machine resumed it
            # run.json first: if killed from here on, the folder is a run that --resume can continue.
            self.update(**session, **work)
        self._steps = StepTables(
            self.path / "records",
            step=step or -1,  # a run without a checkpoint keeps nothing
            ends=saved["records"] if saved else {},
        )
        assert self.folder is not None
        self.folder.remove_old(saved and saved["best"])
        replace_file(self.path / "config.yaml", dump(self.identity["config"]).encode())
        self.update(**work)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint."""
        if self.folder is not None and self._steps is not None:
            about = {"run": self.identity, "records": self._steps.ends()}
            self.folder.save(step, state | about)

    def save_best(self, step: int, weights: dict[str, Any]) -> None:
        """Write the best weights so far."""
        if self.folder is not None:
            self.folder.save_best(step, weights | {"run": self.identity})

    def log(self, rows: dict[str, list[Row]]) -> None:
        """Write rows of (step, values) by table; then they go to the trackers."""
        if self._steps is not None:
            for table, of_table in rows.items():
                self._steps.log_rows(table, of_table)
            self._trackers.log(rows)

    def finish(self, step: int, metrics: Mapping[str, float], **changes: Any) -> None:
        """Write the result, from the main process."""
        self._trackers.log({"test": [(step, metrics)]})
        self.update(status="finished", metrics=metrics, **changes)

    def update(self, **changes: Any) -> None:
        """Change entries of run.json."""
        if self._accelerator.is_main_process:
            self.info.update(changes)
            write_json(self.path / "run.json", self.info)

    def close(self) -> None:
        """Flush the records and let others write the folder."""
        if self._steps is not None:
            with suppress(OSError):  # a full disk, which has been reported
                self._steps.close()
        if self.folder is not None:
            self.folder.close()
