"""A study's paired differences, against scipy and closed forms, and its words, each at its boundary."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.reporting.paired import assess, crossed_error, holm
from benchmarks.reporting.verdicts import Finding, judge, pooled
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.study_files import CONTROL, Seeds, StudyFile
from tests.benchmarks.reporting.made_study import (
    BASE,
    ERROR,
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

GAIN = [0.9, 1.4, 0.3, 1.1, 0.8, 1.2, 0.6, 1.0, 0.7, 1.3]


def test_a_difference_is_students_paired_t_test():
    tested, other = assess(GAIN), stats.ttest_1samp(GAIN, 0)
    assert tested.p == pytest.approx(other.pvalue), "two-sided, and not doubled again"
    for level in (0.05, 0.1):
        assert tested.limits(level) == pytest.approx(tuple(other.confidence_interval(1 - level)))
    assert tested.half_width == pytest.approx(tested.limits()[1] - tested.mean)
    assert assess([-gain for gain in GAIN]).p == pytest.approx(tested.p)
    for bound in (-1.0, 0.8, 2.0):
        other = stats.ttest_1samp(GAIN, bound, alternative="greater")
        assert tested.p_above(bound) == pytest.approx(other.pvalue), "one-sided"


def test_fewer_than_five_equal_differences_have_no_interval():
    assert assess([1.0] * 5).p < 1e-6
    assert assess([0.0] * 3, [[0.0] * 4] * 3, [5] * 4).p == 1.0
    for values in ([2.5, 2.5 + 1e-12], [-0.4] * 4):
        tested = assess(values, [[1.0, 4.0]] * len(values), [5, 5])
        assert tested.p == 1.0
        assert tested.limits() == (-np.inf, np.inf)
        assert tested.over == "seeds"


@pytest.mark.parametrize(("of_seeds", "of_classes", "largest"), [(1, 1, 0), (1, 0, 1), (0, 1, 2)])
def test_a_class_counts_by_its_queries_and_the_largest_variance(of_seeds, of_classes, largest):
    weights, seeds = np.array([0.5, 0.3, 0.2]), np.array([[-2.0], [-1.0], [1.0], [2.0]])
    table = of_seeds * seeds + of_classes * np.array([1.0, -2.0, 4.0])
    mean = np.mean(table @ weights)
    by_seed = np.sum((table @ weights - mean) ** 2) / 4**2 * 4 / 3
    by_class = np.sum((weights * (table.mean(axis=0) - mean)) ** 2) * 3 / 2
    both = by_seed + by_class - np.sum((weights * (table - mean)) ** 2) / 4**2 * 12 / 11
    assert np.argmax(variances := [both, by_seed, by_class]) == largest
    error, freedom = crossed_error(table, queries=[50, 30, 20])
    assert (error**2, freedom) == (pytest.approx(variances[largest]), 2)


def test_classes_without_queries_are_no_classes():
    generator = np.random.default_rng(4)
    classes = 1 + generator.normal(0, 3.0, 3) + generator.normal(0, 0.1, (4, 3))
    values = classes.mean(axis=1)
    wanted = assess(values, classes, [7, 7, 7])
    assert (wanted.over, wanted.freedom) == ("seeds and classes", 2)
    padded = np.insert(classes, [0, 1, 1, 3], 0.0, axis=1)
    assert assess(values, padded, [0, 7, 0, 0, 7, 7, 0]) == wanted
    assert assess(values, padded, [0, 9, 0, 0, 0, 0, 0]) == assess(values)


def test_the_wider_interval_decides():
    generator = np.random.default_rng(1)
    few, many = generator.normal(0, [[0.1], [3.0]], (2, 20))  # what differs between classes
    seeds = generator.normal(1, 1.0, (8, 1))
    for of_classes, over in ((few, "seeds"), (many, "seeds and classes")):
        table = seeds + of_classes - of_classes.mean()
        values = table.mean(axis=1)
        tested, alone = assess(values, table, [30] * 20), assess(values)
        assert tested.over == over
        assert tested.mean == alone.mean, "only the interval takes part"
        assert (tested.half_width > 1.5 * alone.half_width) == (over != "seeds")


def test_holm_is_monotone_and_stops_at_one():
    assert holm([0.01, 0.04, 0.03, 0.005], 4) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8], 2) == [1.0, 1.0]
    assert holm([0.04, 0.01], 5) == pytest.approx([0.16, 0.05]), "three more, with a p of 1"


def words_of(shift: float, study: StudyFile | None = None, scale: float = 1.0) -> tuple[str, ...]:
    """The words for a mean difference of `shift` points."""
    results = {"base": BASE, "new": row_of(shift, noise=scale * NOISE)}
    [finding] = judge(study or study_of(compared("1")), results)
    return finding.words


SMALL = 0.01


def test_each_word_begins_at_its_limit():
    for shift, words in (
        (-1.5, ("harms",)),
        (-HALF - SMALL, ("harms", "by less than the margin")),
        (-HALF + SMALL, ("negligible",)),
        (HALF - SMALL, ("negligible",)),
        (HALF + SMALL, ("helps", "by less than the margin")),
        (1.0, ("helps",)),
        (1 + HALF - SMALL, ("helps",)),
        (1 + HALF + SMALL, ("worth having",)),
    ):
        assert words_of(shift) == words


def test_negligible_is_a_matter_of_the_90_percent_interval():
    half = float(stats.t.ppf(0.95, N - 1)) * ERROR
    assert words_of(1 - half - SMALL) == ("helps", "by less than the margin")
    assert words_of(1 - half + SMALL) == ("helps",)
    assert words_of(0.0, scale=10) == ("too noisy",)
    assert words_of(1.0, study_of(compared("1"), margin=0.5)) == ("worth having",)


def test_half_of_the_papers_gain_is_excluded_or_not():
    study = study_of(compared("1", reported=TRIPLET))
    assert words_of(1.55 - HALF - SMALL, study) == ("worth having", "paper's size excluded")
    assert words_of(1.55 - HALF + SMALL, study) == ("worth having",)
    assert words_of(-2.0, study) == ("harms", "paper's size excluded")
    loss = study_of(compared("1", reported=TRIPLET[::-1]))
    assert words_of(-2.0, loss) == ("harms",), "a reported loss is no size to exclude"


def test_as_good_does_not_fail_for_being_better():
    study = study_of(compared("1", as_good=True))
    half = float(stats.t.ppf(0.95, N - 1)) * ERROR  # one-sided
    for shift in (5.0, 0.0, -1 + half + SMALL):
        assert words_of(shift, study) == ("as good",)
    for shift in (-1 + half - SMALL, -1 - half + SMALL):
        assert words_of(shift, study) == ("too noisy",)
    assert words_of(-1 - half - SMALL, study) == ("worse than the margin",)
    assert words_of(-1.5, replace(study, margin=2.0)) == ("as good",)


def many(shifts: dict[str, float | None], **families: str) -> list[Finding]:
    comparisons = [compared(name, name, family=families.get(name, "main")) for name in shifts]
    results = {name: row_of(s) for name, s in shifts.items() if s is not None}
    return judge(study_of(*comparisons), results | {"base": BASE})


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
    controls = many(dict.fromkeys("abcdef", 0.3), **dict.fromkeys("abcdef", CONTROL))
    assert [of.adjusted for of in controls] == [pytest.approx(p)] * 6, "not corrected"


def test_worth_having_has_a_correction_of_its_own():
    """Holm's for 0 leaves the last of six at 5 %: six gains just below the margin would often seem above it."""
    shift = 1 + HALF + SMALL
    assert many({"a": shift})[0].words == ("worth having",)
    assert {finding.words for finding in many(dict.fromkeys("abcdef", shift))} == {("helps",)}


def with_map(recall: float, precision: float, *, reported: Any = (), **changes: Any) -> Finding:
    results = {"base": BASE, "new": row_of(recall, precision + NOISE)}
    [finding] = judge(study_of(compared("1", reported=[*reported]), **changes), results)
    return finding


def test_a_gain_and_a_harm_need_the_same_sign_by_the_metric_that_must_agree():
    assert with_map(2.0, -0.01, agrees=MAP).words == ("the metrics disagree",)
    assert with_map(-2.0, 0.01, agrees=MAP).words == ("the metrics disagree",)
    assert with_map(2.0, 0.01, agrees=MAP).words == ("worth having",)
    assert with_map(2.0, -0.01).words == ("worth having",)
    assert with_map(0.0, -0.01, agrees=MAP).words == ("negligible",), "no gain that could disagree"
    assert with_map(0.5, -0.01, agrees=MAP).words == ("the metrics disagree", "negligible")
    assert with_map(2.0, 0.5, agrees=MAP).secondary.mean == pytest.approx(0.5)


def test_the_papers_gain_is_one_in_recall_whatever_decides():
    changes = {"primary": MAP, "agrees": RECALL, "reported": TRIPLET}
    found = with_map(0.5, 1.6, **changes)
    assert found.tested.mean == pytest.approx(1.6)
    assert found.words == ("worth having", "paper's size excluded")
    assert with_map(1.6, 0.5, **changes).words == ("helps", "by less than the margin")


def test_no_word_before_all_seeds_are_there():
    study = study_of(compared("1"), seeds=Seeds(count=5, first=3, more=2))
    new = row_of(3)
    for last, seeds in ((7, []), (8, [3, 4, 5, 6, 7]), (9, [3, 4, 5, 6, 7]), (10, [*range(3, 10)])):
        known = {seed: new[seed] for seed in range(last)}
        found = judge(study, {"base": BASE, "new": known})
        assert [finding.seeds for finding in found] == [seeds] * bool(seeds)


def test_a_run_without_metrics_or_with_one_that_is_not_finite_diverged():
    new, base = row_of(), deepcopy(BASE)
    new[3]["metrics"] = {}
    new[4]["metrics"][RECALL], base[5]["metrics"][RECALL] = float("inf"), float("nan")
    [finding] = judge(study_of(compared("1")), {"base": base, "new": new})
    assert (finding.words, finding.diverged) == (("diverged",), {"new": [3, 4], "base": [5]})
    assert (finding.tested, finding.adjusted, finding.secondary) == (None, None, None)
    lost = with_map(0.0, np.where(np.arange(N) > 0, 0.0, np.nan), agrees=MAP)
    assert lost.diverged == {"new": [0]}
    assert with_map(0.0, np.nan).diverged == {}, "that metric is not compared"


def test_an_output_and_the_end_of_a_curve_are_compared():
    new, base = row_of(), deepcopy(BASE)
    for seed in range(N):
        new[seed] |= {"outputs": {"descriptor": {RECALL: 0.4}}, "curve": {"seen": 0.9}}
        base[seed] |= {"curve": {"seen": 0.8}}
    curve = compared("c", "new:curve", than="base:curve", metric="seen")
    study = study_of(compared("d", "new:descriptor"), curve)
    found = judge(study, {"base": base, "new": new})
    assert [finding.tested.mean for finding in found] == pytest.approx([-10, 10])
    with pytest.raises(ConfigError, match=r"comparisons\.c: no run has measured unseen of"):
        judge(study_of(replace(curve, metric="unseen")), {"base": base, "new": new})


def test_test_classes_take_part_where_both_rows_have_them():
    of_classes = np.random.default_rng(3).normal(0, 800, 30)

    def with_classes(results: dict[int, Any], shift: Any, queries: int = 20) -> dict[int, Any]:
        for result in (results := deepcopy(results)).values():
            of = np.round(1e4 * result["metrics"][RECALL] + shift).astype(int).tolist()
            result["per_class"] = {"queries": [queries] * 30, RECALL: of}
        return results

    plain = {"base": BASE, "new": row_of(1.5)}
    shifts = {"base": np.zeros(30), "new": of_classes - of_classes.mean()}
    both = {row: with_classes(plain[row], shifts[row]) for row in plain}
    study = study_of(compared("1"))
    [alone], [tested] = judge(study, plain), judge(study, both)
    assert (alone.tested.over, tested.tested.over) == ("seeds", "seeds and classes")
    assert (alone.words, tested.words) == (("worth having",), ("too noisy",))
    assert tested.tested.mean == alone.tested.mean
    spread = np.std(of_classes / 100, ddof=1) / 30**0.5
    assert tested.tested.error == pytest.approx((spread**2 + ERROR**2) ** 0.5, rel=0.1)
    with pytest.raises(ConfigError, match=r"comparisons\.1: its runs were tested on different"):
        judge(study, both | {"base": with_classes(BASE, shifts["base"], queries=10)})
    for result in (result for of in both.values() for result in of.values()):
        result |= {"outputs": {"features": result["metrics"]}}
        result |= {"per_class_of_outputs": {"features": result["per_class"]}}
    of_outputs = study_of(compared("1", "new:features", than="base:features"))
    [found] = judge(of_outputs, both)
    assert found.tested == tested.tested, "the classes of the compared output count"
    del both["base"][3]["per_class"]
    [some] = judge(study, both)
    assert some.tested.over == "seeds alone"  # the page marks what would look like certainty
    assert some.tested.half_width == alone.tested.half_width


def test_an_interaction_is_a_difference_of_differences_by_seed_and_class():
    rows, queries = ("new", "base", "other", "plain"), np.array([30, 10, 20])
    stored = np.random.default_rng(6).integers(0, 10_000, (4, N, 3))  # hundredths of a percent
    results: dict[str, Any] = {}
    for row, table in zip(rows, stored, strict=True):
        means = table @ queries / 60 / 10_000
        per_class = [{"queries": queries.tolist(), RECALL: one.tolist()} for one in table]
        results[row] = {
            seed: {"metrics": {RECALL: means[seed]}, "outputs": {}, "curve": {}, "per_class": one}
            for seed, one in enumerate(per_class)
        }
    study = study_of(compared("1", beyond=["other", "plain"], family="interaction"))
    [tested] = [finding.difference for finding in judge(study, results)]
    new, base, other, plain = stored / 100
    by_class = (new - base) - (other - plain)
    values = by_class @ queries / 60
    assert tested.differences == pytest.approx(values.tolist())
    assert tested == assess(tested.differences, by_class, queries.tolist())
    assert (tested.over, tested.freedom) == ("seeds and classes", 2)
    del results["plain"][3]
    assert judge(study, results) == [], "as long as a run of one side is missing"


def test_a_method_is_pooled_over_its_base_losses():
    comparisons = [
        compared("a", "a", method="HORDE"),
        compared("b", "b", method="HORDE"),
        compared("c", "c", method="VEM"),
        compared("d", "d", method="VEM", family="own"),
        compared("d, too", "d", method="VEM", as_good=True),
        compared("e", "e", method="VEM", metric=MAP),
        *(compared(f"{name}, without", name) for name in "ab"),
    ]
    study, results = study_of(*comparisons), {"base": BASE, **dict.fromkeys("cde", row_of())}
    results |= {"a": row_of(0.2), "b": row_of(0.8, noise=0.5 * NOISE)}
    found = pooled(study, judge(study, results))
    assert set(found) == {"HORDE"}, "one base loss, by the main metric, is no pool"
    assert found["HORDE"].mean == pytest.approx(0.5)
    assert found["HORDE"].half_width == pytest.approx(0.75 * HALF)
    results["b"][1]["metrics"] = {}
    assert pooled(study, judge(study, results)) == {"HORDE": None}, "no pool lacks a member"
