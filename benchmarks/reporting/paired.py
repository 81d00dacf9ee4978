"""Every interval, pairing and correction: means over seeds, differences of the same seeds, and their tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from pml_regularizers import mean_interval

Metrics = dict[str, float]

Rows = dict[str, dict[int, Metrics]]
"""Metrics by row and seed; a method's descriptor is a separate row."""

SIGNIFICANT = 0.05  # of Holm's adjusted p

POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the half-width of its 95 % interval (None for one seed)."""

    mean: float
    half_width: float | None

    def percent(self, sign: str = "") -> str:
        """E.g. "52.04 ± 0.91" for 0.5204 ± 0.0091; `sign="+"` always shows the sign."""
        mean = f"{100 * self.mean:{sign}.2f}"
        return mean if self.half_width is None else f"{mean} ± {100 * self.half_width:.2f}"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and its 95 % Student-t interval; at least one value.

    >>> estimate([0.50, 0.52, 0.54]).percent()  # 4.3027 * 0.02 / sqrt(3)
    '52.00 ± 4.97'
    """
    if len(values) == 1:
        return Estimate(values[0], None)
    return Estimate(*mean_interval(values, student=True))


def percent(values: Sequence[float], sign: str = "", empty: str = "–") -> str:
    return estimate(values).percent(sign) if values else empty


def values_of(seeds: Mapping[int, Metrics], metric: str) -> list[float]:
    return [metrics[metric] for metrics in seeds.values() if metric in metrics]


def differences(
    seeds: Mapping[int, Metrics], reference: Mapping[int, Metrics], metric: str
) -> list[float]:
    """Differences over the seeds that both have, in their order; none between a row and itself."""
    if seeds is reference:
        return []
    common = sorted(seeds.keys() & reference.keys())
    return [seeds[s][metric] - reference[s][metric] for s in common if metric in seeds[s]]


@dataclass(frozen=True)
class Paired:
    """Paired differences and their test.

    Attributes:
        half_width: Half-width of the 95 % Student-t interval of the mean.
        p: Twice the smaller of the one-sided p for what is claimed and against it, not adjusted.
        holds: True if the one-sided p for it is the smaller one.
        visible: The true difference that so many seeds show with a chance of 80 %, at Holm's strictest level.
    """

    mean: float
    half_width: float
    p: float
    holds: bool
    visible: float


def assess(values: Sequence[float], tests: int, margin: float | None = None) -> Paired:
    """Test at least two differences, one of so many tests.

    "Better than 0" uses Student's paired t test; "as good", with a margin, two one-sided tests: a difference beyond
    the margin contradicts it.
    """
    n, mean = len(values), float(np.mean(values))
    error = max(float(stats.sem(values)), 1e-9)  # not 0 if all differences are equal
    critical = float(stats.t.ppf(0.975, n - 1))
    strictest = float(stats.t.ppf(1 - SIGNIFICANT / (2 * tests), n - 1))

    def larger(bound: float) -> float:
        return float(stats.t.cdf((bound - mean) / error, n - 1))

    if margin is None:
        supporting, opposing = larger(0), 1 - larger(0)
    else:
        supporting = max(larger(-margin), 1 - larger(margin))
        opposing = min(larger(margin), 1 - larger(-margin))

    def power(effect: float) -> float:
        return float(stats.nct.sf(strictest, n - 1, effect))

    visible = error * optimize.brentq(lambda effect: power(effect) - POWER, 1e-6, 200)
    p = min(1.0, 2 * min(supporting, opposing))
    return Paired(mean, critical * error, p, supporting < opposing, visible)


def holm(p: Sequence[float], tests: int) -> list[float]:
    """Adjust p by Holm's method (1979), so that the chance of one or more wrong words is at most 5 %.

    Tests that are not done yet have a p of 1: done later, they can only lower the others' adjusted p.

    >>> [round(value, 2) for value in holm([0.01, 0.5, 0.02], tests=3)]
    [0.03, 0.5, 0.04]
    """
    ranked = sorted(range(len(p)), key=lambda i: p[i])
    adjusted, largest = [1.0] * len(p), 0.0
    for rank, i in enumerate(ranked):
        largest = max(largest, p[i] * (tests - rank))
        adjusted[i] = min(1.0, largest)
    return adjusted
