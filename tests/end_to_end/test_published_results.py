"""Published results are found by today's code: a row that it loses would be trained again, without a word.

A result that is not found has another digest: see `benchmarks/settings/former.py`. Photographs are not needed: what
counts of them is in the digests of the lists of test classes and of the trunk's weights.
"""

import json
from itertools import chain
from pathlib import Path

import pytest

from benchmarks import records
from benchmarks.settings import read_study
from benchmarks.studies import Results, Study
from benchmarks.studies.jobs import Job
from benchmarks.studies.kept import name_of

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[2] / "docs"
PHOTOGRAPHS = "photographs_"

STUDIES = {
    **{"claims": "glyphs", "fixed_projections": "glyphs_fixed"},
    **{f"{PHOTOGRAPHS}{name}": f"photographs/{name}" for name in ("cars", "cars_longer")},
    **{f"{PHOTOGRAPHS}{name}": f"photographs/{name}" for name in ("cars_orders", "cars_others")},
    **{f"{PHOTOGRAPHS}{name}": f"photographs/{name}" for name in ("cars_tuned", "grocery")},
    **{f"{PHOTOGRAPHS}{name}": f"photographs/{name}" for name in ("grocery_jrs", "grocery_rates")},
    **{f"{PHOTOGRAPHS}grocery_controls": "photographs/grocery_controls"},
}

WEIGHTS = "2b4a5f7e9a1870e2c41efd811c5b04f7e5843b32900a338e3f181204a324f9c6"

TEST_CLASSES = {
    "cars.txt": "05469a8cb0bca61ff1554fd6cd780a39a9658147dd0b2574d92d8fc1b11a9334",
    "grocery_test_classes_0.txt": "d90085ce828c374bf1836de2387599a7d700570f3a4c28ab080d36a7d5d7a230",
    "grocery_test_classes_1.txt": "aa33f5bafdbe9d0c770cc085f76f50ee598289c2709a89d787dd50ca7cb555a8",
    "grocery_test_classes_2.txt": "6e01a0222e2e1ed829732f1974f7e4dbd4d4ff31030932212af31601d6bf0218",
}


def test_every_file_of_results_is_looked_at() -> None:
    files = [path for path in RESULTS.glob("*.json") if "plans" in json.loads(path.read_text())]
    assert {path.stem for path in files} == set(STUDIES)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that the studies of photographs were started with."""
    monkeypatch.chdir(tmp_path)
    for name in TEST_CLASSES:
        Path(name).touch()
    monkeypatch.setattr(records, "file_digest", lambda path: TEST_CLASSES[path.name])
    monkeypatch.setattr(records, "describe_weights", lambda model: {"sha256": WEIGHTS})
    return ["--data.root=photographs", "--model.trunk_args={}"]


@pytest.mark.parametrize("file", STUDIES)
def test_every_result_and_plan_is_found(file: str, settings: list[str]) -> None:
    if not file.startswith(PHOTOGRAPHS):
        settings = []
    elif "cars" in file:
        settings = [*settings, "--data.test_classes=cars.txt"]
    results = Results(RESULTS / f"{file}.json")
    study = Study(read_study(STUDIES[file]), results, Path("runs"), settings)
    assert study.digest in {plan["plan"] for plan in results.plans}
    found = {name_of(job) for row in study.rows for job in jobs(study, row)}
    assert set(results.kept) - found == set()


def jobs(study: Study, row: str) -> list[Job]:
    """All trainings of a row: on validation classes, and the tests."""
    return [*chain(*study.candidates(row).values()), *study.tests(row)]
