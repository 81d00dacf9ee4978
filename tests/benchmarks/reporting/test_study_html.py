"""The page of a study in HTML: what to do first, each method beside its base, and the rest folded."""

import re
from typing import Any

import pytest

from benchmarks.reporting.study_answer import advice
from benchmarks.reporting.study_html import study_html
from benchmarks.reporting.verdicts import judge
from benchmarks.settings import CONTROL, StudyFile
from tests.benchmarks.reporting.made_study import N, compared, row_of
from tests.benchmarks.reporting.test_study_page import made, without_papers

LABELS = {"base": "plain <loss>", "a": "loss + A", "b": "loss + B", "c": "loss + C"}


def told(study: StudyFile, results: Any) -> list[str]:
    return advice(study, judge(study, results), results, LABELS)


def html_of(study: StudyFile, results: Any) -> str:
    given = {"labels": LABELS, "tried": {row: [] for row in study.rows}}
    given |= {"steps": {"Export it": "python -m benchmarks.export 'my run' --output exported"}}
    about = {"registration": "Registered at `abc`.", "command": "python -m benchmarks.study toy"}
    return study_html(study, judge(study, results), results, **about, **given)


def test_a_gain_is_told_with_its_size_cost_and_sureness():
    lead, sure, before = told(*without_papers({"a": 2.5, "b": 0.0}))
    assert lead.startswith("Train with loss + A: ")
    assert "is 2.5 points better than plain <loss> alone, by Recall@1, for 1.3 times" in lead
    assert f"over {N} repeated trainings, the gain is between 2.3 and 2.7 " in sure
    assert "48.00 %" in before


@pytest.mark.parametrize(
    ("gains", "sentence"),
    [
        ({"a": 0.4, "b": 0.0}, "This is a small gain, less than 1 point."),
        ({"a": 1.0, "b": 0.0}, "The gain may be less than 1 point, so"),
        ({"a": 0.0, "b": -2.0}, "Train with plain <loss> alone: none of the methods is worth having"),
        ({"a": -2.0, "b": -3.0}, "How sure: any gain is unlikely, even for loss + A"),
    ],
)  # fmt: skip
def test_advice_by_gain(gains, sentence):
    assert any(one.startswith(sentence) for one in told(*without_papers(gains)))


def test_with_too_little_data_the_plain_loss_is_to_be_used():
    study, results = without_papers({"a": 0.0, "b": 0.5})
    results["b"] = row_of(0.5, noise=[4, -4, 5, -5, 4, -4, 5, -5, 0, 0])
    lead, *more = told(study, results)
    assert "alone: there is too little data to tell" in lead
    assert any(of.startswith("More classes would tell") for of in more)


def test_a_better_plain_loss_is_not_hidden():
    """A method that helps a weak loss may give less than another loss alone."""
    comparisons = [compared("1", "a"), compared("3", "b", than="c")]
    sentences = told(*made({"a": 1.5, "b": 0.0, "c": 9.0}, comparisons))
    assert sentences[0].startswith("Train with loss + A")
    assert any("But loss + C alone has 59.0 % here" in of for of in sentences)


def test_nothing_is_recommended_without_a_main_finding():
    study, results = made({"c": 1.0}, [compared("A/A", "c", family=CONTROL)])
    assert told(study, results) == ["Nothing is decided yet: no main comparison has a result."]
    assert "Nothing is decided yet" in html_of(study, results)


def test_the_page_begins_in_plain_words_and_loads_nothing():
    page = html_of(*without_papers({"a": 1.5, "b": -2.0}))
    first, _, rest = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).partition("<h2>")
    assert "Train with loss + A" in first and "plain &lt;loss&gt;" in first
    assert "±" not in first and "0123abc" not in first and "0123abc" in rest
    assert "default-src 'none'" in page and not re.search(r"(src|href)=.?(?!data:)[\w/.]+:?/", page)
    assert "python -m benchmarks.export &#39;my run&#39;" in page


def test_rows_have_neutral_names_coloured_words_and_marked_best_values():
    study, results = without_papers({"a": 1.5, "b": -2.0})
    page = html_of(study, results)
    assert not re.search(r"\b[ab] helps", page, re.IGNORECASE), "a claim that may be denied"
    table = page[page.index('<div class="methods">') : page.index("</table>")]
    assert '<span class="gain">worth having</span>' in table
    assert '<span class="harm">harms</span>' in table
    assert re.findall(r'class="best">([^<]+)<', table) == ["51.5", "+1.5"]
    assert table.count("beside plain &lt;loss&gt;") == 2 and "× 1.30" in table
    results["b"][3]["metrics"] = {}
    page = html_of(study, results)
    assert "diverged" in page and "<span>–</span>" in page
