"""Trainings that take no process of their own, or none at all."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from benchmarks.run import main as run_in_process
from benchmarks.studies import launching, planning, search
from benchmarks.studies.jobs import Job
from benchmarks.studies.launching import Launcher
from benchmarks.studies.search import Search
from benchmarks.studies.search_space import read_space
from tests.benchmarks.studies.fakes import RECIPE, SPACE, TINY, Make, Trainings


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainings]:
    """Nothing is built or trained."""
    for module in (planning, search):
        monkeypatch.setattr(module, "check", lambda *arguments, **options: None)

    def install(*arguments: Any) -> Trainings:
        fake = Trainings(*arguments)
        monkeypatch.setattr(Launcher, "run", lambda launcher, job: fake(job))
        return fake

    return install


class MainThread(Executor):
    """The runner handles signals, which a thread may not."""

    def submit(self, work: Any, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Real runs, without the seconds that a new process takes to import torch."""
    done = []

    def run(launcher: Launcher, job: Job) -> bool:
        done.append(job)
        arguments = [*job.settings, f"--output={job.folder}", "--resume"]
        job.exit_status = run_in_process(arguments)
        return True

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(Launcher, "run", run)
    monkeypatch.setattr(launching, "ThreadPoolExecutor", lambda jobs: MainThread())
    return done


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(SPACE)
    return path


@pytest.fixture
def make_search(tmp_path: Path, space: Path) -> Make:
    def make(**changes: Any) -> Search:
        asked = {"recipe": RECIPE, "settings": TINY, "space": read_space(space), "trials": 4}
        asked |= {"some_folds": None, "seed": 0, "folder": tmp_path / "search"}
        return Search(**asked | changes)

    return make
