"""The pages of a study: in Markdown, its answer, tables and what it lacks; in HTML, what to do first.

tests/end_to_end/test_published_results.py compares whole pages in Markdown, to the byte.
"""

import re
from copy import deepcopy
from dataclasses import replace
from html import unescape
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import pytest
from scipy import stats

from benchmarks.reporting import study_page
from benchmarks.reporting.study_advice import advice
from benchmarks.reporting.study_choice import choose
from benchmarks.reporting.study_page import Own, neutral, study_files
from benchmarks.reporting.study_sections import by_class
from benchmarks.reporting.study_tables import Candidate
from benchmarks.reporting.verdicts import judge
from benchmarks.settings.study_files import CONTROL, Seeds, StudyFile, StudyRow
from tests.benchmarks.reporting.made_study import (
    BASE,
    HALF,
    MAP,
    NOISE,
    RECALL,
    TRIPLET,
    N,
    compared,
    row_of,
    study_of,
)

RATE = "optimization.learning_rate"
WIDTH = f"{HALF:.2f}"
COMPARISONS = [
    compared("1", "a", method="HORDE", reported=TRIPLET, paper="HORDE, Table 1"),
    compared("2", "b", method="HORDE"),
    compared("3", "c", method="N-pairs"),
    compared("m", "a:descriptor", family="mechanisms of HORDE"),
    compared("own, sketch", "b", family="own claims", as_good=True),
    compared("A/A", "c", family=CONTROL),
]
ALL = {"a": 1.5, "b": 0.001, "c": 0.4}


def made(
    gains: dict[str, float], comparisons: Any = COMPARISONS, **changes: Any
) -> tuple[StudyFile, dict[str, Any]]:
    study = study_of(*comparisons, **changes)
    return study, {"base": deepcopy(BASE)} | {row: row_of(gain) for row, gain in gains.items()}


def page_of(study: StudyFile, results: Any, **changes: Any) -> str:
    """The page, with plain spaces and hyphens."""
    registered = changes.pop("registered", {one.name: True for one in study.comparisons})
    findings = judge(study, results, registered=registered)
    tried = {row: [] for row in study.rows} | changes.pop("tried", {})
    about = {"tried": tried, "registration": "Registered at `abc`.", **changes}
    with mock.patch.object(study_page, "study_figures", lambda *about: {}):  # which take long
        _, files = study_files("toy", study, findings, results, **about)
    page = files["toy.md"].decode()
    return page.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NON-BREAKING HYPHEN}", "-")


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page, without their headers."""
    return [
        [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()[2:]]
        for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE)
    ]


def answer_of(study: StudyFile, results: Any) -> str:
    return page_of(study, results).split("\n\n")[1]


def test_the_answer_says_how_many_and_how_much():
    for gains, answer in (
        ({"a": 0.1, "b": -0.1, "c": 0.2}, f"still allows is {0.2 + HALF:.2f} points"),
        ({"a": -2, "b": -3, "c": -2}, "still allows is 0.00 points"),
        ({"a": 2, "b": -2, "c": 0}, f"1 of 3 comparisons shows a gain**: a helps, +2.00 ± {WIDTH}"),
        ({"a": 2, "b": -2, "c": 0}, f"**1 shows harm**: -2.00 ± {WIDTH} points of "),
        ({}, "No comparison is decided: no main one is measured."),
    ):
        assert answer in answer_of(*made(gains))


def without_papers(gains: dict[str, float], **changes: Any) -> tuple[StudyFile, dict[str, Any]]:
    """A study of two methods, whose runs tell their speed and the metric before training."""
    comparisons = [compared("1", "a", method="HORDE"), compared("2", "b", method="other")]
    study, results = made(gains, comparisons, **changes)
    for row, speed in (("base", 130.0), ("a", 100.0), ("b", 65.0)):
        for run in results[row].values():
            run |= {"images_per_second": speed, "before_training": {RECALL: 0.48}}
    return study, results


def test_blocks_have_test_sets_whose_means_are_not_compared():
    """The row of the easier draw has the higher mean, that of the harder one the higher gain."""
    study, results = made({"a": 1.5}, [compared("1", "a"), compared("2", "easy", than="plain")])
    results |= {"easy": row_of(30.4), "plain": row_of(30.0, noise=0 * NOISE)}
    findings = judge(study, results)
    assert choose(study, findings, results).row == "easy", "of one test set"
    easy = StudyRow("r", settings=["--data.test_classes=easy.txt"])
    study = replace(study, rows=study.rows | dict.fromkeys(("easy", "plain"), easy))
    assert choose(study, findings, results).row == "a"


def test_without_papers_the_answer_is_a_method_and_its_gain():
    study, results = without_papers({"a": 1.5, "b": -2.0})
    page = page_of(study, results)
    gain = f"a helps, +1.50 ± {WIDTH} points of Recall@1 (from 50.00 to 51.50 %).**"
    assert f"**Yes: {gain}" in page and "before any training has 48.00 %" in page
    changes = [["50.00 → 51.50", "× 1.30"], ["50.00 → 48.00", "× 2.00"]]
    assert [row[3:5] for row in tables(page)[0]] == changes


def test_what_training_lost_is_said_first_of_the_recommended_network():
    study, results = without_papers({"a": 1.5, "b": -2.0})
    for run in results["a"].values():
        run["outputs"] = {"untrained_pca": {RECALL: 0.6}, "untrained_features": {RECALL: 0.55}}
    pca = "untrained trunk, principal components"
    lost = f"Training lost 8.50 points against the untrained network ({pca}: 60.00 %): with `a`, Re"
    assert answer_of(study, results).startswith(f"**{lost}call@1 is 51.50 %.** **Yes: a helps")
    lead, advised, _ = told(study, results)
    right = "For 52 of 100 images of new classes, the nearest image shows the same class"
    assert lead == f"{right}; without training, that of 60."
    lowers = f"Training lowers that number from 60.0 of 100 ({pca}) to 51.5, by -8.5 (-8.7 to -8.3"
    assert advised.startswith(f"Recommended: loss + A. {lowers}")
    assert lead in html_of(study, results).partition("<h2>")[0]
    study, results = made({"a": 1.5})  # beside papers, too
    for run in results["a"].values():
        run["before_training"] = {RECALL: 0.6}
    assert answer_of(study, results).startswith("**Training lost 8.50 points against the un")


def test_too_few_data_to_tell_come_with_the_means_that_would_tell():
    study, results = without_papers({"a": 0, "b": 0}, seeds=Seeds(count=3))
    results |= dict.fromkeys("ab", row_of(noise=[-3.0, 3.0, 0.0]))
    told = answer_of(study, results)
    assert told.startswith("**The data are too few to tell if one helps.**")
    few, more = (stats.t.ppf(0.975, n - 1) * 3 / n**0.5 for n in (3, 10))
    assert "(`--seeds 10`)" in told and f"±{more:.1f} instead of ±{few:.1f}." in told


@pytest.mark.parametrize(
    ("gains", "row", "name"),
    [((1.0, 2.0), "b", "2"), ((1.0, 0.0), "a", "1"), ((-2.0, 0.0), "base", "2")],
)
def test_the_row_to_use_and_its_comparison(gains, row, name):
    """The best row that is shown to help, or else the plain loss, beside the best method."""
    study, results = without_papers(dict(zip("ab", gains, strict=True)))
    choice = choose(study, judge(study, results), results)
    assert (choice.row, choice.finding.comparison.name) == (row, name)


def test_the_page_shows_each_verdict():
    main, others, controls, *_ = tables(page_of(*made(ALL)))
    p = stats.ttest_1samp(NOISE + 0.4, 0).pvalue
    assert [row[1:5] for row in main] == [
        ["worth having", f"+1.50 ± {WIDTH}", "50.00 → 51.50", "+3.1 (CUB)"],
        ["negligible", f"+0.00 ± {WIDTH}", "50.00 → 50.00", ""],
        ["*exploratory*", f"+0.75 ± {WIDTH}", "", ""],
        ["helps, by less than the margin", f"+0.40 ± {WIDTH}", "50.00 → 50.40", ""],
    ]
    assert [main[0][6], main[3][6]] == ["< 0.001", f"{2 * p:.3f}"], "of three"
    assert [row[1] for row in others] == ["harms", "as good"]
    assert controls[0][5] == f"{p:.3f}", "not corrected"


def test_queries_without_an_answer_are_told():
    study, results = made(ALL)
    for run in chain(*(of.values() for of in results.values())):
        run["queries"] = [12, 4]
    told = "12 queries, of which 4 have nothing to find and do not count."
    assert f"A test has {told}" in page_of(study, results).replace("\n", " ")
    labels = {row: row for row in study.rows}
    assert f"({told[:-1]}).**" in advice(study, judge(study, results), results, labels)[0]


def test_what_diverged_is_told():
    study, results = made(ALL)
    for row in "abc":
        results[row][1]["metrics"] = {}
    results["base"][2]["metrics"][RECALL] = float("nan")
    page = page_of(study, results)
    assert "No comparison is decided: a run of each diverged." in page
    main, *_, means = tables(page)
    assert main[0][1:3] == ["diverged", "`a`, seed 1; `base`, seed 2"]
    assert main[2] == ["*HORDE, pooled*", "diverged", "", "", "", ""]
    assert [means[0][-1], means[-1][-1]] == [f"{N - 1} (diverged: seed {s})" for s in (2, 1)]
    assert "nan" not in page


def test_what_is_not_measured_yet_is_named():
    lost = Candidate({RATE: 3.0}, None, [0, 1])
    tried = {"c": [lost], "b": [Candidate({RATE: 1.0}, 0.2, []), lost]}
    rows = {row: StudyRow("x", choose={RATE: [1.0, 3.0]}) for row in ("base", *"abc")}
    more = compared("+", "a", beyond=["c", "base"], family="interaction")
    page = page_of(*made({"a": 0.0}, [*COMPARISONS, more], rows=rows), tried=tried)
    told = page.replace(" (all settings of `c` diverged)", "!")
    assert "Not measured yet: `2`; `3`!; `own, sketch`; `A/A`!; `+`!." in told
    assert "| + | (`a` - `base`) - (`c` - `base`) | Recall@1 |" in page
    assert "| `c` |  | learning_rate |  | 3: diverged (draws 0, 1) | 1 |" in page


LABELS = {"base": "plain <loss>", "a": "loss + A", "b": "loss + B", "c": "loss + C"}
LABELS |= {"pca": "untrained, pca", "white": "whitened"}


def told(study: StudyFile, results: Any, setup: Any = ()) -> list[str]:
    """As plain text."""
    named = neutral(study, judge(study, results), LABELS)
    return [line.replace("**", "") for line in advice(*named, results, LABELS, setup)]


OWN = Own(LABELS, [], {"Export it": "python -m benchmarks.export 'my run' --output exported"})


def own_files(study: StudyFile, results: Any, own: Own = OWN) -> dict[str, str]:
    findings = judge(study, results)
    about = {"registration": "Registered at `abc`.", "command": "python -m benchmarks.study toy"}
    tried = {row: [] for row in study.rows}
    told, files = study_files("toy", study, findings, results, tried=tried, own=own, **about)
    assert told == advice(*neutral(study, findings, LABELS), results, LABELS, own.setup)
    return {name: content.decode() for name, content in files.items()}


def html_of(study: StudyFile, results: Any) -> str:
    return own_files(study, results)["toy.html"]


def test_a_gain_is_told_with_its_size_and_sureness():
    lead, method, beside = told(*without_papers({"a": 2.5, "b": 0.0}))
    assert lead.startswith("For 52 of 100 images of new classes, the nearest image ")
    assert method.startswith("Recommended: loss + A. Training raises that number from 48.0 of 100")
    assert f"to 52.5, by +4.5 (+4.3 to +4.7 with a confidence of 95 %, over {N} repeated" in method
    better = f"Yes: loss + A beside plain <loss>, +2.50 ± {WIDTH} points of Recall@1 (from 50.00 "
    assert beside.startswith(f"{better}to 52.50 %). 1 other ")


def starred(study: StudyFile, results: Any) -> set[str]:
    """The networks with a star, in tables and figures."""
    files = own_files(study, results)
    texts = [text for name, text in files.items() if not name.endswith(".html")]
    found = re.findall("([^<>|]+)\N{NO-BREAK SPACE}★", "|".join(texts))
    names = {unescape(name).strip().rpartition("beside ")[2] for name in found}
    return {name[0].lower() + name[1:] for name in names}


def test_a_better_network_is_not_hidden_and_the_star_stands_at_the_recommended_one():
    """A method that helps a weak loss may give less than another loss alone, or with a method."""
    comparisons = [compared("1", "a"), compared("3", "b", than="c")]
    study, results = made({"a": 1.5, "b": 9.05, "c": 9.0}, comparisons)
    results["b"] = row_of(9.1, noise=2 * NOISE[::-1])
    _, method, beside = told(study, results)
    assert method.startswith("Recommended: loss + A.")
    assert "But loss + B has 59.1 % Recall@1 here, and loss + A 51.5 %" in beside
    assert starred(study, results) == {"loss + A"}
    results["a"] = row_of(0.0)
    _, method, beside, *_ = told(study, results)
    assert method.startswith("Recommended: loss + C.") and "no method helps" in beside
    assert "points of Recall@1 (loss + B beside loss + C)" in beside
    assert starred(study, results) == {"loss + C"}


def test_own_images_have_their_classes_and_what_may_help():
    study, results = without_papers({"a": 1.5, "b": -2.0})
    right = [500, 6000, 0, 500, 6000, 500, 6000, 6000]
    by_size = {"queries": [4, 8, 0, 4, 9, 4, 8, 8], RECALL: right, MAP: [300, 900] * 4}
    for run in results["a"].values():
        run["per_class"] = by_size
    setup = ["Not tried here: another trunk.", "Network: toy."]
    lead, *_, more, network = told(study, results, setup)
    assert more == f"What may help more: {setup[0]}"
    assert network == setup[1]
    sections = by_class(results["a"], [*"hgfedcba"], "loss + A")
    rows = [["h", "4", "5.0", "3.0"], ["g", "8", "60.0", "9.0"]]
    assert [row for row in sections[0].table.rows if row[0] in "hgf"] == rows
    own = OWN._replace(setup=setup, known=["Known? No."], sections=sections)
    files = own_files(study, results, own)
    page = files["toy.md"]
    assert page.index(f"**{lead}**") < page.index("* Network: toy.\n\nKnown? No.\n")
    assert page.index("## Behind the answer") < page.index("### Class by class\n\nWith loss + A")
    assert "<details><summary>Class by class</summary>" in files["toy.html"]
    opened = own._replace(sections=[sections[0]._replace(folded=False)])
    page = own_files(study, results, opened)["toy.md"]
    assert page.index("\n## Class by class\n") < page.index("## What next")


def test_the_page_begins_in_plain_words_and_loads_nothing():
    page = html_of(*without_papers({"a": 1.5, "b": -2.0}))
    first, _, rest = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).partition("<h2>")
    assert "Recommended: loss + A" in first and "plain &lt;loss&gt;" in first
    assert "0123abc" not in first and "0123abc" in rest
    assert "default-src 'none'" in page and not re.search(r"(src|href)=.?(?!data:)[\w/.]+:?/", page)
    assert "python -m benchmarks.export 'my run'" in page


def test_rows_have_neutral_names_and_two_ways_to_say_how_good_they_are():
    study, results = without_papers({"a": 1.5, "b": -2.0}, primary=MAP)
    files = own_files(study, results)
    assert not re.search(r"\b[ab] helps", "".join(files.values()), re.IGNORECASE), "a claim"
    assert "beside plain &lt;loss&gt;" in files["toy.html"]
    main, *_ = tables(files["toy.md"])
    assert [row[3:5] for row in main] == [
        ["10.00 → 10.00", "50.0 → 51.5"], ["10.00 → 10.00", "50.0 → 48.0"]
    ]  # fmt: skip
    results["b"][3]["metrics"] = {}
    main, *_ = tables(own_files(study, results)["toy.md"])
    assert main[1][1] == "diverged" and main[1][3:5] == ["", ""]


def with_untrained(gains: dict[str, float], **untrained: float) -> tuple[StudyFile, dict[str, Any]]:
    """The study with rows that train nothing."""
    study, results = without_papers(gains)
    for run in (run for row in results.values() for run in row.values()):
        run["before_training"] = {RECALL: 0.9}  # not said: the rows are what training is beside
    row = StudyRow("toy/table/base", settings=["--optimization.steps=0"])
    rows = study.rows | dict.fromkeys(("pca", "white"), row)
    results |= {name: row_of(gain, noise=NOISE[::-1]) for name, gain in untrained.items()}
    return replace(study, rows=rows), results


def test_a_training_must_beat_the_untrained_network():
    """By the study's rule: a tenth of a point is too little."""
    for gains, white, row, lead in (
        ({"a": 2.0, "b": 0.0}, 1.0, "a", "Recommended: loss + A. Training raises "),
        ({"a": 2.0, "b": 0.0}, 1.9, "white", "Recommended: whitened. Train nothing: "),
        ({"a": 0.0, "b": 0.0}, -1.0, "base", "Recommended: plain <loss>. Training raises "),
        ({"a": 0.1, "b": -1.0}, 0.3, "white", "Recommended: whitened. Train nothing: "),
        ({}, 1.0, "white", "Best so far: whitened. Nothing is trained yet; "),
    ):
        study, results = with_untrained(gains or {"a": 0.0, "b": 0.0}, pca=-3.0, white=white)
        if not gains:
            results |= {name: {} for name in ("base", "a", "b")}
        findings = judge(study, results)
        assert choose(study, findings, results).row == row
        first, method, *more = told(study, results)
        assert method.startswith(lead)
        page = page_of(study, results)
        said = " ".join([first, method, *more, answer_of(study, results)])
        assert "90.0" not in said and "raining lost" not in said
        if gains:
            beside = f"{gains['a'] - white:+.1f}"
            assert f"by {beside} (" in method and f"from {50 + white:.1f} of 100" in method
            assert "## Does training pay?" in page
            assert starred(study, results) == {LABELS[row]}


def test_more_trainings_are_advised_only_where_chance_lies_in_them():
    study, results = with_untrained({"a": 0.1, "b": -1.0}, pca=-3.0, white=0.3)
    study = replace(study, seeds=replace(study.seeds, count=5))
    assert "or more repeated trainings (`--seeds 10`)" in told(study, results)[1]
    by_class = np.random.default_rng(3).normal(0, 800, 30)
    by_class -= by_class.mean()
    for name, row in results.items():
        for run in row.values():
            right = 1e4 * run["metrics"][RECALL] + by_class * (name == "a")
            run["per_class"] = {"queries": [20] * 30, RECALL: right.round().astype(int).tolist()}
    assert "Photographs of more classes would show if training helps." in told(study, results)[1]


def test_a_method_that_only_beats_the_untrained_network_is_told_beside_that():
    study, results = with_untrained({"a": 0.19, "b": -1.0}, pca=-3.0)
    results["white"] = row_of(-0.18)
    findings = judge(study, results)
    choice = choose(study, findings, results)
    assert choice.row == "a" and choice.finding is choice.training
    method = told(study, results)[1]
    assert "raises that number from 49.8 of 100 (whitened) to 50.2, by +0.4 (" in method
