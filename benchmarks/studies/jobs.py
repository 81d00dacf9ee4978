"""Trainings as jobs: settings with a seed and a folder, and what became of them."""

import fnmatch
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.console.writing import POLL, InUseError
from benchmarks.records.files import file_digest
from benchmarks.records.results import load_run, outcome
from benchmarks.records.run_folder import RunFolder, run_changes, run_identity
from benchmarks.settings.command import Command, parse
from benchmarks.settings.differences import Change, changed, plain, settings_of_results
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Experiment
from benchmarks.settings.recipe_files import is_recipe, read_entry, recipe_names
from benchmarks.settings.study_files import digest

OURS = ("--recipe", "--seed", "--output", "--resume", "--list", "--print_config", "--help", "-h")
"""Options of benchmarks/run.py that the commands set themselves."""

IN_USE = 3  # exit status of benchmarks/run.py if another process writes the run folder


@dataclass(eq=False)
class Job:
    """A training: settings, with every default of every class, and the folder of its run."""

    experiment: Experiment
    training: str  # the recipe's
    name: str
    trusted: tuple[str, ...] = ()
    process: Any = None  # the Popen that runs it
    exit_status: int | None = None  # once it has ended, negative if a signal ended it
    log_begin: int = 0  # where its own part of the file begins
    status: str = "not started"  # a queue's word for it
    why: str | None = None  # the reason why it is not finished

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.experiment.config()

    @property
    def seed(self) -> int:
        return int(self.experiment.seed)

    @property
    def folder(self) -> Path:
        return Path(self.experiment.output or "")

    @cached_property
    def log(self) -> Path:
        """The file that it prints to."""
        return self.folder.parent / "logs" / f"{self.folder.name}.log"

    @cached_property
    def weights(self) -> str | None:
        """SHA-256 of the file of pretrained weights."""
        path = self.experiment.network.weights
        return None if path is None else _digest_of(path)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the settings and weights that can change the result, for any seed.

        Null settings are left out, like settings that older code did not have, and 1 equals 1.0.
        """
        evaluation, chosen = self.config["evaluation"], self.config["data"].get("test_classes")
        curves = [evaluation["every"] > 0, evaluation["curve_classes"]]
        found = settings_of_results(self.config).items()
        moving = {key: json.loads(plain(value)) for key, value in found}
        if isinstance(chosen, str) and Path(chosen).is_file():  # wherever it is, whatever its name
            moving["data.test_classes"] = _digest_of(Path(chosen))
        return digest(json.dumps([moving, self.weights, curves], sort_keys=True))

    def has_images(self) -> bool:
        """True if its images are at hand; Glyphs are drawn anywhere."""
        data = self.experiment.data
        return data.dataset == "glyphs" or data.root.is_dir()

    def record(self) -> dict[str, Any] | None:
        """Its run.json; None if there is none, a ValueError if it is damaged."""
        there = (self.folder / "run.json").exists()
        return load_run(self.folder).info if there else None

    def outcome(self) -> str:
        """What became of its run, see `records.outcome`; "missing" if there is none."""
        record = self.record()
        return "missing" if record is None else outcome(record)

    def changes(self) -> list[Change]:
        """Differences between the recorded run and the requested one that can change the result."""
        if (record := self.record()) is None:
            return []
        asked = {"seed": self.seed, "weights": self.weights, "config": self.config}
        return run_changes(run_identity(record), asked)

    def own_record(self) -> dict[str, Any] | None:
        """Its run.json; None if the folder holds the run of other settings, of a study that was tried with them."""
        return None if self.changes() else self.record()

    def is_finished(self) -> bool:
        """True if the folder holds this training, finished."""
        return self.outcome() == "finished" and not self.changes()

    def in_use(self) -> bool:
        """True if another process writes its folder."""
        if not (self.folder / ".lock").exists():
            return False
        try:
            RunFolder(self.folder).close()
        except InUseError:
            return True
        return False

    def problem(self) -> str:
        """Why it did not finish, in one line: as run.json tells, or else its log."""
        refused = self.exit_status in (2, IN_USE)  # before it wrote a record
        record = None if refused else self.record()
        if record is not None and record["status"] == "failed" and record.get("error"):
            return f"{record['error']}"
        log = self.log.read_bytes() if self.log.exists() else b""  # a signal may come before it
        lines = log[self.log_begin :].decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if not line.startswith("$ ")]
        errors = [line for line in said if line.startswith("error: ")]  # a launcher may say more
        return next((line for line in reversed(errors or said) if line), "it said nothing")


def wait_for(jobs: Sequence[Job], seconds: float = inf) -> None:
    """Wait until no other process writes their folders."""
    deadline = time.monotonic() + seconds
    while any(job.in_use() for job in jobs) and time.monotonic() < deadline:
        time.sleep(POLL)


def check_settings(settings: Sequence[str], ours: Sequence[str] = ()) -> None:
    """Refuse options behind -- that are not the user's to set."""
    for option in settings:
        if option.partition("=")[0] in (*OURS, *ours):
            raise ConfigError(
                f"{option}: is set by this command; leave it out behind --, and see its --help"
            )


def trainings(patterns: Sequence[str]) -> list[str]:
    """The distinct trainings of entries, tables and patterns, in their order."""
    found: dict[str, None] = {}
    for pattern in patterns:
        names = [pattern]
        if not is_recipe(pattern):  # all tables are slow to read
            every = recipe_names()
            names = fnmatch.filter(every, pattern) or fnmatch.filter(every, f"{pattern}/*") or names
        found |= dict.fromkeys(read_entry(name).training for name in names)
    return list(found)


def _digest_of(path: Path) -> str:
    """A file's SHA-256, which a study's jobs share."""
    state = path.stat()
    return _known_digest(path, state.st_mtime_ns, state.st_size)


@cache
def _known_digest(path: Path, modified: int, size: int) -> str:
    return file_digest(path)


def read(arguments: Sequence[str]) -> Command:
    """The settings of a command line, with every default of every class."""
    return parse(arguments).resolved()


def read_for(
    read: Callable[..., Command], own: Sequence[str], more: Sequence[str], at: str
) -> Command:
    """The settings of a study's row: its own ones, and more behind --.

    Args:
        at: The row's place, which an error in its own settings names.
    """

    def checked(*settings: str) -> Command:
        check_settings(settings, ["--data.split"])
        return read(*settings)

    try:
        return checked(*own, *more)
    except ConfigError as error:
        try:
            checked(*own)
        except ConfigError:
            raise ConfigError(f"{at}: {error}") from error
        raise


def make_job(
    command: Command, folder: Path, values: Mapping[str, Any], name: str | None = None
) -> Job:
    """The training of some settings in a folder, with the values at their paths; its name is the folder's, or this.

    Raises:
        ConfigError: if a value does not fit, or there is no file of weights.
    """
    experiment = replace(changed(command.experiment, values), output=folder)
    weights = experiment.network.weights
    if weights is not None and not weights.is_file():
        raise ConfigError(f"model.weights: {weights}: No such file")
    return Job(experiment, str(command.recipe), name or folder.name, command.trusted)


def plan(
    patterns: Sequence[str], seeds: Sequence[int], runs: Path, settings: Sequence[str]
) -> list[Job]:
    """A job for every training and seed, which benchmarks/run.py accepts."""
    check_settings(settings)
    commands = [read(["--recipe", recipe, *settings]) for recipe in trainings(patterns)]
    return [job for command in commands for job in seeded(command, seeds, runs)]


def seeded(command: Command, seeds: Iterable[int], runs: Path) -> list[Job]:
    """A job for every seed."""
    recipe = str(command.recipe)
    stem = recipe.replace("/", "-")
    return [
        make_job(command, runs / f"{stem}-seed{seed}", {"seed": seed}, f"{recipe}, seed {seed}")
        for seed in seeds
    ]


def trying_out(jobs: Sequence[Job]) -> Iterator[Job]:
    """Look through the data, build the parts and take a step, for each training, test set and fold; each in turn.

    Raises:
        ConfigError: if a setting does not fit.
        DatasetError: if an image cannot be read.
    """
    from accelerate import Accelerator

    from benchmarks.datasets.contents import listed_digests
    from benchmarks.records.trackers import check_trackers
    from benchmarks.training.launcher import check_launcher
    from benchmarks.training.parts import build_parts

    keys, seen = ("test_classes", "fold"), set[str]()
    some = {(job.training, *map(job.config["data"].get, keys)): job for job in reversed(jobs)}
    for job in some.values():
        try:
            check_launcher(job.experiment)
            check_trackers(job.experiment.trackers)
            _, datasets, _ = build_parts(job.experiment, Accelerator())
            listing = getattr(datasets.test, "listing", None)
            if listing is not None and listing.fingerprint not in seen:
                listed_digests(listing)
                seen.add(listing.fingerprint)
        except ConfigError as error:
            raise ConfigError(f"{job.training}: {error}") from error
        yield job
