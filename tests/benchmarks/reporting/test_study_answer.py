"""The first sentence of a study's page: which method helps, by how much and at what cost, or what would tell."""

from dataclasses import replace
from typing import Any

import pytest
from scipy import stats

from benchmarks.reporting.study_answer import deciding, recommended
from benchmarks.reporting.verdicts import judge
from benchmarks.settings import StudyFile
from benchmarks.settings.study_files import Seeds, StudyRow
from tests.benchmarks.reporting.test_study_page import (
    HALF,
    NOISE,
    N,
    compared,
    made,
    page_of,
    row_of,
    tables,
)


@pytest.mark.parametrize(
    ("gains", "answer"),
    [
        ({"a": 0.1, "b": -0.1, "c": 0.2}, "\n**None of 3 comparisons shows a gain.** The largest gain that a 95 % "
         "interval still allows is 0.44 points of Recall@1 (c helps), and half of the paper's gain is excluded in "
         "1 of 1.\n"),
        ({"a": -2, "b": -3, "c": -2}, "is 0.00 points of Recall@1"),
        ({"a": 2, "b": -2, "c": 0}, f"\n**1 of 3 comparisons shows a gain**: a helps, +2.00 ± {HALF} points of "
         f"Recall@1. **1 shows harm**: b helps, -2.00 ± {HALF} points of Recall@1.\n"),
        ({"a": 0.0}, "**The comparison shows no gain.**"),
        ({}, "# Does it help?\n\nNo comparison is decided: no main one is measured.\n\nRegistered"),
    ],
)  # fmt: skip
def test_the_answer_says_how_many_and_how_much(gains, answer):
    assert answer in page_of(*made(gains))


def without_papers(gains: dict[str, float], **changes: Any) -> tuple[StudyFile, dict[str, Any]]:
    """A study of two methods, whose runs tell their speed and the metric before training."""
    comparisons = [compared("1", "a"), compared("2", "b", method="other")]
    study, results = made(gains, comparisons=comparisons, **changes)
    for row, speed in (("base", 130.0), ("a", 100.0), ("b", 65.0)):
        for run in results[row].values():
            run |= {"images_per_second": speed, "before_training": {"recall_at_1": 0.48}}
    return study, results


def first_lines(page: str) -> str:
    return page.split("\n\n")[1]


def test_blocks_have_test_sets_whose_means_are_not_compared():
    """The row of the easier draw has the higher mean, that of the harder one the higher gain."""
    study, results = without_papers({"a": 1.5, "b": 0.0})
    results |= {"easy": row_of(30.4), "easy_base": row_of(30.0, noise=0 * NOISE)}
    draws = {row: StudyRow("r", settings=["--data.test_classes=easy.txt"]) for row in results}
    easy = replace(compared("easy draw", "easy"), than="easy_base", claim="a helps")
    study = replace(study, comparisons=[study.comparisons[0], easy])
    findings = judge(study, results)
    assert recommended(study, findings, results) == "easy", "of one test set"
    study = replace(study, rows={"base": StudyRow("r"), **draws, "a": StudyRow("r")})
    assert recommended(study, findings, results) == "a"
    page = first_lines(page_of(study, results))
    assert f"a helps (1), +1.50 ± {HALF}" in page and f"a helps (easy draw), +0.40 ± {HALF}" in page
    results |= {"a": row_of(0.0), "easy": row_of(30.1)}
    assert "of Recall@1 (a helps (easy draw))." in first_lines(page_of(study, results))


def test_without_papers_the_answer_is_a_method_its_gain_and_its_cost():
    page = page_of(*without_papers({"a": 1.5, "b": -2.0}))
    assert first_lines(page) == (
        f"**Yes: a helps, +1.50 ± {HALF} points of Recall@1 (from 50.00 to 51.50 %), at 1.30 times the time of a "
        f"step.** **1 shows harm**: b helps, -2.00 ± {HALF} points of Recall@1. The network before any "
        "training has 48.00 %, that of `base` 50.00 %."
    )
    assert [row[3] for row in tables(page)[0]] == ["× 1.30", "× 2.00"]
    assert "paper" not in page.partition("## What was compared")[0].lower()
    page = page_of(*without_papers({"a": 0.0, "b": 0.01}))
    assert first_lines(page).startswith("**No: no method helps.** The largest gain that")
    study, results = without_papers({"a": 0.0, "b": 0.0})
    for run in (run for of in results.values() for run in of.values()):
        run["before_training"]["recall_at_1"] = 0.6
    assert first_lines(page_of(study, results)).endswith(
        "before any training has 60.00 %, that of `base` 50.00 %: on these images, training does not pay."
    )


def test_too_few_data_to_tell_come_with_the_means_that_would_tell():
    noise = [-3.0, 3.0, 0.0]
    results = {"base": row_of(noise=[0, 0, 0]), "a": row_of(noise=noise), "b": row_of(noise=noise)}
    study, _ = without_papers({"a": 0, "b": 0}, seeds=Seeds(count=3))
    told = first_lines(page_of(study, results))
    assert told.startswith("**The data are too few to tell if one helps.** The largest")
    few, more = (stats.t.ppf(0.975, n - 1) * 3 / n**0.5 for n in (3, 10))
    assert told.endswith(
        f"or more seeds: 10 of them (`--seeds 10`) would make the widest interval some ±{more:.1f} instead of "
        f"±{few:.1f}."
    )
    told = first_lines(
        page_of(replace(study, seeds=Seeds(count=N)), results | made({"a": 3, "b": 0})[1])
    )
    assert told.startswith("**Yes: a helps, +3.00")
    assert ".** 1 other comparison shows no gain." in told
    assert "times the time" not in told, "no run told its speed"


@pytest.mark.parametrize(
    ("gains", "row", "name"),
    [((1.0, 2.0), "b", "2"), ((1.0, 0.0), "a", "1"), ((-2.0, 0.0), "base", "2")],
)
def test_the_row_to_use_and_its_comparison(gains, row, name):
    """The best row that is shown to help, or else the plain loss, beside the best method."""
    study, results = without_papers(dict(zip("ab", gains, strict=True)))
    findings = judge(study, results)
    assert recommended(study, findings, results) == row
    assert deciding(study, findings, results).comparison.name == name
