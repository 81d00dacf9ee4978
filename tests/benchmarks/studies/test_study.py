"""A study chooses on validation classes, tests what was chosen, and registers its plan before that."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from benchmarks import studies, study
from benchmarks.building import build_datasets
from benchmarks.records import load_run, write_json
from benchmarks.settings import read_study, recipe_files
from benchmarks.studies import Pace, Results, Study, auditing, kept
from benchmarks.studies.jobs import Job
from benchmarks.studies.planning import plan
from benchmarks.training import build_parts
from tests.benchmarks.made import DIVERGED, RECORD, write_record
from tests.support.processes import ROOT, TIMEOUT, environment
from tests.support.processes import command as command_line

RATE = "optimization.learning_rate"
ROWS = ("base", "new", "third")
BETA = "losses[0].loss.init_args.beta"
COMMITS = {"old": None, "registration": "old", "new": "registration"}
"""Commits that the tests make up, each with the one before."""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three rows, two comparisons, and an empty working folder with a made-up history of commits."""
    (tmp_path / "recipes" / "toy").mkdir(parents=True)
    loss = {"losses": [{"loss": {"class_path": "pml_regularizers.BinomialDevianceLoss"}}]}
    trainings = {"base": {"label": "base", **loss}, "new": {"label": "new", "seed": 7, **loss}}
    trainings["third"] = {"label": "third", **loss}
    (tmp_path / "recipes" / "toy" / "table.yaml").write_text(
        yaml.safe_dump({"trainings": trainings})
    )
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
    monkeypatch.setattr(recipe_files, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(auditing, "build_parts", lambda *arguments: None)
    pace = Pace(start=1200, view=0, step=0, image=0, train_images=0, test_images=0)
    monkeypatch.setattr(studies, "measure", lambda job: pace)
    monkeypatch.setattr(kept, "describe_code", lambda: {"commit": "registration", "dirty": False})
    monkeypatch.setattr(kept, "descends", descends)
    monkeypatch.setattr(kept, "now", lambda: "2026-02-01T00:00:00+00:00")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def descends(commit: str | None, ancestor: str | None) -> bool:
    return commit is not None and (commit == ancestor or descends(COMMITS.get(commit), ancestor))


def change(**changes: Any) -> None:
    content = yaml.safe_load(Path("toy.yaml").read_text())
    Path("toy.yaml").write_text(yaml.safe_dump(content | changes))


def command(*options: str) -> int:
    return study.main(["toy.yaml", "--output=toy.md", *options])


def finish(job: Job, recall: float, **changes: Any) -> None:
    (job.folder / "records").mkdir(parents=True)
    (job.folder / "records" / "evaluation.csv").write_text(
        f"~iteration~,seen_recall_at_1\n10,0.1\n20,{recall}\n"
    )
    about = {"label": job.training.rpartition("/")[2], "seed": job.seed, "config": job.config}
    metrics = {"recall_at_1": recall, "mean_average_precision_at_r": recall / 2}
    measured = {"metrics": metrics, "hardware": {"processor": "A"}, "wall_time_s": 3600.0}
    begun = {"started": "2026-03-01T00:00:00+00:00", "commit": "new"}
    write_record(job.folder, **about | measured | begun | changes)


@pytest.fixture
def trained_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a function of the jobs stand for the queue."""

    def replace(train: Callable[[list[Job]], Any]) -> None:
        class Trained:
            def __init__(
                self, jobs: list[Job], launcher: Any, *, redo_stale: bool, later: int
            ) -> None:
                assert redo_stale  # or a choice that came out otherwise could not be trained
                self.jobs = jobs

            def run(self) -> None:
                train(self.jobs)

        monkeypatch.setattr("benchmarks.studies.Queue", Trained)

    return replace


def about(job: Job) -> tuple[Any, ...]:
    config = job.config
    return (
        *(job.training.rpartition("/")[2], config["data"]["split"], job.seed),
        *(config["data"]["fold"], config["optimization"]["learning_rate"]),
        config["losses"][0]["loss"]["init_args"]["beta"],
    )


def quality(job: Job) -> float:
    """Best at a rate of 0.02 and, beside it, a beta of 3, although one draw of two likes 2 better."""
    *_, fold, rate, beta = about(job)
    if rate != 0.02:
        return 0.5
    return {2.0: 0.51 + 0.2 * fold, 3.0: 0.8}.get(beta, 0.6)


def test_settings_are_chosen_on_validation_classes_and_taken_by_others(toy, trained_by, capsys):
    rows = {"base": {"choose": {RATE: [0.01, 0.02]}}, "third": {"takes": ["new"]}}
    change(rows=rows | {"new": {"takes": ["base"], "choose": {BETA: [2.0, 3.0]}}})
    queues = []

    def train(jobs: list[Job]) -> None:
        queues.append(sorted(map(about, jobs)))
        for job in jobs:
            finish(job, quality(job))

    trained_by(train)
    assert command() == 0
    default = queues[0][0][-1]
    assert queues[0] == [
        ("base", "validation", 0, draw, rate, default) for draw in (0, 1) for rate in (0.01, 0.02)
    ]
    assert queues[1] == sorted(
        [
            *(("new", "validation", 0, draw, 0.02, beta) for beta in (2.0, 3.0) for draw in (0, 1)),
            *(("base", "test", s, 0, 0.02, default) for s in (0, 1)),
        ]
    )
    assert queues[2] == [
        (row, "test", seed, 0, 0.02, 3.0) for row in ("new", "third") for seed in (0, 1)
    ]
    page = Path("toy.md").read_text()
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if "left" in line] == [
        "Trainings left: 14, about 2.3 hours, 2 at a time (as a few steps on these images took).",
        "Trainings left: 10, about 1.7 hours, 2 at a time (as a few steps on these images took).",
        "Trainings left: 4, about 40 min, 2 at a time (as a few steps on these images took).",
    ]
    shutil.rmtree("runs")  # the results outlive them
    assert command() == 0
    assert Path("toy.md").read_text() == page
    assert len(queues) == 3


def test_of_several_settings_all_combinations_are_tried(toy, trained_by):
    change(
        rows={"base": {"choose": {RATE: [0.01, 0.02], BETA: [2.0, 3.0]}}, "new": {}, "third": {}}
    )
    started = []

    def train(jobs: list[Job]) -> None:
        for job in jobs:
            if (of := about(job))[:2] == ("base", "validation"):
                started.append(of[3:])
            finish(job, quality(job))

    trained_by(train)
    assert command() == 0
    assert sorted(started) == [
        (draw, rate, beta) for draw in (0, 1) for rate in (0.01, 0.02) for beta in (2.0, 3.0)
    ]
    chosen = Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs")).chosen("base")
    assert dict(chosen) == {RATE: 0.02, BETA: 3.0}


@pytest.mark.parametrize(
    ("best", "tried"),
    [(3, [2, 3, 4]), (6, [3, 4, 5, 6]), (1, [1, 2, 3, 4])],
)
def test_values_are_tried_outwards_until_the_best_lies_inside(toy, trained_by, best, tried):
    rows = {"base": {"choose": {RATE: [1, 2, 3, 4, 5, 6]}}, "new": {}, "third": {}}
    change(rows=rows, choice={"draws": 2, "first": 2, "equal_budget": False})
    started = []

    def train(jobs: list[Job]) -> None:
        for job in jobs:
            rate = job.config["optimization"]["learning_rate"]
            if job.config["data"]["split"] == "validation":
                started.append(rate)
            finish(job, 1 / (1 + abs(rate - best)))

    trained_by(train)
    assert command() == 0
    assert sorted(started) == [rate for rate in tried for _ in range(2)]


def test_if_all_values_in_the_middle_diverge_the_outer_ones_are_tried(toy, trained_by):
    change(
        rows={"base": {"choose": {RATE: [1, 2, 3, 4, 5]}}, "new": {}, "third": {}},
        choice={"draws": 1, "first": 2, "equal_budget": False},
    )
    started = []

    def train(jobs: list[Job]) -> None:
        for job in jobs:
            rate = job.config["optimization"]["learning_rate"]
            if job.config["data"]["split"] == "validation":
                started.append(rate)
            finish(job, 0.5, **(DIVERGED if rate in (2, 3, 4) else {}))

    trained_by(train)
    assert command() == 0
    assert started == [2, 3, 1, 4]
    made = Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs"))
    assert made.chosen("base") == ((RATE, 1),)


def test_a_value_that_diverges_is_not_chosen_and_stops_nothing(toy, trained_by):
    choose = {"base": [0.01, 0.02], "third": [3.0, 4.0]}
    change(rows={"new": {}} | {row: {"choose": {RATE: of}} for row, of in choose.items()})
    started = []

    def train(jobs: list[Job]) -> None:
        for job in jobs:
            started.append(job.name)
            rate = job.config["optimization"]["learning_rate"]
            diverges = rate > 1 or (rate, job.config["data"]["fold"]) == (0.02, 1)
            finish(job, rate, **(DIVERGED if diverges else {}))

    trained_by(train)
    assert command() == 0
    made = Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs"))
    assert made.chosen("base") == ((RATE, 0.01),)
    assert made.choices("base").tried[1] == ({RATE: 0.02}, None, [1])
    assert (made.chosen("third"), made.tests("third")) == (None, [])
    assert command() == 0
    assert len(started) == 2 * 2 + 2 * 2 + 2 + 2  # nothing twice


def test_rows_of_one_recipe_have_folders_of_their_own(toy, trained_by):
    rows = {"recipe": "toy/table/base", "settings": [f"--{RATE}=0.5"]}
    change(rows={"base": {}, "new": rows, "third": {}})
    trained_by(
        lambda jobs: [finish(job, job.config["optimization"]["learning_rate"]) for job in jobs]
    )
    assert command() == 0
    page = Path("toy.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "| New is better (1) | too noisy | +49.90" in page


def test_a_candidate_that_is_no_number_is_not_chosen(toy, trained_by):
    choose = {"choose": {RATE: [0.01, 0.02]}}
    change(rows={"base": choose, "new": {}, "third": {}})
    nan = {"recall_at_1": 0.5, "mean_average_precision_at_r": float("nan")}
    first = lambda job: {"metrics": nan} if about(job)[1:5:3] == ("validation", 0.01) else {}  # noqa: E731
    trained_by(lambda jobs: [finish(job, 0.5, **first(job)) for job in jobs])
    assert command() == 0
    made = Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs"))
    assert made.chosen("base") == ((RATE, 0.02),)


def test_a_run_that_fails_holds_up_only_its_own_row(toy, trained_by):
    choose = {"choose": {RATE: [0.01, 0.02]}}
    change(rows={"base": choose, "third": choose, "new": {}})
    trained_by(lambda jobs: [finish(job, 0.5) for job in jobs if "third" not in job.name])
    assert command() == 1
    assert "new is better" in Path("toy.md").read_text()


def test_more_seeds_are_tested_once_where_the_first_ones_leave_a_wide_interval(toy, trained_by):
    change(seeds={"count": 2, "first": 5, "more": 3, "wider_than": 1.0})
    seeds: dict[str, list[int]] = {}

    def train(jobs: list[Job]) -> None:
        for job in jobs:
            row = job.training.rpartition("/")[2]
            seeds.setdefault(row, []).append(job.seed)
            noise = {"new": 0.01, "third": 0.0001}.get(row, 0) * (-1) ** job.seed
            finish(job, 0.5 + noise)

    trained_by(train)
    assert command() == 0
    assert {row: sorted(of) for row, of in seeds.items()} == {
        "base": [5, 6, 7, 8, 9], "new": [5, 6, 7, 8, 9], "third": [5, 6],
    }  # fmt: skip
    made = Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs"))
    assert {row: len(of) for row, of in made.found().items()} == {"base": 5, "new": 5, "third": 2}


def test_a_page_says_that_more_seeds_are_due(toy, trained_by):
    change(seeds={"count": 2, "more": 3, "wider_than": 0.1})
    trained_by(
        lambda jobs: [finish(j, 0.5 + j.seed * len(j.name) / 500) for j in jobs if j.seed < 2]
    )
    assert command() == 1
    assert "**9 tests of further seeds are due: no word on their rows is final.**" in " ".join(
        Path("toy.md").read_text().split()
    )


# --------------------------------------------------------------------------------------- registration


def made_by(**changes: Any) -> Callable[[list[Job]], None]:
    return lambda jobs: [finish(job, 0.5 + job.seed / 100, **changes) for job in jobs]


def registration() -> tuple[str, dict[str, bool]]:
    made = Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs"))
    found = made.found()
    return studies.registration(made, found), studies.registered(made, found)


def test_the_plan_is_registered_before_the_first_test(toy, trained_by):
    trained_by(made_by())
    assert command() == 0
    [registered] = json.loads(Path("toy.json").read_text())["plans"]
    assert registered["commit"] == "registration"
    said, of = registration()
    assert "before its first test; all 6 tests were made under it" in said
    assert of == {"1": True, "2": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "old"},
        {"commit": None},
        {"dirty": True},
        {"started": "2026-01-01T00:00:00+00:00"},
        {"sessions": [{"commit": "new"}, {"commit": "old"}]},
    ],
)
def test_a_test_of_older_code_or_begun_before_does_not_count(toy, trained_by, changes):
    trained_by(made_by(**changes))
    assert command() == 0
    said, of = registration()
    assert "6 of 6 tests were not made under it" in said
    assert of == {"1": False, "2": False}


def test_a_plan_that_changes_is_registered_anew_and_old_tests_do_not_count(toy, trained_by):
    trained_by(made_by())
    assert command() == 0
    change(margin=0.5)
    assert "was not registered before its tests" in registration()[0]
    change(margin=0.5, seeds={"count": 3})
    assert command() == 0
    assert len(json.loads(Path("toy.json").read_text())["plans"]) == 2
    assert "6 of 9 tests were not made under it" in registration()[0]


def test_another_plan_in_between_takes_nothing_from_the_first(toy, trained_by, monkeypatch):
    trained_by(made_by())
    assert command() == 0
    change(margin=0.5, seeds={"count": 3})  # a try
    monkeypatch.setattr(kept, "now", lambda: "2026-04-01T00:00:00+00:00")
    trained_by(made_by(started="2026-05-01T00:00:00+00:00"))
    assert command() == 0
    change(margin=1.0, seeds={"count": 2})
    assert command() == 0
    said, of = registration()
    assert "all 6 tests were made under it. This file has 1 other plan." in said
    assert of == {"1": True, "2": True}


def test_a_look_with_an_edited_file_takes_no_plan_from_finished_tests(toy, trained_by):
    trained_by(made_by())
    made = Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs/studies/toy"))
    made.register(made.missing())
    made_by()(made.missing())  # and the command is killed before it keeps them
    change(margin=0.5)
    assert command("--page-only") == 0
    change(margin=1.0)
    assert command() == 0
    assert registration()[1] == {"1": True, "2": True}


def test_a_result_that_is_kept_stays(toy, trained_by):
    trained_by(made_by())
    assert command() == 0
    before = json.loads(Path("toy.json").read_text())["results"]
    made = Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs/studies/toy"))
    [job, *_] = made.tests("new")
    shutil.rmtree(job.folder)
    finish(job, 0.9)
    made.results.add([job])
    assert json.loads(Path("toy.json").read_text())["results"] == before


def test_words_for_readers_are_no_part_of_the_plan(toy):
    def digest() -> str:
        return Study(read_study("toy.yaml"), Results(Path("toy.json")), Path("runs")).digest

    before, content = digest(), yaml.safe_load(Path("toy.yaml").read_text())
    content["comparisons"]["1"]["claim"] = "other words"
    change(**content | {"question": "Other words?", "margin": 1.0, "settings": []})
    assert digest() == before  # also of defaults that are written out
    content["comparisons"]["1"]["as_good"] = True
    change(**content)
    assert digest() != before


def test_runs_that_were_there_before_the_command_are_kept_but_are_no_registered_tests(toy):
    for row in ("base", "new", "third"):
        runs = Path("runs/studies/toy") / row
        for job in plan([f"toy/table/{row}"], range(2), runs, ["--report=false"]):
            finish(job, 0.5 + job.seed / 100)
    assert command("--page-only") == 0
    assert "was not registered before its tests" in registration()[0]


# -------------------------------------------------------------------------------------- what is kept


def test_results_of_other_images_are_not_this_studys(toy, trained_by, capsys):
    trained_by(lambda jobs: [finish(job, 0.5) for job in jobs if "base" in job.name])
    assert command() == 1
    data = RECORD["data"] | {"fingerprint": "other"}
    trained_by(lambda jobs: [finish(job, 0.5, data=data) for job in jobs])
    assert command() == 2
    assert "was measured on other images (fingerprint" in capsys.readouterr().err


@pytest.fixture
def folders(toy) -> None:
    """Two folders of images, and rows that are trained on a folder."""
    for place, size in (("a", 24), ("b", 30)):
        for name in range(4):
            folder = Path(place, f"class{name}")
            folder.mkdir(parents=True)
            for i in range(3):
                noise = np.random.default_rng(i).integers(0, 255, (size, size, 3), np.uint8)
                Image.fromarray(noise).save(folder / f"{i}.png")
    loss = {"losses": [{"loss": {"class_path": "pml_regularizers.BinomialDevianceLoss"}}]}
    table = {"shared": {"data": {"dataset": "folder"}}}
    rows = {row: {"label": row, **loss} for row in ("base", "new", "third")}
    Path("recipes/toy/table.yaml").write_text(yaml.safe_dump(table | {"trainings": rows}))


def test_what_does_not_fit_is_told_of_all_rows_before_the_first_run(folders, capsys, monkeypatch):
    monkeypatch.setattr(auditing, "build_parts", build_parts)
    sizes = ["--data.batch_size=4", "--data.samples_per_class=2", "--evaluation.parts=3"]
    assert command("--data.root=a", "--", *sizes) == 2
    told = capsys.readouterr().err
    for row in ("base", "new", "third"):
        assert f"toy/table/{row}: evaluation.parts: each of 3 parts needs two images" in told
    assert not Path("runs").exists()
    assert not Path("toy.json").exists()


def on_their_images(jobs: list[Job]) -> None:
    for job in jobs:
        found = build_datasets(job.command.experiment.data, seed=0).test.fingerprint
        finish(job, 0.5, data=RECORD["data"] | {"fingerprint": found})


def test_images_of_another_folder_are_seen_before_anything_is_trained(folders, trained_by, capsys):
    trained_by(on_their_images)
    assert command("--data.root=a") == 0
    trained_by(lambda jobs: pytest.fail("nothing is to train"))
    assert command("--data.root=a") == 0
    assert command("--data.root=b") == 2
    assert "data.root: test of new, seed 0 was measured on other" in capsys.readouterr().err


def test_batches_fit_a_folder_of_few_classes(folders, trained_by, capsys):
    sizes = []

    def train(jobs: list[Job]) -> None:
        sizes.extend(job.command.experiment.data.batch_size for job in jobs)
        on_their_images(jobs)

    trained_by(train)
    assert command("--data.root=a") == 0
    assert "few classes: runs get --data.batch_size=8." in capsys.readouterr().out
    assert set(sizes) == {8}  # two classes, four images of each
    assert command("--data.root=a", "--page-only") == 0  # the same plan
    sizes.clear()
    assert command("--data.root=a", "--output=b.md", "--runs=b", "--", "--data.batch_size=4") == 0
    assert set(sizes) == {4}


def test_a_folder_of_too_few_classes_to_choose_on_is_refused(folders, capsys):
    change(rows={"base": {"choose": {RATE: [0.1, 0.2]}}, "new": {}, "third": {}})
    assert command("--data.root=a") == 2
    assert (
        "data.root: a has 2 classes to train on, and choosing settings needs 8, two in each of"
        in (capsys.readouterr().err)
    )
    assert not Path("runs").exists()


def test_studies_of_one_name_take_no_folder_from_each_other(toy, trained_by, capsys):
    trained_by(made_by())
    assert command() == 0
    Path("other").mkdir()
    shutil.copy("toy.yaml", "other")
    assert study.main(["other/toy.yaml"]) == 2
    whose = Path("toy.yaml").resolve()
    assert f"--runs: runs/studies/toy is of the study {whose}; name" in capsys.readouterr().err
    Path("toy.yaml").unlink()  # moved
    assert study.main(["other/toy.yaml"]) == 0


def test_more_seeds_may_be_asked_for(toy, trained_by):
    trained_by(made_by())
    assert command() == 0
    seeds = []
    trained_by(lambda jobs: [seeds.append(job.seed) or finish(job, 0.5) for job in jobs])
    assert command("--seeds=4") == 0
    assert sorted(seeds) == [2, 2, 2, 3, 3, 3]


def test_the_time_of_trainings_counts_shared_views_once(toy):
    pace = Pace(start=10, view=0.1, step=1, image=0.5, train_images=30, test_images=20)
    weights = ROOT / "benchmarks" / "backbones" / "glyphs" / "seed0.safetensors"
    settings = [f"--model.weights={weights}", "--model.frozen_stages=2", "--data.cached_views=2"]
    settings += ["--optimization.steps=7", "--evaluation.every=0"]
    jobs = plan(["toy/table/base", "toy/table/new"], [0], Path("runs"), settings)
    assert pace.seconds(jobs[:1]) == pytest.approx(10 + 7 + 2 * 20 * 0.5 + 30 * 2 * 0.1)
    assert pace.seconds(jobs) == pytest.approx(2 * (10 + 7 + 2 * 20 * 0.5) + 30 * 2 * 0.1)
    [held] = plan(["toy/table/base"], [0], Path("runs"), [*settings, "--data.split=validation"])
    of_fold = 30 / held.command.experiment.data.folds
    assert pace.seconds([held]) == pytest.approx(10 + 7 + of_fold * 0.5 + (30 - of_fold) * 0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"primary": "recall_at_one"}, "comparisons.1: new does not measure 'recall_at_one'"),
        ({"agrees": "NMI"}, "comparisons.1: new does not measure 'NMI'"),
        (
            {"choice": {"metric": "loss"}, "rows": {row: {"choose": {RATE: [1, 2]}} for row in ROWS}},
            "choice.metric: new does not measure 'loss'",
        ),
        (
            {"comparisons": {"1": {"claim": "c", "better": "new:descr", "than": "base"}}},
            "comparisons.1: new has no output 'descr'",
        ),
        (
            {"comparisons": {"1": {"claim": "c", "better": "new:parts", "than": "base"}}},
            "comparisons.1: new has no output 'parts', or is not asked to measure it",
        ),
    ],
)  # fmt: skip
def test_what_no_run_will_measure_is_refused_before_the_first(toy, capsys, changes, message):
    change(**changes)
    assert command() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(path.name for path in Path().iterdir()) == ["recipes", "toy.yaml"]


ADDING = """
import sys
from pathlib import Path
from types import SimpleNamespace
from benchmarks.records import load_run
from benchmarks.studies import Results

results, runs = Results(Path("toy.json")), []
for folder in map(Path, sys.argv[1:]):
    info = load_run(folder).info
    runs.append(SimpleNamespace(
        folder=folder, training=info["label"], seed=info["seed"], config=info["config"], weights=None
    ))
print(1, flush=True)
input()  # until all are ready
for run in runs:
    results.add([run])
"""


def test_commands_that_add_at_once_lose_nothing(toy):
    """Real processes, each with runs of its own."""
    rows, pipes = ("base", "new", "third"), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environ = environment() | {"PYTHONPATH": str(ROOT)}
    started = []
    for row in rows:
        jobs = plan([f"toy/table/{row}"], range(12), Path("runs"), ["--report=false"])
        [finish(job, 0.5) for job in jobs]
        command_of = [sys.executable, "-c", ADDING, *(str(job.folder) for job in jobs)]
        started.append(subprocess.Popen(command_of, env=environ, **pipes))
    for process in started:
        assert process.stdout.readline() == b"1\n"
    for process in started:
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in started:
        process.communicate(timeout=TIMEOUT)  # closes the pipes
        assert process.returncode == 0
    assert len(json.loads(Path("toy.json").read_text())["results"]) == 3 * 12
    assert not list(Path().glob(".toy*"))


def test_kept_results_of_another_form_are_named(toy, capsys):
    result = {"metrics": {"recall_at_1": "high"}, "outputs": {}, "curve": {}, "wall_time_s": 1}
    for content in (
        {"results": []},
        {"results": {"toy/table/new, seed 1": result}},
        {"results": {}, "plans": [{"plan": 1}]},
    ):
        write_json(Path("toy.json"), content)
        before = Path("toy.json").read_bytes()
        assert command("--page-only") == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: toy.json: is damaged (ValueError: ")
        assert Path("toy.json").read_bytes() == before
        assert not Path("toy.md").exists()


def test_what_is_not_there_yet_is_said(toy, capsys):
    assert command("--page-only") == 2
    assert "no comparison has both rows finished at 2 seeds, neither in" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--data.split=test", "data.split: 'validation' of new is set by this command"),
        ("--data={fold: 1}", "data.fold: 0 of new is set by this command"),
        ("--seed=3", "--seed=3: is set by this command"),
        (f"--{RATE}=0.5", f"{RATE}: 0.1 of new is set by this command"),
    ],
)
def test_no_setting_behind_the_dashes_chooses_by_the_test(toy, capsys, setting, message):
    change(rows={"base": {}, "new": {"choose": {RATE: [0.1, 0.2]}}, "third": {}})
    assert command("--page-only", "--", setting) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_page_takes_not_the_place_of_the_results(toy, capsys):
    assert command("--page-only", "--output=toy.json") == 2
    assert "--output: expected a .md file, got toy.json" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ what was measured

PLATFORM = {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "167", "stepping": "1"}
"""The processor that measured the rows below; others round sums differently."""


def processor() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    found = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    return {key: found.get(key, "") for key in PLATFORM}


@pytest.mark.slow
@pytest.mark.parametrize("row", ["binomial", "binomial_horde"])
def test_a_published_result_is_found_and_measured_again(row, glyphs_root, tmp_path):
    results = Results(ROOT / "docs" / "claims.json")
    made = Study(read_study("glyphs"), results, tmp_path, [f"--data.root={glyphs_root}"])
    job = made.tests(row)[0]
    published = results.of(job)
    arguments = command_line([*job.settings, f"--output={job.folder}"])
    subprocess.run(arguments, env=environment(), timeout=900, check=True)
    found = load_run(job.folder).info
    exact = processor() == PLATFORM and torch.__version__.startswith("2.14.1")
    for metric, value in published["metrics"].items():
        tolerance = 1e-12 if exact else 0.02
        assert found["metrics"][metric] == pytest.approx(value, abs=tolerance), metric
