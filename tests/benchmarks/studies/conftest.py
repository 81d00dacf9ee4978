"""Searches and studies in which nothing is trained."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks import fair, study
from benchmarks.reporting import study_page
from benchmarks.settings.command import Command
from benchmarks.studies import kept, search
from benchmarks.studies import study as studies
from benchmarks.studies.jobs import Job, read
from benchmarks.studies.launching import Launcher
from benchmarks.studies.search import Search, read_space
from benchmarks.training import parts
from tests.benchmarks.made import LOSSES, use_recipes
from tests.benchmarks.studies.fakes import RECIPE, SPACE, TINY, Trainings
from tests.benchmarks.studies.toy import descends


@pytest.fixture
def trainings(monkeypatch):
    """Nothing is built or trained."""
    for module in (study, search, fair):
        monkeypatch.setattr(module, "trying_out", lambda jobs: iter(()))
    monkeypatch.setattr(search, "try_one_step", lambda *arguments: None)

    def install(*arguments: Any) -> Trainings:
        fake = Trainings(*arguments)
        monkeypatch.setattr(Launcher, "place", lambda launcher, command, job: fake(job))
        return fake

    return install


@pytest.fixture
def space(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(SPACE)
    return path


@pytest.fixture
def make_search(tmp_path, space):
    def make(**changes: Any) -> Search:
        asked = {"recipe": RECIPE, "settings": TINY, "space": read_space(space), "trials": 3}
        asked |= {"seed": 0, "folder": tmp_path / "search"}
        return Search(**asked | changes)

    return make


@cache
def parsed(table: str, *arguments: str) -> Command:
    """The settings of a command line with this table of recipes: reading them takes longer than a toy study."""
    return read(arguments)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Three rows, two comparisons, and an empty working folder with a made-up history of commits.

    No figure is drawn, and no process starts.
    """
    trainings = {row: {"label": row, "losses": LOSSES} for row in ("base", "new", "third")}
    trainings["new"]["seed"] = 7
    use_recipes(tmp_path, monkeypatch, {"toy/table": {"trainings": trainings}})
    table = tmp_path / "recipes" / "toy" / "table.yaml"
    monkeypatch.setattr(studies, "read", lambda words: parsed(table.read_text(), *words))
    monkeypatch.setattr(study_page, "study_figures", lambda *about: {})
    monkeypatch.setattr(Launcher, "prepare", lambda launcher, recipe: None)
    content = {
        **{"question": "Does it help?", "recipes": "toy/table", "seeds": {"count": 2}},
        "choice": {"draws": 2, "equal_budget": False},
        "rows": {"base": {}, "new": {}, "third": {}},
        "comparisons": {
            "1": {"claim": "new is better", "better": "new", "than": "base"},
            "2": {"claim": "the third is better", "better": "third", "than": "base"},
        },
    }
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr("benchmarks.study.PROTOCOLS", tmp_path / "docs" / "protocols.md")
    monkeypatch.setattr("benchmarks.study.RESULTS", tmp_path / "docs" / "kept")
    nothing = None, SimpleNamespace(test=None), None
    monkeypatch.setattr(parts, "build_parts", lambda *arguments: nothing)
    monkeypatch.setattr(kept, "describe_code", lambda: {"commit": "registration", "dirty": False})
    monkeypatch.setattr(kept, "descends", descends)
    monkeypatch.setattr(kept, "now", lambda: "2026-02-01T00:00:00+00:00")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained_by(monkeypatch):
    """Let a function of a job stand for its training; the jobs that are trained, as they become ready."""

    def replace(train: Callable[[Job], Any]) -> list[list[Job]]:
        queues: list[list[Job]] = []

        class Trained:
            def __init__(self, ready, *about, redo_stale, **more):
                assert redo_stale  # or a choice that came out otherwise could not be trained
                self.ready, self.jobs = ready, list[Job]()

            def run(self) -> None:
                while jobs := [job for job in self.ready() if job not in self.jobs]:
                    self.jobs += jobs
                    queues.append(jobs)
                    for job in jobs:
                        train(job)

        monkeypatch.setattr("benchmarks.studies.queue.Queue", Trained)
        return queues

    return replace
