"""Paired differences and their tests, against scipy, closed forms and simulations."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.reporting.paired import assess, crossed_error, holm

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


def test_a_class_counts_by_its_queries():
    classes, queries, seeds = np.array([1.0, -2.0, 4.0]), [50, 30, 20], 4
    weights = np.array([0.5, 0.3, 0.2])
    squares = float(np.sum(weights**2 * (classes - classes @ weights) ** 2))
    error, freedom = crossed_error(np.tile(classes, (seeds, 1)), queries)  # no seed differs
    assert error**2 == pytest.approx(squares * 3 / 2 - squares / seeds * 12 / 11)
    assert freedom == 2


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
