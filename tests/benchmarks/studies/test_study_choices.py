"""A study chooses settings and seeds on validation classes, and goes on where it was; then it trains for use."""

import re
import shutil
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.studies import auditing
from tests.benchmarks.made import DIVERGED
from tests.benchmarks.studies.toy import BETA, RATE, about, change, command, finish, kept_study


def test_settings_are_chosen_on_validation_classes_and_taken_by_others(toy, trained_by, capsys):
    rows = {"base": {"choose": {RATE: [0.01, 0.02]}}, "third": {"takes": ["new"]}}
    change(rows=rows | {"new": {"takes": ["base"], "choose": {BETA: [2.0, 3.0]}}})

    def train(job):
        """Best at a rate of 0.02 and, beside it, a beta of 3, although one draw of two likes 2 better."""
        _, _, _, fold, rate, beta = about(job)
        assert job.config["label"] == about(job).row, "a tuned loss keeps its recipe's name"
        assert job.config["trackers"] == ["tensorboard"]
        by_beta = {2.0: 0.51 + 0.2 * fold, 3.0: 0.8}
        finish(job, by_beta.get(beta, 0.6) if rate == 0.02 else 0.5)

    queues = trained_by(train)
    assert command("--trackers=tensorboard") == 0
    default, both = about(queues[0][0]).beta, (0, 1)  # draws, or seeds
    assert [sorted(map(about, jobs)) for jobs in queues] == [
        [("base", "validation", 0, draw, rate, default) for draw in both for rate in (0.01, 0.02)],
        [
            *(("base", "test", seed, 0, 0.02, default) for seed in both),
            *(("new", "validation", 0, draw, 0.02, beta) for draw in both for beta in (2.0, 3.0)),
        ],
        [(row, "test", seed, 0, 0.02, 3.0) for row in ("new", "third") for seed in both],
    ]
    page = Path("toy.md").read_text()
    assert "Trainings left: 14, 2 at a time." in capsys.readouterr().out
    shutil.rmtree("runs")  # the results outlive them
    assert command("--trackers=tensorboard") == 0
    needs_runs = r"## What next\n.*?(?=## )|\* (What may help more|Network): .*?\n"
    assert Path("toy.md").read_text() == re.sub(needs_runs, "", page, flags=re.DOTALL)
    assert len(queues) == 3


@pytest.mark.parametrize(
    ("best", "tried", "diverge"),
    [(6, [3, 4, 5, 6], []), (1, [1, 2, 3, 4], []), (1, [1, 2, 3, 4, 5], [3, 4])],
)
def test_values_are_tried_until_the_best_lies_inside(toy, trained_by, best, tried, diverge):
    rows = {"base": {"choose": {RATE: [1, 2, 3, 4, 5, 6]}}, "new": {}, "third": {}}
    change(rows=rows, choice={"draws": 1, "first": 2, "equal_budget": False})

    def train(job):
        rate = about(job).rate
        finish(job, 1 / (1 + abs(rate - best)), **DIVERGED if rate in diverge else {})

    queues = trained_by(train)
    assert command() == 0
    trained = map(about, chain(*queues))
    assert sorted(job.rate for job in trained if job.split == "validation") == tried
    assert kept_study().chosen("base") == ((RATE, best),)


def test_a_value_that_diverges_is_not_chosen_and_stops_nothing(toy, trained_by):
    """Nor does a run that fails hold up other rows."""
    choose = {"base": [0.01, 0.02], "third": [3.0, 4.0]}
    change(rows={"new": {}} | {row: {"choose": {RATE: of}} for row, of in choose.items()})

    def train(job):
        rate = about(job).rate
        if rate == 3:
            finish(job, rate, **DIVERGED)
        elif (rate, about(job).fold) == (0.02, 1):
            finish(job, rate, metrics={"mean_average_precision_at_r": float("nan")})
        elif rate != 4:
            finish(job, rate)

    queues = trained_by(train)
    assert command() == 1
    made = kept_study()
    assert made.chosen("base") == ((RATE, 0.01),)
    assert made.tried("base")[1] == ({RATE: 0.02}, None, [1])
    assert (made.chosen("third"), made.tests("third")) == (None, [])
    assert len([*chain(*queues)]) == 2 * 2 + 2 * 2 + 2 + 2  # nothing twice
    assert "new beside base" in Path("toy.md").read_text().lower()


def test_more_seeds_are_tested_once_where_the_first_ones_leave_a_wide_interval(toy, trained_by):
    change(seeds={"count": 2, "first": 5, "more": 3, "wider_than": 1.0})

    def train(job):
        noise = {"new": 0.01, "third": 0.0001}.get(about(job).row, 0)
        finish(job, 0.5 + noise * (-1) ** job.seed)

    queues = trained_by(train)
    assert command() == 0
    tests = {"base": range(5, 10), "new": range(5, 10), "third": range(5, 7)}
    trained = sorted((job.row, job.seed) for job in map(about, chain(*queues)))
    assert trained == [(row, seed) for row, seeds in tests.items() for seed in seeds]
    assert {row: sorted(of) for row, of in kept_study().found().items()} == {
        row: [*seeds] for row, seeds in tests.items()
    }


def test_the_untrained_network_is_shown_first_and_recommended(toy, trained_by, capsys):
    own = {"recipe": "toy/table/base", "settings": ["--optimization.steps=0", "--label=raw"]}
    change(rows={"base": {}, "new": {}, "third": {}, "raw": own})
    measured = {"hardware": {"processor": "A", "cores": 2, "gpus": []}}

    def steps(job):
        return job.config["optimization"]["steps"]

    def train(job):
        if count := steps(job):
            assert "For 90 of 100 " in Path("toy.md").read_text()
        trained = {0: 0.9, 3: 0.5, 4: 0.95}[count]
        finish(job, trained + job.seed / 1e4 * (count > 0), **measured)

    queues = trained_by(train)
    assert command("--finish", "--", "--optimization.steps=3") == 0
    trained = [(steps(job), about(job).split) for job in chain(*queues)]
    assert trained == [(0, "test")] * 2 + [(3, "test")] * 6 + [(0, "all")]
    told = capsys.readouterr().out
    assert "Best so far: raw" in told and "Recommended: raw. Train nothing: " in told

    # A training of the same recipe is no network that is finished already.
    assert command("--", "--optimization.steps=4") == 0
    told = capsys.readouterr().out
    assert "Recommended: base." in told and "Train the recommended method on all classes" in told
    assert re.search(r"benchmarks\.export runs/studies/toy/base/\S+ --output", told)
    # Kept results are shown without what other settings have left in their folders.
    measured["hardware"] = {"processor": "B", "cores": 2, "gpus": []}
    assert command("--", "--optimization.steps=4", "--data.batch_size=40") == 0
    assert "on 2 cores of B" in capsys.readouterr().out
    assert command("--page-only", "--", "--optimization.steps=4") == 0
    told = capsys.readouterr().out
    assert "cores of B" not in told and "benchmarks.export" not in told


def test_the_recommended_row_is_trained_on_all_classes_once(toy, trained_by, capsys):
    change(rows={"base": {"choose": {RATE: [0.1, 0.2]}}, "new": {"takes": ["base"]}, "third": {}})

    def train(job):
        row, _, seed, _, rate, _ = about(job)
        finish(job, 0.5 + 0.1 * (row == "new") + seed / 1e4 + (rate == 0.2) / 1e3)

    queues = trained_by(train)
    assert command() == 0
    told = "benchmarks.study toy.yaml --output=toy.md --finish"
    assert told in capsys.readouterr().out and told in (page := Path("toy.html").read_text())
    assert "hours in all, starts not counted, on 2 cores of A" in page
    assert "all" not in {about(job).split for job in chain(*queues)}
    queues.clear()
    assert command("--finish") == 0
    [[job]] = queues
    assert (about(job).split, about(job).rate) == ("all", 0.2), "the chosen one"
    assert job.folder.parent == Path("runs/studies/toy/finished/base")
    assert f"benchmarks.export {job.folder} --output exported\n" in capsys.readouterr().out
    queues.clear()
    assert command("--finish") == 0 and not queues
    assert command("--finish", "--page-only") == 2
    assert "--finish: trains, and --page-only does not" in capsys.readouterr().err


def test_only_the_best_comparison_on_validation_classes_is_tested(toy, trained_by):
    """With a family of one, in which no test class had a part; untrained rows are tested once for all seeds."""
    chosen = {"takes": ["base"], "choose": {BETA: [2.0, 3.0]}}
    raw = {"recipe": "toy/table/base", "settings": ["--optimization.steps=0", "--label=raw"]}
    rows = {"base": {"choose": {RATE: [0.01, 0.02]}}, "new": chosen, "third": chosen}
    rows["raw"] = raw | {"same_for_all_seeds": True}
    change(rows=rows, choice={"draws": 1, "equal_budget": False, "finalists": 1})

    def train(job):
        row, split, seed, *_ = about(job)
        gain = {"third": 0.1, "new": 0.05 + (split == "test")}.get(row, 0)
        finish(job, 0.5 + gain + seed / 1e3 * (row == "third"))

    queues = trained_by(train)
    assert command() == 0
    tests = [job for job in chain(*queues) if about(job).split == "test"]
    tested = sorted((job.config["label"], job.seed) for job in tests)
    assert tested == [("base", 0), ("base", 1), ("raw", 0), ("third", 0), ("third", 1)]
    study = kept_study()
    [finding] = auditing.judged(study)[1]
    assert (finding.comparison.name, finding.adjusted) == ("2", finding.tested and finding.tested.p)
    counts = {"raw": 2, "base": 2, "new": 0, "third": 2}
    assert {row: len(of) for row, of in study.found().items()} == counts
    assert study.left() == []


@pytest.mark.parametrize(("behind", "tried"), [(9.0, False), (11.0, True)])
def test_a_method_on_a_loss_that_is_far_behind_is_not_tried(toy, trained_by, behind, tried):
    """The better loss has 25 % of MAP@R on validation classes, the other one 15 %."""
    poor = {"recipe": "toy/table/third", "settings": ["--label=poor"], "choose": {RATE: [0.01]}}
    rows = {"base": {"choose": {RATE: [0.01]}}, "poor": poor}
    rows["new"] = {"takes": ["base"], "choose": {BETA: [2.0]}}
    rows["third"] = {"takes": ["poor"], "choose": {BETA: [3.0]}}
    compared = {
        name: {"claim": "it helps", "better": better, "than": than}
        for name, better, than in (("1", "new", "base"), ("2", "third", "poor"))
    }
    choice = {"draws": 1, "equal_budget": False, "finalists": 1, "behind": behind}
    change(rows=rows, comparisons=compared, choice=choice)
    queues = trained_by(lambda job: finish(job, 0.5 if about(job).row in ("base", "new") else 0.3))
    assert command() == 0
    made = [job.config["label"] for job in chain(*queues)]
    assert ("third" in made) == tried
    assert f"{1 + tried} of 2 methods were tuned" in Path("toy.md").read_text()
    assert made.count("new") == 3 and made.count("poor") == 1, "the others as before"
    assert kept_study().left() == []
