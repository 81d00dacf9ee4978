"""The page of a study: its answer, its tables, and what it says about what it lacks.

tests/end_to_end/test_published_results.py compares whole pages, to the byte.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.reporting.paired import assess
from benchmarks.reporting.study_page import Candidate, study_page
from benchmarks.reporting.svg import study_figures
from benchmarks.reporting.verdicts import Word, judge
from benchmarks.settings import CONTROL, Comparison, StudyFile, StudyRow
from benchmarks.settings.study_files import Choice, Seeds

NOISE = np.array([-0.3, 0.2, 0.4, -0.1, -0.2, 0.3, -0.4, 0.1])
N = len(NOISE)
HALF = f"{assess([*NOISE]).half_width:.2f}"
MAP = "mean_average_precision_at_r"
TRIPLET = ["horde/table1/cub_triplet_horde", "horde/table1/cub_triplet"]  # 3.1 points
RATE, WEIGHT = "optimization.learning_rate", "losses[1].weight"


def row_of(gain: float = 0.0, *, noise: Any = NOISE) -> dict[int, Any]:
    return {
        seed: {
            "metrics": {"recall_at_1": (50 + gain + one) / 100, MAP: 0.1},
            "outputs": {"descriptor": {"recall_at_1": 0.25, MAP: 0.05}},
            "curve": {"seen_recall_at_1": 0.9},
            **{"commit": "0123abcdef", "dirty": False, "wall_time_s": 3600.0, "processor": "A"},
        }
        for seed, one in enumerate(noise)
    }


def compared(name: str, better: str, **about: Any) -> Comparison:
    given = {"claim": f"{better} helps", "method": "HORDE", **about}
    return Comparison(name, better=better, than="base", **given)


COMPARISONS = [
    compared("1", "a", reported=TRIPLET, paper="HORDE, Table 1"),
    compared("2", "b"),
    compared("3", "c", method="N-pairs"),
    compared("m", "a:descriptor", family="mechanisms of HORDE"),
    compared("own, sketch", "b", family="own claims", as_good=True),
    compared("A/A", "c", family=CONTROL),
]


def made(gains: dict[str, float], **changes: Any) -> tuple[StudyFile, dict[str, Any]]:
    given = {"comparisons": COMPARISONS, "seeds": Seeds(count=N, draw="the start"), **changes}
    rows = {row: StudyRow(f"toy/table/{row}") for row in ("base", *"abc")}
    results = {"base": row_of(noise=0 * NOISE)} | {row: row_of(gain) for row, gain in gains.items()}
    return StudyFile("toy", "Does it help?", given.pop("rows", rows), **given), results


def page_of(study: StudyFile, results: Any, **changes: Any) -> str:
    """The page, with plain spaces and hyphens."""
    registered = changes.pop("registered", {one.name: True for one in study.comparisons})
    findings = judge(study, results, registered=registered)
    figures = {name: f"toy{name}.svg" for name in study_figures(study, findings, results)}
    tried = {row: [] for row in study.rows} | changes.pop("tried", {})
    about = {"registration": "Registered at `abc`.", "figures": figures}
    page = study_page(study, findings, results, tried=tried, **about)
    return page.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NON-BREAKING HYPHEN}", "-")


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page, without their headers."""
    return [
        [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()[2:]]
        for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE)
    ]


ALL = {"a": 1.5, "b": 0.0, "c": 0.4}


def test_the_page_answers_first_and_shows_each_verdict():
    page = page_of(*made(ALL))
    start = (
        f"# Does it help?\n\n**2 of 3 comparisons show a gain**: a helps, +1.50 ± {HALF} points of Recall@1; "
        f"c helps, +0.40 ± {HALF} points of Recall@1.\n\nRegistered at `abc`.\n\n![Paired differences"
    )
    assert page.startswith(start)
    main, others, controls, *_ = tables(page)
    p = stats.ttest_1samp(NOISE + 0.4, 0).pvalue
    assert [row[:5] for row in main] == [
        ["A helps (1)", "worth having", f"+1.50 ± {HALF}", "+3.1 (CUB)", "8"],
        ["B helps (2)", "negligible", f"+0.00 ± {HALF}", "", "8"],
        ["*HORDE, pooled*", "*exploratory*", f"+0.75 ± {HALF}", "", "8"],
        ["C helps (3)", "helps, by less than the margin", f"+0.40 ± {HALF}", "", "8"],
    ]
    assert [row[5] for row in main] == ["< 0.001", "1.000", "", f"{2 * p:.3f}"], "of three"
    assert [row[1] for row in others] == ["harms", "as good"]
    assert [row[:2] for row in controls] == [["C helps (A/A)", "helps, by less than the margin"]]
    assert controls[0][4] == f"{p:.3f}", "not corrected"
    assert page.index("(toy.svg)") < page.index("| comparison") < page.index("(toy_mechanisms.svg)")
    assert "Verdicts of the 5 comparisons, some of which have several: 1 *worth having*" in page
    for absent in ("## Settings", "Not measured yet", "†", "not committed", "*the metrics"):
        assert absent not in page


def test_a_study_that_decides_nothing_says_so_and_shows_no_figure():
    study, results = made(ALL, comparisons=[*COMPARISONS[:4], COMPARISONS[-1]])
    for row in "abc":
        results[row][1]["metrics"] = {}
    page = page_of(study, results)
    assert "\n\nNo comparison is decided: a run of each diverged.\n\n" in page
    assert tables(page)[0][2] == ["*HORDE, pooled*", "diverged", "", "", "", ""]
    undecided = page_of(*made({"c": 0.0}, comparisons=[COMPARISONS[-1]]))
    assert "\n\nNo comparison is decided: no main one is measured.\n\n" in undecided
    assert "svg" not in page + undecided and "\n\n\n" not in undecided


def test_equal_differences_are_explained():
    study, _ = made({}, comparisons=COMPARISONS[:2], seeds=Seeds(count=2))
    results = {"base": row_of(noise=[0, 0]), "a": row_of(0.5, noise=[0, 0])}
    results |= {"b": row_of(0.1, noise=[0, 0.1])}
    page = page_of(study, results)
    assert "| too noisy | +0.50 ± 0.00 (equal) |" in page
    assert "| *too noisy* | none of these, or fewer than five differences, all (equal) |" in page
    assert "still allows is 0.79 points of Recall@1 (b helps), and half of" in page
    assert "excluded in 0 of 1. 1 has fewer than five differences, all equal, and no" in page


def test_claims_to_be_as_good_are_counted_by_themselves():
    comparisons = [compared("1", "a", as_good=True), compared("2", "b", as_good=True)]
    page = page_of(*made({"a": 2.0, "b": -2.0}, comparisons=comparisons))
    assert "\n\n1 of 2 claims to be as good as another row hold.\n" in page


def test_what_was_not_registered_is_marked():
    study, results = made(ALL)
    main, *_ = tables(page_of(study, results, registered={"1": True}))
    assert [row[1] for row in main][:2] == ["worth having", "negligible, exploratory"]
    none = page_of(study, results, registered={})
    assert "None of these comparisons was registered beforehand: all are exploratory" in none
    assert "negligible, exploratory" not in none


def test_what_is_not_measured_yet_is_named():
    lost = Candidate({RATE: 3.0}, None, [0, 1])
    tried = {"c": [lost], "b": [Candidate({RATE: 1.0}, 0.2, []), lost]}
    rows = {row: StudyRow("x", choose={RATE: [1.0, 3.0]}) for row in ("base", *"abc")}
    page = page_of(*made({"a": 0.0}, rows=rows), tried=tried)
    hopeless = "(all settings of `c` diverged)"
    assert f"Not measured yet: `2`; `3` {hopeless}; `own, sketch`; `A/A` {hopeless}." in page
    assert "| `c` |  | learning_rate |  | 3: diverged (draws 0, 1) | 1 |" in page


def test_the_chosen_settings_and_the_others():
    rows = {row: StudyRow("x", choose={RATE: [0.1, 0.2]}) for row in ("base", *"abc")}
    rows["b"] = StudyRow("x", takes=["a"], choose={RATE: [1], WEIGHT: [2, 3]})
    rows |= {"c": StudyRow("x", takes=["a"]), "only": StudyRow("x", takes=["a", "b"])}
    tried = {
        "a": [Candidate({RATE: 0.1}, 0.21, []), Candidate({RATE: 0.2}, 0.223, [])],
        "b": [Candidate({RATE: 1.0, WEIGHT: 3.0}, 0.5, [])],
    }
    choice = Choice(draws=3, first=4, equal_budget=False)
    page = page_of(*made(ALL, rows=rows, choice=choice), tried=tried)
    assert tables(page)[-1] == [
        ["`a`", "", "learning_rate", "0.2: 22.30", "0.1: 21.00", "2"],
        ["`b`", "`a`", "learning_rate, weight", "1, 3: 50.00", "", "3"],
        ["`c`", "`a`", "none", "", "", "2"],
        ["`only`", "`a`, `b`", "none", "", "", "3"],
    ]
    plain = " ".join(page.split())
    assert "the largest MAP@R (%) on *validation* classes, averaged over 3 samples" in plain
    assert "4 values were tried first" in plain
    assert "**compared rows do not always have the same**." in plain
    assert f"Settings: `{WEIGHT}` is weight, `{RATE}` is learning_rate." in plain
    page = page_of(*made(ALL, rows=rows), tried=tried)
    assert "tried first" not in page and "do not always" not in page


def test_a_base_loss_that_chose_the_end_of_its_list_is_named():
    rows = {row: StudyRow("x", choose={RATE: [0.1, 0.2, 0.3]}) for row in ("base", *"abc")}
    told = r"The (\w+) learning_rate of the grid was best for (.*): a (\w+) one may be better"
    ends = {0.1: [("lowest", "`base`", "lower")], 0.2: [], 0.3: [("highest", "`base`", "higher")]}
    for chosen, said in ends.items():
        tried = {row: [Candidate({RATE: chosen}, 0.2, [])] for row in ("base", "a")}
        assert re.findall(told, page_of(*made(ALL, rows=rows), tried=tried)) == said
    assert "of the grid was best" not in page_of(*made({"a": 0.0}, rows=rows), tried=tried)


def test_the_rows_with_their_outputs_and_seeds():
    study, results = made(ALL)
    results["a"][3]["metrics"]["recall_at_1"] = float("nan")
    for run in results["c"].values():
        run["metrics"] = {}
    page = page_of(study, results)
    means = {row[0]: row[1:] for row in tables(page)[-1]}
    assert means["`base`"] == ["50.00 ± 0.00", "10.00 ± 0.00", "", "", "8"]
    assert means["`base:descriptor`"] == ["25.00 ± 0.00", "5.00 ± 0.00", "", "", "8"]
    assert means["`base:curve`"] == ["", "", "90.00 ± 0.00", "", "8"]
    assert means["`a`"][-1] == "7 (diverged: seed 3)"
    assert means["`c`"][-1] == "0 (diverged: seeds 0, 1, 2, 3, 4, 5, 6, 7)"
    assert tables(page)[0][0] == ["A helps (1)", "diverged", "`a`, seed 3", "+3.1 (CUB)", "8", ""]
    assert "nan" not in page


def test_commits_hours_and_processors():
    study, results = made(ALL)
    results["a"][0] |= {"commit": "fedcba9876", "processor": "B"}
    results["b"][0] |= {"dirty": True}
    del results["c"][0]["processor"]
    plain = " ".join(page_of(study, results).split())
    command = "python -m benchmarks.study toy"
    assert f"Measured at `0123abc`, `fedcba9` by `{command}`: 32 trainings, 32.0 hours of" in plain
    assert "The code of some was not committed." in plain
    assert "Each seed samples the start." in plain
    several = "several, which round differently, for `1`, `m`"
    assert f"one for `2`, `own, sketch`; {several}; not recorded for `3`, `A/A`." in plain
    assert "| 1 | `a` - `base` | Recall@1 | HORDE, Table 1 |" in plain


def test_intervals_over_test_classes_are_marked():
    study, results = made(ALL)
    for row, spread in (("base", 0), ("a", 0), ("b", 900), ("c", 0)):
        for run in results[row].values():
            classes = [int(5000 + spread * (i % 5 - 2)) for i in range(20)]
            run["per_class"] = {"queries": [20] * 20, "recall_at_1": classes}
    page = page_of(study, results)
    assert [row[2].endswith("†") for row in tables(page)[0]] == [False, True, False, False]
    assert "† marks an interval" in page


def test_a_second_metric_stands_beside_the_first():
    study, results = made({"a": 2.0}, agrees=MAP)
    for run in results["a"].values():
        run["metrics"][MAP] = 0.09
    page = page_of(study, results)
    assert tables(page)[0][0][1:4] == ["the metrics disagree", f"+2.00 ± {HALF}", "-1.00 ± 0.00"]
    assert "| comparison | verdict | difference | by MAP@R |" in page
    page = page_of(*made({"a": 0.1}, primary=MAP, comparisons=COMPARISONS[:1]))
    assert "| paper's gain |" not in page, "no published Recall@1 stands beside another metric"


def test_every_word_is_explained():
    study, results = made(ALL, agrees=MAP, margin=0.5)
    page = page_of(study, results)
    docs = Path(__file__).parents[3] / "docs"
    _, _, protocols = (docs / "protocols.md").read_text().partition("\n## A study\n")
    for word in {*Word} - {Word.DIVERGED}:
        assert f"\n| *{word}* | " in page
        assert word in protocols.lower(), word
    assert "within ±0.5 points |" in page and "protocols.md#a-study" in page
    assert "is above 1 point |" in page_of(replace(study, margin=1.0), results)
