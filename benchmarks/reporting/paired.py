"""Every interval, pairing and correction: means over seeds, differences of the same seeds, and their tests.

d[s, c]                      difference of two rows for seed s, as the mean over the queries of test class c
mean = sum_c w_c d[s, c]     over seeds; w_c is the class's part of the queries
V    = V_s + V_c - V_sc      Cameron, Gelbach and Miller (2011), eq. 2.11: each the variance of the mean that is
                             robust to clusters, of seeds, of classes, and of one class in one run; of few seeds it
                             may be smaller than one of its parts: the largest of V, V_s and V_c counts
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

Metrics = dict[str, float]

Rows = dict[str, dict[int, Metrics]]
"""Metrics by row and seed; a method's descriptor is a separate row."""

SIGNIFICANT = 0.05  # of Holm's adjusted p
ENOUGH = 5  # fewer seeds with equal differences do not show how far others would spread
ROUNDING = 1e-5  # differences in percentage points that are as near as this are equal


def plus_minus(
    mean: float | None, half_width: float | None, digits: int = 2, sign: str = ""
) -> str:
    """A number as all tables show it, if it is known; `sign="+"` always shows its sign."""
    if mean is None:
        return "–"
    width = "" if half_width is None else f" ± {half_width:.{digits}f}"
    return f"{mean:{sign}.{digits}f}{width}"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the half-width of its 95 % interval (None for one seed)."""

    mean: float
    half_width: float | None

    def percent(self, sign: str = "") -> str:
        """E.g. "52.04 ± 0.91" for 0.5204 ± 0.0091."""
        width = None if self.half_width is None else 100 * self.half_width
        return plus_minus(100 * self.mean, width, sign=sign)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and its 95 % Student-t interval; at least one value.

    >>> estimate([0.50, 0.52, 0.54]).percent()  # 4.3027 * 0.02 / sqrt(3)
    '52.00 ± 4.97'
    """
    if (n := len(values)) == 1:
        return Estimate(values[0], None)
    return Estimate(fmean(values), float(stats.t.ppf(0.975, n - 1) * stats.sem(values)))


def percent(values: Sequence[float | None], sign: str = "") -> str:
    known = [value for value in values if value is not None]
    return estimate(known).percent(sign) if known else "–"


def values_of(seeds: Mapping[int, Metrics], metric: str) -> list[float]:
    return [metrics[metric] for metrics in seeds.values() if metric in metrics]


def differences(
    seeds: Mapping[int, Metrics], reference: Mapping[int, Metrics], metric: str
) -> list[float]:
    """Differences over the seeds that both have, in their order."""
    common = sorted(seeds.keys() & reference.keys())
    return [seeds[s][metric] - reference[s][metric] for s in common if metric in seeds[s]]


@dataclass(frozen=True)
class Paired:
    """Paired differences, and the wider one of two intervals of their mean."""

    differences: tuple[float, ...]  # by seed
    mean: float
    error: float  # standard error of the mean; infinite if it cannot be known
    freedom: int  # degrees of freedom of Student's t
    over: str  # "seeds", or "seeds and classes" if that interval is the wider one

    @property
    def half_width(self) -> float:
        """Half-width of the 95 % interval."""
        return self.limits()[1] - self.mean

    def expected(self, seeds: int) -> float:
        """The half-width to expect with another number of seeds, which does nothing for that over classes."""
        fewer = 1.0 if self.over == "seeds and classes" else len(self.differences) / seeds
        return float(stats.t.ppf(1 - SIGNIFICANT / 2, seeds - 1) * self.error * fewer**0.5)

    @property
    def has_interval(self) -> bool:
        return isfinite(self.error)

    def points(self) -> str:
        width, equal = (self.half_width, "") if self.has_interval else (0.0, " (equal)")
        return plus_minus(self.mean, width, sign="+") + equal

    def limits(self, level: float = SIGNIFICANT) -> tuple[float, float]:
        """The limits of the two-sided interval that misses the true mean with this chance."""
        low, high = stats.t.interval(1 - level, self.freedom, self.mean, self.error)
        return float(low), float(high)

    @property
    def p(self) -> float:
        """Two-sided p of a true mean of 0."""
        return 2 * min(self.p_above(0), 1 - self.p_above(0))

    def p_above(self, bound: float) -> float:
        """One-sided p: small if the true mean is larger than the bound."""
        return float(stats.t.cdf(bound, self.freedom, self.mean, self.error))


def assess(
    values: Sequence[float],
    by_class: ArrayLike | None = None,
    queries: Sequence[int] = (),
) -> Paired:
    """Test at least two differences, one per seed.

    Args:
        by_class: For each seed, the difference of each test class, whose mean over queries is that of `values`.
        queries: Of each test class; classes without queries do not count.
    """
    n, mean = len(values), float(np.mean(values))
    error = max(float(stats.sem(values)), 1e-9)  # not 0 if all differences are equal
    if n < ENOUGH and np.ptp(values) < ROUNDING < abs(mean):
        error = inf
    of_seeds = Paired(tuple(values), mean, error, n - 1, "seeds")
    tested = np.asarray(queries) > 0
    if by_class is None or tested.sum() < 2:
        return of_seeds
    crossed, freedom = crossed_error(np.asarray(by_class)[:, tested], np.asarray(queries)[tested])
    of_both = Paired(tuple(values), mean, max(error, crossed), freedom, "seeds and classes")
    # Equal ones differ by the rounding of the classes' numbers.
    return of_both if of_both.half_width > 1.001 * of_seeds.half_width else of_seeds


def crossed_error(by_class: ArrayLike, queries: ArrayLike) -> tuple[float, int]:
    """Standard error of the mean if other seeds and other test classes could have been drawn, and its freedom.

    >>> error, freedom = crossed_error([[4, 2], [2, 0]], queries=[10, 10])
    >>> print(f"{error**2:.4f}", freedom)  # 1 + 1 - (1 + 1) / 3
    1.3333 1
    >>> error, _ = crossed_error([[3, -3], [0, 0], [-3, 3]], queries=[10, 10])  # V_s and V_c are 0, V is negative
    >>> error
    0.0
    """
    table, weights = np.asarray(by_class, float), np.asarray(queries) / np.sum(queries)
    seeds, classes = table.shape
    parts = (table - (table @ weights).mean()) * weights / seeds

    def variance(sums: np.ndarray) -> float:
        return float(np.sum(sums**2)) * sums.size / (sums.size - 1)

    of_seeds, of_classes = variance(parts.sum(axis=1)), variance(parts.sum(axis=0))
    both = of_seeds + of_classes - variance(parts)
    return max(both, of_seeds, of_classes) ** 0.5, min(seeds, classes) - 1


def holm(p: Sequence[float], tests: int) -> list[float]:
    """Adjust p by Holm's method (1979), so that the chance of one or more wrong words is at most 5 %.

    Tests that are not done yet have a p of 1: done later, they can only lower the others' adjusted p.

    >>> [round(value, 2) for value in holm([0.01, 0.5, 0.02], tests=3)]
    [0.03, 0.5, 0.04]
    """
    order, factors = np.argsort(p), tests - np.arange(len(p))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(np.asarray(p)[order] * factors))
    return adjusted.tolist()
