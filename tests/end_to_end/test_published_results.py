"""Published results are found by today's code: a row that it loses would be trained again, without a word.

A result that is not found has another digest: see `benchmarks/settings/former.py`. Photographs are not needed: what
counts of them is in the digests of the lists of test classes and of the trunk's weights.
"""

import importlib
import inspect
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from benchmarks import study as command
from benchmarks.settings.command import parse
from benchmarks.settings.study_reading import read_study
from benchmarks.studies import jobs, kept
from benchmarks.studies.kept import Results, name_of
from benchmarks.studies.study import Study

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[2] / "results"
PHOTOGRAPHS = "photographs_"

OF_PHOTOGRAPHS = (
    *("cars", "cars_longer", "cars_orders", "cars_others", "cars_tuned", "birds_whole"),
    *("grocery", "grocery_controls", "grocery_jrs", "grocery_rates", "jrs_butterflies"),
    *("mechanism_birds", "mechanism_butterflies", "mechanism_losses", "heads"),
)
STUDIES = {
    **{"claims": "glyphs", "fixed_projections": "glyphs_fixed"},
    **{f"{PHOTOGRAPHS}{name}": f"photographs/{name}" for name in OF_PHOTOGRAPHS},
}

WEIGHTS = "2b4a5f7e9a1870e2c41efd811c5b04f7e5843b32900a338e3f181204a324f9c6"
BIRDS_WEIGHTS = "641a988bb298218421fbb803aa7e0368488e9b100f087f67296d3df14a3be604"
"""The same without their classifier, as a bundle has them."""

TEST_CLASSES = {
    "birds.txt": "40738155192237cb00d7cd5eaf1b30c8d1713e1926d994a23d5ed291e4d4dcb6",
    "butterflies.txt": "7a20bff0af44e81091ecc709db8f7320a09349bb017c1631808741bb6e1bc002",
    "cars.txt": "05469a8cb0bca61ff1554fd6cd780a39a9658147dd0b2574d92d8fc1b11a9334",
    "flowers.txt": "3dd014459a5ec27e04f5c2d89401c1a013e52b2612ab721bf59b3418f7705122",
    "grocery_test_classes_0.txt": "d90085ce828c374bf1836de2387599a7d700570f3a4c28ab080d36a7d5d7a230",
    "grocery_test_classes_1.txt": "aa33f5bafdbe9d0c770cc085f76f50ee598289c2709a89d787dd50ca7cb555a8",
    "grocery_test_classes_2.txt": "6e01a0222e2e1ed829732f1974f7e4dbd4d4ff31030932212af31601d6bf0218",
}


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


def settings_of(file: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that a study was started with, as far as its digests know them."""
    if not file.startswith(PHOTOGRAPHS):
        return []
    monkeypatch.chdir(folder)
    for name in TEST_CLASSES:
        Path(name).touch()
    weights = BIRDS_WEIGHTS if "birds_whole" in file else WEIGHTS
    monkeypatch.setattr(jobs, "file_digest", lambda path: TEST_CLASSES.get(path.name, weights))
    kinds = {kind: kind for kind in ("cars", "birds", "butterflies")}
    kinds |= {"mechanism_losses": "butterflies", "heads": "flowers"}
    test_classes = [
        f"--data.test_classes={kind}.txt" for word, kind in kinds.items() if word in file
    ]
    return ["--data.root=photographs", "--model.trunk_args={}", *test_classes]


@pytest.mark.parametrize("file", STUDIES)
def test_every_result_and_plan_is_found(file, tmp_path, monkeypatch):
    results = Results(RESULTS / f"{file}.json")
    settings = settings_of(file, tmp_path, monkeypatch)
    study = Study(read_study(STUDIES[file]), results, tmp_path / "runs", settings)
    assert study.digest in {plan["plan"] for plan in results.plans}
    found = {
        name_of(job)
        for row in study.rows
        for job in chain(*study.candidates(row).values(), study.tests(row))
    }
    lost = Counter(name.partition(",")[0] for name in set(results.kept) - found)
    assert lost == EARLIER.get(file, {})


@pytest.mark.parametrize("file", ["fixed_projections", f"{PHOTOGRAPHS}grocery"])
def test_a_published_page_is_drawn_again(file, tmp_path, monkeypatch):
    """To the byte, except curves, which another Matplotlib may draw otherwise."""
    monkeypatch.chdir(tmp_path)
    (docs := tmp_path / "docs").mkdir()
    shutil.copy(RESULTS / f"{file}.json", tmp_path)
    monkeypatch.setattr(command, "PROTOCOLS", docs / "protocols.md")
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(kept, "descends", lambda *commits: True)  # also without a history
    settings = settings_of(file, tmp_path, monkeypatch)
    output = f"--output={docs / file}.md"
    assert command.main([STUDIES[file], "--page-only", output, "--", *settings]) == 0
    drawn = [path for path in docs.iterdir() if not path.stem.endswith(("_curves", "_cosines"))]
    assert len(drawn) >= 2
    for path in drawn:
        assert path.read_bytes() == (RESULTS.parent / "docs" / path.name).read_bytes(), path.name


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
