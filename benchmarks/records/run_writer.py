"""Writes a run's folder, which is locked and compared with the settings that it was started with."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from benchmarks.console.writing import InUseError, replace_file
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.records.files import file_digest, write_json
from benchmarks.records.provenance import describe_session, look_through
from benchmarks.records.results import load_run
from benchmarks.records.run_folder import (
    RunFolder,
    RunFolderError,
    check_same,
    load_checkpoint,
    run_changes,
    run_identity,
)
from benchmarks.records.steps import Row, StepTables
from benchmarks.records.trackers import PROJECT, Trackers
from benchmarks.settings.command import Command
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.yaml_files import dump


def on_main(work: Callable[..., Any]) -> Callable[..., Any]:
    """A method that the main process does alone; all processes return its result, or raise its error."""

    @wraps(work)
    def everywhere(self: "RunWriter", *arguments: Any) -> Any:
        result, error = None, None
        if self._accelerator.is_main_process:
            try:
                result = work(self, *arguments)
            except (ConfigError, InUseError, RunFolderError) as raised:
                error = raised
            except OSError as raised:
                place = raised.filename or self.path
                error = RunFolderError(f"output: {place}: {raised.strerror or raised}")
            except ValueError as raised:
                error = RunFolderError(str(raised))
        result, error = broadcast_object_list([result, error])
        if error is not None:
            self.close()
            raise error
        return result

    return everywhere


class RunWriter:
    """Writer of a run's folder, which it opens; all processes create this object, and only the main one writes.

    Attributes:
        path: The folder.
        info: run.json, on the main process; empty before `restore` if there is none.
        finished: True if nothing is left to do.
        identity: See `run_identity`; known from `restore` on.
        begun: True from `begin` on, on the main process.

    Raises:
        RunFolderError: on all processes, if the folder holds another run or other files.
        InUseError: on all processes, if another process is writing there.
    """

    identity: dict[str, Any]
    begun = False

    def __init__(self, command: Command, argv: Sequence[str], accelerator: Accelerator) -> None:
        assert command.experiment.output is not None
        self.path = command.experiment.output
        self.info: dict[str, Any] = {}
        self._folder: RunFolder | None = None
        self._steps: StepTables | None = None
        self._command, self._argv, self._accelerator = command, argv, accelerator
        self._trackers = Trackers(accelerator, command.experiment.trackers)
        self.finished: bool = self._open()

    @on_main
    def _open(self) -> bool:
        """True if the folder holds this run, finished; a folder without a run stays as it is until `restore`."""
        if not (self.path / "run.json").exists():
            left = (".lock", ".tmp")  # by a run that was killed at its start, as a tracker's folder
            files = (path for path in self.path.rglob("*") if path.is_file())
            inside = (path for path in files if not path.name.endswith(left))
            if any(path.relative_to(self.path).parts[0] != PROJECT for path in inside):
                raise RunFolderError(
                    f"output: {self.path} holds files but no run.json; choose an empty or new folder"
                )
            return False
        self._folder = RunFolder(self.path)
        if not self._command.resume:
            raise self._already()
        self.info = load_run(self.path).info
        experiment = self._command.experiment
        asked = {"seed": experiment.seed, "config": self._command.config}
        weights = experiment.network.weights
        if weights is not None and weights.is_file():
            asked["weights"] = file_digest(weights)
        check_same(run_changes(run_identity(self.info), asked, recorded=True), self.path)
        return bool(self.info["status"] == "finished")

    def _already(self) -> RunFolderError:
        line = f"output: {self.path} already holds a run; add --resume to continue it"
        return RunFolderError(f"{line}, or choose another --output")

    def restore(self, about: dict[str, Any], test: Glyphs | ImageSet) -> dict[str, Any] | None:
        """The last checkpoint; None if there is none, and a new run begins.

        Args:
            about: Entries of run.json that describe data and weights.
            test: The tested images, whose files the main process looks through.

        Raises:
            RunFolderError: on all processes, if an image cannot be used or is not the one that the run was started
                with, or if the checkpoint is damaged or of another run.
        """
        self.identity = self._compare(about, test)
        return load_checkpoint(self.path, self.identity)

    @on_main
    def _compare(self, about: dict[str, Any], test: Glyphs | ImageSet) -> dict[str, Any]:
        """The run's identity, after the images of a resumed one were compared with those it began with."""
        command, experiment = self._command, self._command.experiment
        about["data"] |= look_through(experiment.data, test)
        config = command.config
        identity = run_identity({"seed": experiment.seed, "config": config, **about})
        if self.info:
            changes = run_changes(run_identity(self.info), identity, recorded=True)
            for change in changes:
                if change.key in ("data", "content"):
                    raise RunFolderError(
                        f"data.root: an image is not the one that {self.path} was started with (another "
                        f"{change.key}); restore it, or choose another --output"
                    )
            check_same(changes, self.path)
        else:
            self._folder = RunFolder(self.path)
            if (self.path / "run.json").exists():  # of a process that was faster
                raise self._already()
            self.info = {"name": self.path.name, "recipe": command.recipe, "config": config}
            self.info |= {"wall_time_s": 0.0, "metrics": {}, "before_training": None}
        self.info |= {
            "label": experiment.label,
            "seed": experiment.seed,
            "protocol": experiment.protocol,
            "steps": experiment.optimization.steps,
            **about,
        }
        return identity

    @on_main
    def begin(self, saved: Mapping[str, Any] | None) -> None:
        """Cut the records back to the checkpoint that the run continues from, and note that it is running.

        Raises:
            ConfigError: on all processes, if a tracker does not start.
            RunFolderError: on all processes, if the records do not match the checkpoint.
        """
        session = describe_session(self._argv, self._accelerator.num_processes)
        step, before = saved["step"] if saved else 0, self.info.get("sessions", [])
        work: dict[str, Any] = {"status": "running", "error": None, "traceback": None}
        work["sessions"] = [*before, {"from_step": step, **session}]
        trackers = self.info.get("trackers", {})
        if tracked := self._trackers.start(
            self.path.name, self.identity["config"], trackers, step if saved else None
        ):
            work["trackers"] = tracked
        if not before:  # the sessions show whether other code or another machine resumed it
            # run.json first: if killed from here on, the folder is a run that --resume can continue.
            self.update(**session, **work)
        self._steps = StepTables(self.path / "records", saved and saved["records"])
        assert self._folder is not None
        self._folder.remove_old(saved and saved["best"])
        replace_file(self.path / "config.yaml", dump(self.identity["config"]).encode())
        self.update(**work)
        self.begun = True

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint."""
        if self._folder is not None and self._steps is not None:
            about = {"run": self.identity, "records": self._steps.ends()}
            self._folder.save(step, state | about)

    def save_best(self, step: int, weights: dict[str, Any]) -> None:
        """Write the best weights so far."""
        if self._folder is not None:
            self._folder.save_best(step, weights | {"run": self.identity})

    def log(self, rows: dict[str, list[Row]]) -> None:
        """Write rows of (step, values) by table; then they go to the trackers."""
        if self._steps is not None:
            for table, new in rows.items():
                self._steps.log_rows(table, new)
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
        """Let others write the folder."""
        if self._folder is not None:
            self._folder.close()
