"""A study registers its plan before the first test, and tells which tests were made under it."""

import json
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.settings.study_reading import read_study
from benchmarks.studies import auditing, kept
from benchmarks.studies.jobs import Job
from benchmarks.studies.kept import Results
from benchmarks.studies.study import Study
from tests.benchmarks.studies.toy import change, command, finish, kept_study


def made_by(**changes: Any) -> Callable[[Job], None]:
    return lambda job: finish(job, 0.5 + job.seed / 100, **changes)


@pytest.fixture
def tested(toy, trained_by):
    trained_by(made_by())
    assert command() == 0


def registration() -> tuple[str, dict[str, bool]]:
    made = kept_study()
    found = made.found()
    return auditing.registration(made, found), auditing.registered(made, found)


OLDER = [{"commit": "old"}, {"dirty": True}, {"started": "2026-01-01T00:00:00+00:00"}]
OLDER += [{"sessions": [{"commit": "new"}, {"commit": "old"}]}]


def test_a_test_of_older_code_or_begun_before_does_not_count(toy, trained_by):
    changes = cycle(OLDER)
    trained_by(lambda job: finish(job, 0.5, **next(changes)))
    assert command() == 0
    said, of = registration()
    assert "6 of 6 tests were not made under it" in said
    assert of == {"1": False, "2": False}
    (toy / "docs" / "kept").mkdir(parents=True)
    # Also on a published page, which is drawn from the runs and names none of their folders.
    assert command("--page-only", "--output=docs/p.md") == 0 and Path("docs/kept/p.json").exists()
    page = Path("docs/p.md").read_text().replace("\n", " ")
    assert "6 of 6 tests were not made" in page and "--output" not in page


def test_a_plan_that_changes_is_registered_anew_and_old_tests_do_not_count(tested):
    change(margin=0.5)
    assert "was not registered before its tests" in registration()[0]
    change(margin=0.5, seeds={"count": 3})
    assert command() == 0
    assert "6 of 9 tests were not made under it" in registration()[0]


def test_a_claim_that_is_edited_after_the_tests_is_told(toy, trained_by, monkeypatch):
    """Not one that is edited before the first of them; a question is that of all comparisons."""
    kept_study().register(kept_study().missing())
    content = yaml.safe_load(Path("toy.yaml").read_text())
    first = content["comparisons"]["1"]
    first["claim"] = "new helps"
    change(**content)
    monkeypatch.setattr(kept, "now", lambda: "2026-04-01T00:00:00+00:00")
    trained_by(made_by(started="2026-05-01T00:00:00+00:00"))
    assert command() == 0
    assert registration()[1] == {"1": True, "2": True}
    first["claim"] = "new harms"
    change(**content)
    assert command("--page-only") == 0
    told = "Edited since, and exploratory: the claim of `1`, “new helps”."
    assert told in Path("toy.md").read_text().replace("\n", " ")
    assert registration()[1] == {"1": False, "2": True}
    change(question="Does it harm?")
    said, of = registration()
    assert "the question, “Does it help?”" in said and of == {"1": False, "2": False}


def test_another_plan_in_between_takes_nothing_from_the_first(tested, trained_by, monkeypatch):
    change(margin=0.5, seeds={"count": 3})  # a try
    monkeypatch.setattr(kept, "now", lambda: "2026-04-01T00:00:00+00:00")
    trained_by(made_by(started="2026-05-01T00:00:00+00:00"))
    assert command() == 0
    change(margin=1.0, seeds={"count": 2})
    assert command() == 0
    said, of = registration()
    assert "before its first test; all 6 tests were made under it. This file has 1 other" in said
    assert of == {"1": True, "2": True}
    plans = json.loads(Path("toy.json").read_text())["plans"]
    assert [plan["commit"] for plan in plans] == ["registration"] * 2


def test_a_look_with_an_edited_file_takes_no_plan_from_finished_tests(toy):
    made = Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs/studies/toy"))
    made.register(made.missing())
    for job in made.missing():
        made_by()(job)  # and the command is killed before it keeps them
    change(margin=0.5)
    assert command("--page-only") == 0
    change(margin=1.0)
    assert command("--page-only") == 0
    assert registration()[1] == {"1": True, "2": True}


def test_untrained_rows_keep_their_layer_whichever_the_trainings_get(tmp_path):
    given = ["--model.head=random", "--model.replace_layer=pca"]
    own = Study(read_study("photographs/own"), Results(tmp_path / "own.json"), tmp_path, given)
    models = [own.first_job(row).experiment.model for row in own.file.untrained()]
    layers = [("none", "features"), ("pca", None), ("whitened", None)]
    assert [(model.head, model.replacement) for model in models] == layers


def test_a_result_that_is_kept_stays(tested):
    before = json.loads(Path("toy.json").read_text())["results"]
    made = Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs/studies/toy"))
    [job, *_] = made.tests("new")
    shutil.rmtree(job.folder)
    finish(job, 0.9)
    made.results.add([job])
    assert json.loads(Path("toy.json").read_text())["results"] == before


def test_words_for_readers_are_no_part_of_the_plan(toy):
    def digest() -> str:
        return kept_study().digest

    before, content = digest(), yaml.safe_load(Path("toy.yaml").read_text())
    content["comparisons"]["1"]["claim"] = "other words"
    change(**content | {"question": "Other words?", "margin": 1.0, "settings": []})
    assert digest() == before  # also of defaults that are written out
    content["comparisons"]["1"]["as_good"] = True
    change(**content)
    assert digest() != before
