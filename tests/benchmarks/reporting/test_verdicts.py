"""The words of a study: each at its boundary, by family, and what a study may not say."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.reporting.verdicts import Finding, judge, pooled
from benchmarks.settings import CONTROL, Comparison, ConfigError, StudyFile, StudyRow
from benchmarks.settings.study_files import Seeds
from tests.benchmarks.reporting.test_study_page import TRIPLET

NOISE = np.array([-0.3, 0.2, 0.4, -0.1, -0.2, 0.3, -0.4, 0.1, 0.25, -0.25])
N = len(NOISE)
ERROR = float(stats.sem(NOISE))
HALF = float(stats.t.ppf(0.975, N - 1)) * ERROR
RECALL, MAP = "recall_at_1", "mean_average_precision_at_r"


def row_of(values: Any, metric: str = RECALL, **more: Any) -> dict[int, dict[str, Any]]:
    """A row's results from percentages by seed."""
    about = {"commit": "0123abc", "dirty": False, "wall_time_s": 1.0, "outputs": {}, "curve": {}}
    return {
        seed: {**about, "metrics": {metric: value / 100, **more.get("also", [{}] * N)[seed]}}
        for seed, value in enumerate(values)
    }


def study_of(*comparisons: Comparison, **changes: Any) -> StudyFile:
    rows = {row: StudyRow(f"toy/table/{row}") for one in comparisons for row in one.rows()}
    given = {"seeds": Seeds(count=N), **changes}
    return StudyFile("toy", "Does it help?", rows, list(comparisons), **given)


def compared(name: str = "1", better: str = "new", **changes: Any) -> Comparison:
    return Comparison(name, f"{better} helps", better, "base", **changes)


BASE = row_of([50.0] * N)


def words_of(shift: float, study: StudyFile | None = None, scale: float = 1.0) -> tuple[str, ...]:
    """The words for a mean difference of `shift` points."""
    results = {"base": BASE, "new": row_of(50 + scale * NOISE + shift)}
    [finding] = judge(study or study_of(compared()), results)
    return finding.words


SMALL = 0.01


@pytest.mark.parametrize(
    ("shift", "words"),
    [
        (-1.5, ("harms",)),
        (-HALF - SMALL, ("harms", "by less than the margin")),
        (-HALF + SMALL, ("negligible",)),
        (HALF - SMALL, ("negligible",)),
        (HALF + SMALL, ("helps", "by less than the margin")),
        (1.0, ("helps",)),
        (1 + HALF - SMALL, ("helps",)),
        (1 + HALF + SMALL, ("worth having",)),
    ],
)
def test_each_word_begins_at_its_limit(shift, words):
    assert words_of(shift) == words


def test_negligible_is_a_matter_of_the_90_percent_interval():
    half = float(stats.t.ppf(0.95, N - 1)) * ERROR
    assert words_of(1 - half - SMALL) == ("helps", "by less than the margin")
    assert words_of(1 - half + SMALL) == ("helps",)
    assert words_of(0.0, scale=10) == ("too noisy",)


def test_half_of_the_papers_gain_is_excluded_or_not():
    study = study_of(compared(reported=TRIPLET))
    assert words_of(1.55 - HALF - SMALL, study) == ("worth having", "paper's size excluded")
    assert words_of(1.55 - HALF + SMALL, study) == ("worth having",)
    assert words_of(-2.0, study) == ("harms", "paper's size excluded")
    against = study_of(compared(reported=TRIPLET[::-1]))
    assert words_of(-2.0, against) == ("harms",), (
        "a loss that a paper reports is no size to exclude"
    )


def test_as_good_does_not_fail_for_being_better():
    study = study_of(compared(as_good=True))
    half = float(stats.t.ppf(0.95, N - 1)) * ERROR  # one-sided
    for shift in (5.0, 0.88, 0.0, -1 + half + SMALL):
        assert words_of(shift, study) == ("as good",)
    for shift in (-1 + half - SMALL, -1 - half + SMALL):
        assert words_of(shift, study) == ("too noisy",)
    assert words_of(-1 - half - SMALL, study) == ("worse than the margin",)


def test_the_margin_is_that_of_the_file():
    assert words_of(1.0, study_of(compared(), margin=0.5)) == ("worth having",)
    assert words_of(-1.5, study_of(compared(as_good=True), margin=2.0)) == ("as good",)


# ------------------------------------------------------------------------------------- the families


def many(shifts: dict[str, float], **families: str) -> list[Finding]:
    comparisons = [compared(name, name, family=families.get(name, "main")) for name in shifts]
    results = {"base": BASE} | {
        name: row_of(50 + NOISE + s) for name, s in shifts.items() if s is not None
    }
    return judge(study_of(*comparisons), results)


def test_a_family_is_corrected_for_all_its_comparisons_and_no_other():
    p = float(stats.ttest_1samp(NOISE + 0.3, 0).pvalue)
    assert 0.025 > p > 0.005
    alone = many({"a": 0.3})
    assert (alone[0].adjusted, alone[0].words[0]) == (pytest.approx(p), "helps")
    six = many({"a": 0.3, **dict.fromkeys("bcdef", 0.0)})
    assert (six[0].adjusted, six[0].words) == (pytest.approx(6 * p), ("negligible",))
    missing = many({"a": 0.3, **dict.fromkeys("bcdef")})  # not measured yet
    assert [finding.adjusted for finding in missing] == [pytest.approx(6 * p)]
    others = many({"a": 0.3, **dict.fromkeys("bcdef", 0.0)}, **dict.fromkeys("bcdef", "own"))
    assert others[0].adjusted == pytest.approx(p)


def test_worth_having_has_a_correction_of_its_own():
    """Holm's for 0 leaves the last of six at 5 %: six gains just below the margin would often seem above it."""
    shift = 1 + HALF + SMALL
    assert many({"a": shift})[0].words == ("worth having",)
    assert {finding.words for finding in many(dict.fromkeys("abcdef", shift))} == {("helps",)}


def test_controls_are_not_corrected():
    found = many(dict.fromkeys("abcdef", 0.3), **dict.fromkeys("abcdef", CONTROL))
    p = float(stats.ttest_1samp(NOISE + 0.3, 0).pvalue)
    assert [finding.adjusted for finding in found] == [pytest.approx(p)] * 6


# ----------------------------------------------------------------------------------- a second metric


def with_map(recall: float, precision: float, **changes: Any) -> Finding:
    also = [{MAP: (10 + precision + noise) / 100} for noise in NOISE]
    base = row_of([50.0] * N, also=[{MAP: 0.1}] * N)
    results = {"base": base, "new": row_of(50 + NOISE + recall, also=also)}
    comparison = compared(reported=changes.pop("reported", []))
    [finding] = judge(study_of(comparison, **changes), results)
    return finding


def test_a_gain_and_a_harm_need_the_same_sign_by_the_metric_that_must_agree():
    assert with_map(2.0, -0.01, agrees=MAP).words == ("the metrics disagree",)
    assert with_map(-2.0, 0.01, agrees=MAP).words == ("the metrics disagree",)
    assert with_map(2.0, 0.01, agrees=MAP).words == ("worth having",)
    assert with_map(2.0, -0.01).words == ("worth having",)
    assert with_map(0.0, -0.01, agrees=MAP).words == ("negligible",), "no gain that could disagree"
    assert with_map(0.5, -0.01, agrees=MAP).words == ("the metrics disagree", "negligible")
    assert with_map(2.0, 0.5, agrees=MAP).secondary.mean == pytest.approx(0.5)
    assert with_map(2.0, 0.5).secondary is None


def test_the_papers_gain_is_one_in_recall_whatever_decides():
    changes = {"primary": MAP, "agrees": RECALL, "reported": TRIPLET}
    found = with_map(0.5, 1.6, **changes)
    assert found.tested.mean == pytest.approx(1.6)
    assert found.secondary.mean == pytest.approx(0.5)
    assert found.words == ("worth having", "paper's size excluded")
    found = with_map(1.6, 0.5, **changes)
    assert found.words == ("helps", "by less than the margin")


# -------------------------------------------------------------------------------------- the pairs


def test_no_word_before_all_seeds_are_there():
    study = study_of(compared(), seeds=Seeds(count=5, first=3, more=2))
    new = row_of(50 + NOISE + 3)
    for last, seeds in ((7, []), (8, [3, 4, 5, 6, 7]), (9, [3, 4, 5, 6, 7]), (10, [*range(3, 10)])):
        known = {seed: new[seed] for seed in range(last)}
        found = judge(study, {"base": BASE, "new": known})
        assert [finding.seeds for finding in found] == [seeds] * bool(seeds)
    assert judge(study, {"base": BASE}) == []


def test_a_run_without_metrics_or_with_one_that_is_not_finite_diverged():
    new, base = row_of(50 + NOISE), row_of([50.0] * N)
    new[3]["metrics"] = {}
    new[4]["metrics"][RECALL], base[5]["metrics"][RECALL] = float("inf"), float("nan")
    [finding] = judge(study_of(compared()), {"base": base, "new": new})
    assert (finding.words, finding.diverged) == (("diverged",), {"new": [3, 4], "base": [5]})
    assert (finding.tested, finding.adjusted, finding.secondary) == (None, None, None)
    also = [{MAP: 0.1 if seed else float("nan")} for seed in range(N)]
    rows = {"base": row_of([50.0] * N, also=[{MAP: 0.1}] * N), "new": row_of(50 + NOISE, also=also)}
    [finding] = judge(study_of(compared(), agrees=MAP), rows)
    assert finding.diverged == {"new": [0]}
    [finding] = judge(study_of(compared()), rows)
    assert finding.diverged == {}, "that metric is not compared"


def test_an_output_and_the_end_of_a_curve_are_compared():
    new, base = row_of(50 + NOISE), row_of([50.0] * N)
    for seed in range(N):
        new[seed] |= {"outputs": {"descriptor": {RECALL: 0.4}}, "curve": {"seen": 0.9}}
        base[seed] |= {"curve": {"seen": 0.8}}
    study = study_of(
        Comparison("d", "the descriptor helps", "new:descriptor", "base"),
        Comparison("c", "its curve is higher", "new:curve", "base:curve", metric="seen"),
    )
    found = judge(study, {"base": base, "new": new})
    assert [finding.tested.mean for finding in found] == pytest.approx([-10, 10])
    for seed in range(N):  # of the embedding, which is not compared
        new[seed] |= {"per_class": {"queries": [9, 9], RECALL: [9000, 1000], "seen": [9000, 1000]}}
        base[seed] |= {"per_class": {"queries": [9, 9], RECALL: [1000, 9000], "seen": [1000, 9000]}}
    assert judge(study, {"base": base, "new": new}) == found
    with pytest.raises(ConfigError, match=r"comparisons\.c: no run has measured unseen of"):
        judge(study_of(replace(study.comparisons[1], metric="unseen")), {"base": base, "new": new})


def test_test_classes_take_part_where_both_rows_have_them():
    generator = np.random.default_rng(3)
    of_classes = generator.normal(0, 800, 30)

    def with_classes(values: np.ndarray, shift: np.ndarray, queries: int = 20) -> dict:
        rows = row_of(values)
        for seed, result in rows.items():
            of = np.round(100 * values[seed] + shift - shift.mean()).astype(int).tolist()
            result["per_class"] = {"queries": [queries] * 30, RECALL: of}
        return rows

    base, new = np.full(N, 50.0), 50 + NOISE + 1.5
    plain = {"base": row_of(base), "new": row_of(new)}
    both = {"base": with_classes(base, 0 * of_classes), "new": with_classes(new, of_classes)}
    study = study_of(compared())
    [alone], [tested] = judge(study, plain), judge(study, both)
    assert (alone.tested.over, tested.tested.over) == ("seeds", "seeds and classes")
    assert alone.words == ("worth having",)
    assert tested.words == ("too noisy",)
    assert tested.tested.mean == alone.tested.mean
    spread = np.std(of_classes / 100, ddof=1) / 30**0.5
    assert tested.tested.error == pytest.approx((spread**2 + ERROR**2) ** 0.5, rel=0.1)
    with pytest.raises(ConfigError, match=r"comparisons\.1: its runs were tested on different"):
        judge(study, both | {"base": with_classes(base, 0 * of_classes, queries=10)})
    of_outputs = {
        row: {
            seed: {**of, "outputs": {"features": of["metrics"]}, "metrics": {RECALL: 0.0}}
            | {"per_class_of_outputs": {"features": of["per_class"]}, "per_class": {"queries": []}}
            for seed, of in runs.items()
        }
        for row, runs in both.items()
    }
    compare_outputs = study_of(Comparison("1", "c", "new:features", "base:features"))
    [found] = judge(compare_outputs, of_outputs)
    assert found.tested == tested.tested, "the classes of the compared output count"
    del both["base"][3]["per_class"], both["base"][4]["per_class"], both["new"][0]["per_class"]
    [some] = judge(study, both)
    assert some.tested.over == "seeds alone"  # the page marks what would look like certainty
    assert some.tested.half_width == alone.tested.half_width


def test_equal_differences_of_few_seeds_claim_nothing():
    for count, words in ((4, ("too noisy",)), (5, ("worth having",))):
        results = {"base": row_of([50.0] * count), "new": row_of([52.5] * count)}
        [finding] = judge(study_of(compared(), seeds=Seeds(count=count)), results)
        assert finding.words == words
    few = {"base": row_of([50.0] * 2), "new": row_of([50.5] * 2), "worse": row_of([40.0] * 2)}
    study = study_of(
        compared("1", reported=TRIPLET),
        compared("2", as_good=True),
        compared("3", "worse", as_good=True),
        compared("4", "worse"),
        seeds=Seeds(count=2),
    )
    assert [finding.words for finding in judge(study, few)] == [("too noisy",)] * 4
    [same] = judge(study_of(compared(), seeds=Seeds(count=2)), few | {"new": few["base"]})
    assert same.words == ("negligible",)


# -------------------------------------------------------------------------------------- the method


def test_a_method_is_pooled_over_its_base_losses():
    comparisons = [
        compared("a", "a", method="HORDE"),
        compared("b", "b", method="HORDE"),
        compared("c", "c", method="VEM"),
        compared("d", "d", method="VEM", family="own"),
        compared("d, too", "d", method="VEM", as_good=True),
        *(compared(f"{name}, without", name) for name in "ab"),
    ]
    shifts = dict(zip("abcd", (0.2, 0.8, 1.0, 2.0), strict=True))
    rows = {
        name: row_of(50 + sign * NOISE + shifts[name])
        for name, sign in zip("abcd", (1, 0.5, 1, 1), strict=True)
    }
    study, results = study_of(*comparisons), {"base": BASE, **rows}
    found = pooled(study, judge(study, results))
    assert set(found) == {"HORDE"}, "one base loss is no pool, and only main comparisons count"
    assert found["HORDE"].mean == pytest.approx(0.5)
    assert found["HORDE"].half_width == pytest.approx(0.75 * HALF)


def test_only_one_metric_is_pooled_and_no_pool_lacks_a_member():
    comparisons = [
        *(compared(name, name, method="HORDE") for name in "ab"),
        compared("c", "c", method="HORDE", metric=MAP),
        compared("d", "d", method="VEM", metric=RECALL),
        compared("e", "e", method="VEM", metric=MAP),
    ]
    rows = {name: row_of(50 + NOISE, also=[{MAP: 0.9}] * N) for name in "abcde"}
    base = row_of([50.0] * N, also=[{MAP: 0.1}] * N)
    study = study_of(*comparisons)
    found = pooled(study, judge(study, {"base": base, **rows}))
    assert set(found) == {"HORDE"}
    assert found["HORDE"].mean == pytest.approx(NOISE.mean())
    rows["b"][1]["metrics"] = {}
    assert pooled(study, judge(study, {"base": base, **rows})) == {"HORDE": None}
