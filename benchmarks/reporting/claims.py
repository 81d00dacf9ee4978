"""The papers' claims: two rows each, compared seed by seed."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import numpy as np
from jsonargparse.typing import PositiveFloat, PositiveInt

from benchmarks.reporting.kept import Result
from benchmarks.reporting.paired import SIGNIFICANT, Paired, assess, holm
from benchmarks.settings import ConfigError, one_line, read_yaml

SELECTION = "mean_average_precision_at_r"
"""The metric that chooses settings on validation classes."""


@dataclass(frozen=True)
class Claim:
    """The claim that a row, or one of its outputs, is better than another row or than 0, or as good as it."""

    name: str
    claim: str
    paper: str
    better: str
    than: Literal[0] | str
    metric: str = "recall_at_1"
    equivalent: bool = False

    def rows(self) -> list[str]:
        """The compared rows of the recipe file."""
        sides = (self.better, self.than)
        return [side.partition(":")[0] for side in sides if isinstance(side, str)]


@dataclass(frozen=True)
class Claims:
    """The content of a file of claims; benchmarks/recipes/claims.yaml describes the keys."""

    recipes: str
    margin: PositiveFloat
    settings: dict[str, list[str]]
    draws: PositiveInt
    first: PositiveInt
    tuned: dict[str, dict[str, list[float]]]
    takes: dict[str, list[str]]
    claims: list[Claim]


@dataclass(frozen=True)
class Tuning:
    """A setting of a row, with the MAP@R of each value on validation classes, as a mean over draws.

    The MAP@R is minus infinity if a training with this value diverged; `diverged` has its draws.
    """

    row: str
    setting: str
    measured: dict[float, float]
    diverged: dict[float, list[int]]

    @property
    def chosen(self) -> float | None:
        """The best value; None if all diverged."""
        value, score = max(self.measured.items(), key=itemgetter(1))
        return value if score > -np.inf else None


def read_claims(path: Path) -> Claims:
    """Read a file of claims; raise a ConfigError unless its keys are as benchmarks/recipes/claims.yaml says."""
    content = read_yaml(path)
    of_claim, of_file = (jsonargparse.ArgumentParser(exit_on_error=False) for _ in range(2))
    of_claim.add_class_arguments(Claim)
    of_file.add_class_arguments(Claims, skip={"claims"})
    try:
        about = [{"name": name, **claim} for name, claim in content.pop("claims").items()]
        parsed = [Claim(**of_claim.parse_object(claim)) for claim in about]
        return Claims(claims=parsed, **of_file.parse_object(content))
    except (argparse.ArgumentError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: expected the keys described at the top of benchmarks/recipes/claims.yaml: {one_line(error)}"
        ) from error


@dataclass(frozen=True)
class Finding:
    """A claim's differences in percentage points, tested; or the runs that diverged, {row: seeds}."""

    claim: Claim
    seeds: int
    tested: Paired | None
    diverged: dict[str, list[int]] = field(default_factory=dict)


def judge(claims: Claims, results: Mapping[str, Mapping[int, Result]], seeds: int) -> list[Finding]:
    """The findings on the claims that have all pairs.

    Args:
        results: {row: {seed: result}}.
        seeds: The number of pairs, fixed beforehand: a look at fewer would allow stopping at a pleasant result.

    Raises:
        ConfigError: if a run lacks the metric of a claim.
    """
    findings = []
    for claim in claims.claims:
        of_rows = [results.get(row, {}) for row in claim.rows()]
        pairs = sorted(set.intersection(*map(set, of_rows)))
        diverged = {
            row: lost
            for row, of in zip(claim.rows(), of_rows, strict=True)
            if (lost := [seed for seed in pairs if not of[seed]["metrics"]])
        }
        if len(pairs) < seeds:
            continue
        tested = None
        if not diverged:
            differences = [
                _percent(of_rows[0][seed], claim.better, claim.metric)
                - _percent(of_rows[-1][seed], claim.than, claim.metric)
                for seed in pairs
            ]
            margin = claims.margin if claim.equivalent else None
            tested = assess(differences, len(claims.claims), margin)
        findings.append(Finding(claim, seeds, tested, diverged))
    return findings


def _percent(result: Result, side: str | int, metric: str) -> float:
    if isinstance(side, int):
        return 100.0 * side
    try:
        return 100 * float(outputs_of(result)[side.partition(":")[2]][metric])
    except KeyError as error:
        raise ConfigError(f"claims: no run has measured {metric} of {side}") from error


def outputs_of(result: Result) -> dict[str, Any]:
    """The metrics of each output: "" for the embedding, "curve" for the last point of its curves."""
    return {"": result["metrics"], "curve": result["curve"], **(result["outputs"] or {})}


def words(findings: Sequence[Finding], claims: int) -> list[tuple[float, str]]:
    """The adjusted p of each finding, one of so many claims, and its word: a word, once given, stays."""
    adjusted = holm([of.tested.p if of.tested else 1.0 for of in findings], claims)
    told = []
    for of, p in zip(findings, adjusted, strict=True):
        if of.tested is None:
            word = "diverged"
        elif p >= SIGNIFICANT:
            word = "undecided"
        else:
            word = "shown" if of.tested.holds else "contradicted"
        told.append((p, word))
    return told
