"""The page of a study in HTML: what to do first, each method beside its base, and the rest folded."""

import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.reporting.study_answer import advice
from benchmarks.reporting.study_html import study_html
from benchmarks.reporting.verdicts import judge
from benchmarks.settings import CONTROL, StudyFile
from tests.benchmarks.reporting.test_study_answer import without_papers
from tests.benchmarks.reporting.test_study_page import compared, made, row_of

LABELS = {"base": "plain <loss>", "a": "loss + A", "b": "loss + B", "c": "loss + C"}
STEPS = {"Export it": "python -m benchmarks.export 'my run' --output exported"}


def told(study: StudyFile, results: Any) -> list[str]:
    return advice(study, judge(study, results), results, LABELS)


def html_of(study: StudyFile, results: Any, **changes: Any) -> str:
    given = {"labels": LABELS, "tried": {row: [] for row in study.rows}, "steps": STEPS, **changes}
    about = {"registration": "Registered at `abc`.", "command": "python -m benchmarks.study toy"}
    return study_html(study, judge(study, results), results, **about, **given)


def test_a_gain_is_told_with_its_size_cost_and_sureness():
    lead, sure, before = told(*without_papers({"a": 2.5, "b": 0.0}))
    assert lead == (
        "Train with loss + A: on classes it was not trained on it is 2.5 points better than plain <loss> alone, by "
        "Recall@1, for 1.3 times the training time."
    )
    assert sure.startswith("How sure: over 8 repeated trainings, the gain is between 2.3 and 2.7 ")
    assert before == ("The network before any training has 48.00 %, that of plain <loss> 50.00 %.")


@pytest.mark.parametrize(
    ("gain", "sentence"),
    [
        (0.4, "This is a small gain, less than 1 point."),
        (1.0, "The gain may be less than 1 point, so"),
    ],
)
def test_a_gain_that_is_hardly_worth_having_is_called_so(gain, sentence):
    assert any(one.startswith(sentence) for one in told(*without_papers({"a": gain, "b": 0.0})))


@pytest.mark.parametrize(
    ("gains", "few"), [({"a": 0.0, "b": -2.0}, False), ({"a": 0.0, "b": 0.5}, True)]
)
def test_without_a_gain_the_plain_loss_is_to_be_used(gains, few):
    wide = [0.0] * 8 if not few else [4, -4, 5, -5, 4, -4, 5, -5]
    study, results = without_papers(gains)
    for run, noise in zip(results["b"].values(), wide, strict=True):
        run["metrics"]["recall_at_1"] += noise / 100
    lead, *more = told(study, results)
    why = "there is too little data to tell" if few else "none of the methods is worth having here"
    assert lead.startswith(f"Train with plain <loss> alone: {why}")
    assert any(of.startswith("More classes would tell") for of in more) is few
    assert any(
        re.match(r"How sure: a gain of more than \d\.\d points is unlikely", of) for of in more
    )


def test_methods_that_harm_allow_no_gain():
    assert any(
        sentence.startswith("How sure: any gain is unlikely, even for loss + ")
        for sentence in told(*without_papers({"a": -2.0, "b": -3.0}))
    )


def test_a_better_plain_loss_is_not_hidden():
    """A method that helps a weak loss may give less than another loss alone."""
    study, results = without_papers({"a": 1.5, "b": 0.0})
    results["c"] = row_of(9.0)
    other = replace(compared("3", "b"), than="c")
    study = replace(study, comparisons=[*study.comparisons, other])
    sentences = told(study, results)
    assert sentences[0].startswith("Train with loss + A")
    assert (
        "But loss + C alone has 59.0 % here, and loss + A 51.5 %; no test compares these two."
        in sentences
    )


def test_nothing_is_recommended_without_a_main_finding():
    study, results = made({"c": 1.0}, comparisons=[compared("A/A", "c", family=CONTROL)])
    assert told(study, results) == ["Nothing is decided yet: no main comparison has a result."]
    assert "Nothing is decided yet" in html_of(study, results)


def test_the_page_begins_in_plain_words_and_loads_nothing():
    page = html_of(*without_papers({"a": 1.5, "b": -2.0}))
    first, _, rest = page.partition("<h2>")
    shown = re.sub(r"<style>.*?</style>", "", first, flags=re.DOTALL)
    assert "Train with loss + A" in shown and "plain &lt;loss&gt;" in shown
    assert "±" not in shown and "0123abc" not in shown
    assert "default-src 'none'" in page and not re.search(r"(src|href)=.?(?!data:)[\w/.]+:?/", page)
    assert "±" in rest and "0123abc" in rest and "Registered at <code>abc</code>." in rest
    assert "python -m benchmarks.export &#39;my run&#39;" in page


def test_rows_have_neutral_names_coloured_words_and_marked_best_values():
    page = html_of(*without_papers({"a": 1.5, "b": -2.0}))
    assert not re.search(r"\b[ab] helps", page, re.IGNORECASE), "a claim that may be denied"
    table = page[page.index('<div class="methods">') : page.index("</table>")]
    assert '<span class="gain">worth having</span>' in table
    assert '<span class="harm">harms</span>' in table
    assert re.findall(r'class="best">([^<]+)<', table) == ["51.5", "+1.5"]
    assert table.count("beside plain &lt;loss&gt;") == 2 and "× 1.30" in table
    page = html_of(*without_papers({"a": 0.0, "b": -0.1}))
    assert re.findall(r'class="best">([^<]+)<', page) == ["50.0"] * 3, "no difference is a gain"
    study, results = without_papers({"a": 1.5, "b": 0.0})
    results["b"][3]["metrics"] = {}
    page = html_of(study, results)
    assert "diverged" in page and "<span>–</span>" in page
