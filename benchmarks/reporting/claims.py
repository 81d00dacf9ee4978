"""Tests of the papers' claims, which compare two rows seed by seed, with their page and their figure."""

import argparse
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from math import nan
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Protocol

import jsonargparse
import numpy as np
from jsonargparse.typing import PositiveFloat, PositiveInt
from matplotlib.figure import Figure
from scipy import optimize, stats

from benchmarks.console import alone
from benchmarks.records import damage_named, load_run, read_json, write_json
from benchmarks.reporting.comparison import metric_name
from benchmarks.reporting.drawing import COLOURS, plain
from benchmarks.reporting.table import Table, count_of_seeds, estimate, named
from benchmarks.settings import ConfigError, misfit, one_line, read_yaml, settings_of_results

SIGNIFICANT = 0.05  # a claim is shown or contradicted if Holm's adjusted p is smaller

POWER = 0.8

SELECTION = "mean_average_precision_at_r"
"""The metric that chooses settings on validation classes."""

Result = dict[str, Any]
"""Result of a training: the entries of `KEPT`, and its "processor". A training that diverged has no metrics."""

NUMBER = (int, float)

KEPT = {
    **{"commit": (str, type(None)), "dirty": (bool, type(None)), "wall_time_s": NUMBER},
    **{"metrics": {...: NUMBER}, "outputs": {...: {...: NUMBER}}, "curve": {...: NUMBER}},
}
"""Entries of a kept result, and the kinds of their values; see `misfit`."""

SMALL: dict[str, Any] = {"fontsize": 8, "va": "center"}

WORDS = {"shown": COLOURS[2], "contradicted": COLOURS[1], "undecided": "#888888"}


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
        claims = Claims(claims=parsed, **of_file.parse_object(content))
    except (argparse.ArgumentError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: expected the keys described at the top of benchmarks/recipes/claims.yaml: {one_line(error)}"
        ) from error
    for row, settings in claims.tuned.items():
        if len(settings) != 1 or not all(settings.values()):
            raise ConfigError(
                f"{path}: tuned.{row}: expected one setting and its values, got {settings}"
            )
    try:
        TopologicalSorter(claims.takes).prepare()
    except CycleError as error:
        raise ConfigError(f"{path}: takes: a circle, {' of '.join(error.args[1])}") from error
    compared = chain.from_iterable(claim.rows() for claim in claims.claims)
    rows = {*compared, *chain.from_iterable(claims.takes.values())}
    if unused := {*claims.settings, *claims.tuned, *claims.takes} - rows:
        raise ConfigError(f"{path}: {min(unused)}: expected a row of a claim, or one that is taken")
    return claims


@dataclass(frozen=True)
class Finding:
    """A claim's paired differences, in percentage points, and their test.

    Attributes:
        half_width: Half-width of the 95 % Student-t interval of the mean.
        p: Twice the smaller of the one-sided p for the claim and against it, not adjusted.
        holds: True if the one-sided p for the claim is the smaller one.
        visible: The true difference that so many seeds show with a chance of 80 %, at Holm's strictest level.
        diverged: The runs that diverged, {row: seeds}. If there is one, nothing is tested: the numbers are NaN.
    """

    claim: Claim
    seeds: int
    mean: float
    half_width: float
    p: float
    holds: bool
    visible: float
    diverged: dict[str, list[int]] = field(default_factory=dict)


def assess(claim: Claim, differences: Sequence[float], margin: float, claims: int) -> Finding:
    """Test a claim, one of so many, by its paired differences, at least two.

    "Better" uses Student's paired t test. "As good" uses two one-sided tests; a difference beyond the margin
    contradicts it.
    """
    n, mean = len(differences), float(np.mean(differences))
    error = max(float(stats.sem(differences)), 1e-9)  # not 0 if all differences are equal
    critical = float(stats.t.ppf(0.975, n - 1))
    strictest = float(stats.t.ppf(1 - SIGNIFICANT / (2 * claims), n - 1))

    def larger(bound: float) -> float:
        return float(stats.t.cdf((bound - mean) / error, n - 1))

    if claim.equivalent:
        supporting = max(larger(-margin), 1 - larger(margin))
        opposing = min(larger(margin), 1 - larger(-margin))
    else:
        supporting, opposing = larger(0), 1 - larger(0)

    def power(effect: float) -> float:
        return float(stats.nct.sf(strictest, n - 1, effect))

    visible = error * optimize.brentq(lambda effect: power(effect) - POWER, 1e-6, 200)
    p = min(1.0, 2 * min(supporting, opposing))
    return Finding(claim, n, mean, critical * error, p, supporting < opposing, visible)


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p by Holm's method (1979), so that the chance of one or more wrong words is at most 5 %.

    >>> [round(value, 2) for value in holm([0.01, 0.5, 0.02])]
    [0.03, 0.5, 0.04]
    """
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(np.sort(p) * np.arange(len(p), 0, -1))
    return [min(1.0, float(value)) for value in adjusted]


def words(findings: Sequence[Finding], claims: int) -> list[tuple[float, str]]:
    """The adjusted p and one of `WORDS` for each finding, as if all other claims had a p of 1.

    Later measurements of these claims can only lower the adjusted p: a word, once given, stays.
    """
    unknown = [1.0] * (claims - len(findings))
    adjusted, told = holm([*(finding.p for finding in findings), *unknown]), []
    for finding, p in zip(findings, adjusted, strict=False):
        verdict = "shown" if finding.holds else "contradicted"
        undecided = "diverged" if finding.diverged else "undecided"
        told.append((p, verdict if p < SIGNIFICANT else undecided))
    return told


class Training(Protocol):
    """A training with a seed, made by `studies.plan`."""

    folder: Path
    training: str
    seed: int
    config: dict[str, Any]
    weights: dict[str, str] | None


class Results:
    """Results of finished trainings, in a file that remains when their folders are deleted.

    Raises:
        ValueError: if the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = self._read()

    def _read(self) -> dict[str, Result]:
        with damage_named(self._path, "restore it, since it holds the results of all trainings"):
            kept = read_json(self._path)["results"] if self._path.exists() else {}
            place = misfit(kept, {...: KEPT})
            lacking = [
                f"{name}.{key}" for name, of in kept.items() for key in KEPT if key not in of
            ]
            if place is not None or lacking:
                raise ValueError(f"results.{place or lacking[0]} is missing or of another kind")
            return dict(kept)

    def of(self, training: Training) -> Result | None:
        """The result of a training with these weights and settings; None if there is none.

        Settings that cannot change a result do not count.
        """
        return self._kept.get(_name(training))

    def add(self, trainings: Iterable[Training]) -> None:
        """Keep the results from these run folders, beside those that other commands keep meanwhile."""
        found = {}
        for training in trainings:
            run = load_run(training.folder)
            curve = {name: of[-1] for name, of in run.table("evaluation").items() if of}
            told = ("commit", "dirty", "wall_time_s", "metrics", "outputs")
            found[_name(training)] = {
                **{key: run.info.get(key) for key in told},
                "processor": run.info["hardware"].get("processor"),
                "curve": curve,
            }
        with alone(self._path, wait=True):  # nobody writes between reading and writing
            self._kept |= self._read() | found
            write_json(self._path, {"results": self._kept})


def _name(training: Training) -> str:
    """A key of the recipe, the seed, and a digest of the settings and weights that can change the result.

    Null settings are left out, like settings that older code did not have, and 1 equals 1.0.
    """
    evaluation = training.config["evaluation"]
    curves = [evaluation["every"] > 0, evaluation["curve_classes"]]
    moving = {
        key: _plain(value)
        for key, value in settings_of_results(training.config).items()
        if value is not None
    }
    weights = training.weights and training.weights["sha256"]
    settings = json.dumps([moving, weights, curves], sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()
    return f"{training.training}, seed {training.seed}, settings {digest[:16]}"


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return float(value) if type(value) is int else value


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
        if diverged:
            findings.append(Finding(claim, seeds, nan, nan, 1.0, False, nan, diverged))
            continue
        differences = [
            _percent(of_rows[0][seed], claim.better, claim.metric)
            - _percent(of_rows[-1][seed], claim.than, claim.metric)
            for seed in pairs
        ]
        findings.append(assess(claim, differences, claims.margin, len(claims.claims)))
    return findings


def _percent(result: Result, side: str | int, metric: str) -> float:
    if isinstance(side, int):
        return 100.0 * side
    try:
        return 100 * float(_outputs(result)[side.partition(":")[2]][metric])
    except KeyError as error:
        raise ConfigError(f"claims: no run has measured {metric} of {side}") from error


def claims_page(
    claims: Claims,
    findings: Sequence[Finding],
    results: Mapping[str, Mapping[int, Result]],
    tunings: Sequence[Tuning],
    changes: Mapping[str, Sequence[str] | None],
    figure: str,
) -> str:
    """The page in Markdown.

    Args:
        results: {row: {seed: result}}.
        changes: {row: files that changed since its trainings, None if unknown}.
        figure: The name of the file beside the page.
    """
    told = words(findings, len(claims.claims))
    runs = [result for of in results.values() for result in of.values()]
    rows = []
    for finding, (p, word) in zip(findings, told, strict=True):
        claim = finding.claim
        sides = f"`{claim.better}` - {_code(claim.than)}"
        about = [claim.name, claim.claim, claim.paper, sides, _name_of(claim.metric)]
        probability = "" if finding.diverged else "< 0.001" if p < 0.001 else f"{p:.3f}"
        visible = "" if claim.equivalent or finding.diverged else f"{finding.visible:.2f}"
        rows.append([*about, _difference(finding), str(finding.seeds), probability, visible, word])
    header = ["", "claim", "paper", "rows", "metric", "difference", "seeds", "p", "visible", "word"]
    given = [word for _, word in told]
    counts = [f"{given.count(word)} {word}" for word in WORDS]
    counts += [f"{given.count('diverged')} diverged"] * ("diverged" in given)
    commits = sorted({f"`{str(run['commit'])[:7]}`" for run in runs})
    hours = sum(run["wall_time_s"] for run in runs) / 3600
    changed = " The code of some was not committed." if any(r["dirty"] for r in runs) else ""
    measured = {finding.claim.name for finding in findings}
    hopeless = {tuning.row for tuning in tunings if tuning.chosen is None}
    lacking = "; ".join(
        claim.name
        + "".join(f" (all settings of `{r}` diverged)" for r in claim.rows() if r in hopeless)
        for claim in claims.claims
        if claim.name not in measured
    )
    return f"""# The papers' claims on Glyphs

Of {len(findings)} comparisons: {", ".join(counts)}.{f" Not measured yet: {lacking}." if lacking else ""}

![Paired differences with 95 % intervals]({figure})

The figure leaves out what is compared with 0. The band is the margin of "as good as".

Measured at {", ".join(commits)} by `make claims`: rows of `{claims.recipes}`,
{len(runs)} trainings, {hours:.1f} hours of training and testing, beside those that chose settings.{changed}

A difference is that of two runs of the same seed, hence of the same training classes and the same trunk, in
percentage points: the mean over seeds, and the half-width of the 95 % Student-t interval. All seeds have the same
test classes. p is two-sided. Two one-sided tests decide whether two rows are as good as each other, within
±{claims.margin:g} points, fixed beforehand, and p is twice the larger of theirs. All p are adjusted by Holm's
method for all {len(claims.claims)} claims, including those not measured yet, so later measurements can only lower
them. If the adjusted p is below {SIGNIFICANT}, the word is *shown* or *contradicted*. *Visible* is the true
difference that so many seeds show with a chance of {100 * POWER:.0f} %, at the strictest level of Holm's method:
*undecided* is no word against a smaller one. Nor does it clear a method that harms: the choice of settings then
takes nearly none of it.
{_processors(findings, results)}

{Table(header, rows, names=5).markdown()}

## The rows on test classes

Percent, mean and half-width of the 95 % Student-t interval over seeds. A row's curve is measured on fewer
classes, and higher for it:

{_means(results).markdown()}

{_tunings(claims, tunings)}
{_changes(changes)}"""


def _processors(findings: Sequence[Finding], results: Mapping[str, Mapping[int, Result]]) -> str:
    """The comparisons whose rows one processor measured, and the others."""
    one, several, unknown = "one", "several, which round differently,", "not recorded"
    groups: dict[str, list[str]] = {one: [], several: [], unknown: []}
    for finding in findings:
        rows = [results[row].values() for row in finding.claim.rows()]
        found = {result.get("processor") for result in chain(*rows)}
        group = unknown if None in found else one if len(found) == 1 else several
        groups[group].append(f"`{finding.claim.name}`")
    told = [f"{group} for {', '.join(names)}" for group, names in groups.items() if names]
    return f"Processors of a comparison's rows: {'; '.join(told)}."


def _means(results: Mapping[str, Mapping[int, Result]]) -> Table:
    shown = ("recall_at_1", SELECTION, "seen_recall_at_1", "unseen_recall_at_1")
    rows = []
    for row, runs in results.items():
        diverged = [seed for seed, run in runs.items() if not run["metrics"]]
        outputs = [_outputs(run) for run in runs.values() if run["metrics"]]
        seeds = count_of_seeds(len(outputs), diverged)
        if diverged and not outputs:
            rows.append([f"`{row}`", *("" for _ in shown), seeds])
        for output in outputs[0] if outputs else ():
            found = [[of[output].get(metric) for of in outputs] for metric in shown]
            cells = ["" if None in values else estimate(values).percent() for values in found]
            rows.append([f"`{row}{output and ':'}{output}`", *cells, seeds])
    return Table(["row", *map(_name_of, shown), "seeds"], rows)


def _outputs(result: Result) -> dict[str, Any]:
    """The metrics of each output: "" for the embedding, "curve" for the last point of its curves."""
    return {"": result["metrics"], "curve": result["curve"], **(result["outputs"] or {})}


def _name_of(metric: str) -> str:
    return metric_name(metric).replace("_", " ")


def _tunings(claims: Claims, tunings: Sequence[Tuning]) -> str:
    if not tunings:
        return ""
    rows = []
    for tuning in tunings:
        told = {
            value: f"{value:g}: {100 * score:.2f}"
            if score > -np.inf
            else f"{value:g}: diverged ({named('draw', tuning.diverged[value])})"
            for value, score in tuning.measured.items()
        }
        best = "" if tuning.chosen is None else told.pop(tuning.chosen)
        rows.append([tuning.row, tuning.setting, best, ", ".join(told.values())])
    measured = {tuning.row for tuning in tunings}
    rows += [
        [row, "none", "", ""] for row in claims.takes if row not in measured | claims.tuned.keys()
    ]
    table = [
        [f"`{row}`", ", ".join(f"`{one}`" for one in claims.takes.get(row, [])), *about]
        for row, *about in rows
    ]
    most = max(len(values) for tuned in claims.tuned.values() for values in tuned.values())
    header = ["row", "takes over", "setting", "chosen: MAP@R", "also tried"]
    return f"""## Settings

One setting of each row was chosen: the value with the largest MAP@R (%) on *validation* classes, as a mean over
{claims.draws} draws of the training classes. {claims.first} values were tried first, then one more at a time
while the best lay at the edge of what was tried, until the list of at most {most} ended. A value is not chosen if
a training with it diverged. No test class was used. Before the choice, a row takes over the chosen settings of
other rows. All other settings stand in the recipes.

{Table(header, table, names=5).markdown()}
"""


def _changes(changes: Mapping[str, Sequence[str] | None]) -> str:
    rows_of: dict[str, list[str]] = {}
    for row, files in changes.items():
        for file in ["unknown"] if files is None else [f"`{file}`" for file in files]:
            rows_of.setdefault(file, []).append(row)
    files_of: dict[str, list[str]] = {}
    for file, rows in rows_of.items():
        told = "all" if len(rows) == len(changes) else ", ".join(f"`{row}`" for row in rows)
        files_of.setdefault(told, []).append(file)
    if not files_of:
        return ""
    table = [[", ".join(files), told] for told, files in files_of.items()]
    return f"""## Code that changed since

Files of the library, and of the runner's trainings, that changed after those above. Results are not measured anew
for it: `make test-all` repeats two of them, on their processor to the last digit.

{Table(["files", "rows"], table, names=2).markdown()}
"""


def _code(side: str | int) -> str:
    return f"`{side}`" if isinstance(side, str) else str(side)


def forest(claims: Claims, findings: Sequence[Finding]) -> bytes:
    """A PNG that shows each comparison's mean difference and interval beside zero or the margin."""
    told = zip(findings, words(findings, len(claims.claims)), strict=True)
    drawn = [(finding, word) for finding, (_, word) in told if finding.claim.than != 0]
    figure = Figure(figsize=(8, 1 + 0.28 * len(drawn)), layout="constrained")
    axes, seen = figure.add_subplot(), {}
    for y, (finding, word) in enumerate(drawn):
        if not finding.diverged:
            seen[word] = axes.errorbar(
                finding.mean, y, xerr=finding.half_width, fmt="o", color=WORDS[word], capsize=3
            )
        if finding.claim.equivalent:
            axes.barh(y, 2 * claims.margin, left=-claims.margin, color=COLOURS[5], alpha=0.3)
        axes.text(1.02, y, _difference(finding), transform=axes.get_yaxis_transform(), **SMALL)
    axes.axvline(0, color="black", linewidth=0.8)
    names = [plain(f"{finding.claim.claim} ({finding.claim.name})") for finding, _ in drawn]
    axes.set_yticks(range(len(drawn)), names, fontsize=8)
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.set_xlabel(
        "against the claim  ←  percentage points, 95 % interval  →  for the claim", fontsize=8
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    keys = [word for word in WORDS if word in seen]
    figure.legend(
        [seen[word] for word in keys],
        keys,
        loc="outside upper right",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def _difference(finding: Finding) -> str:
    if finding.diverged:
        lost = (f"{row}, {named('seed', seeds)}" for row, seeds in finding.diverged.items())
        return f"diverged: {'; '.join(lost)}"
    return f"{finding.mean:+.2f} ± {finding.half_width:.2f}"
