"""Published results are found by today's code: a row that it loses would be trained again, without a word.

A result that is not found has another digest: see tools/published_names.py.
"""

import importlib
import inspect
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest

from benchmarks import study as command
from benchmarks.settings.command import parse
from benchmarks.settings.study_reading import read_study
from benchmarks.studies import kept
from benchmarks.studies.kept import Results
from benchmarks.studies.study import Study
from tools.published_names import RESULTS, STUDIES, jobs_of, settings_of

pytestmark = pytest.mark.slow


def test_every_file_of_results_is_looked_at():
    files = [path for path in RESULTS.glob("*.json") if "plans" in json.loads(path.read_text())]
    assert {path.stem for path in files} == set(STUDIES)


WITHOUT_EFFECT = ("checkpoint",)
"""Arguments that change memory, and no number."""


EARLIER = {
    "claims": {
        **{"glyphs/finetune/ensemble_horde": 22, "glyphs/finetune/ensemble": 10},
        **{"glyphs/finetune/triplet_horde": 10, "glyphs/finetune/margin_vem_paper": 10},
    }
}
"""Results that are kept of settings that the study does not ask for any more."""


@pytest.mark.parametrize("file", STUDIES)
def test_every_result_and_plan_is_found(file, tmp_path):
    results = Results(RESULTS / f"{file}.json")
    with settings_of(file) as settings:
        study = Study(read_study(STUDIES[file]), results, tmp_path / "runs", settings)
        assert study.digest in {plan["plan"] for plan in results.plans}
        found = {results.name(job) for _, job in jobs_of(study)}
    lost = Counter(name.partition(",")[0] for name in set(results.kept) - found)
    assert lost == EARLIER.get(file, {})


TEXT = re.compile("([^<>]+)</text>")


@pytest.mark.parametrize("file", ["fixed_projections", "photographs_grocery"])
def test_a_published_page_is_drawn_again(file, tmp_path, monkeypatch):
    """To the byte; of figures, which another Matplotlib may draw otherwise, all text."""
    monkeypatch.chdir(tmp_path)
    (docs := tmp_path / "docs").mkdir()
    shutil.copy(RESULTS / f"{file}.json", tmp_path)
    monkeypatch.setattr(command, "PROTOCOLS", docs / "protocols.md")
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(kept, "descends", lambda *commits: True)  # also without a history
    output = f"--output={docs / file}.md"
    with settings_of(file) as settings:
        assert command.main([STUDIES[file], "--page-only", output, "--", *settings]) == 0
    drawn = {path: path.read_text() for path in docs.iterdir()}
    assert len(drawn) >= 2
    for path, text in drawn.items():
        published = (RESULTS.parent / "docs" / path.name).read_text()
        if path.suffix == ".svg":
            published, text = (" ".join(TEXT.findall(svg)) for svg in (published, text))
        assert text and text == published, path.name


def test_recipes_with_published_results_state_every_argument():
    """Then a default may change, and no recipe changes its meaning; a null says that the class decides."""
    rows = chain(*(read_study(name).rows.values() for name in STUDIES.values()))
    recipes = sorted({row.recipe for row in rows})
    assert len(recipes) > 30
    unsaid = {
        f"{recipe}: {name}.{argument}"
        for recipe in recipes
        for name, given, defaults in described(parse(["--recipe", recipe]).config)
        for argument, default in defaults.items()
        if argument not in given and default is not None
    }
    assert unsaid == set()


def described(settings: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, given arguments and defaults of each of this project's classes in some settings."""
    if isinstance(settings, dict):
        path = str(settings.get("class_path", ""))
        if path.startswith(("pml_regularizers.", "benchmarks.")):
            module, _, name = path.rpartition(".")
            signature = inspect.signature(getattr(importlib.import_module(module), name))
            defaults = {
                argument: parameter.default
                for argument, parameter in signature.parameters.items()
                if parameter.default is not parameter.empty and argument not in WITHOUT_EFFECT
            }
            yield name, settings.get("init_args") or {}, defaults
    inner = settings.values() if isinstance(settings, dict) else settings
    if isinstance(inner, Iterable) and not isinstance(inner, str):
        for value in inner:
            yield from described(value)
