"""The page of the papers' claims, and its figure."""

import io
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.reporting.claims import SELECTION, Claims, Finding, Tuning, outputs_of, words
from benchmarks.reporting.comparison import metric_name
from benchmarks.reporting.drawing import COLOURS, plain
from benchmarks.reporting.kept import Result
from benchmarks.reporting.paired import estimate
from benchmarks.reporting.table import Table, count_of_seeds, named
from benchmarks.reporting.templates import fill

WORDS = {"shown": COLOURS[2], "contradicted": COLOURS[1], "undecided": "#888888"}

SMALL: dict[str, Any] = {"fontsize": 8, "va": "center"}


def page_of_claims(
    claims: Claims,
    findings: Sequence[Finding],
    results: Mapping[str, Mapping[int, Result]],
    tunings: Sequence[Tuning],
    figure: str,
) -> str:
    """The page in Markdown.

    Args:
        results: {row: {seed: result}}.
        figure: The name of the file beside the page.
    """
    told = words(findings, len(claims.claims))
    given = [word for _, word in told]
    kinds = [*WORDS, *["diverged"] * ("diverged" in given)]
    runs = [result for of in results.values() for result in of.values()]
    lacking = "; ".join(_lacking(claims, findings, tunings))
    rows = [_row(finding, p, word) for finding, (p, word) in zip(findings, told, strict=True)]
    header = ["", "claim", "paper", "rows", "metric", "difference", "seeds", "p", "visible", "word"]
    return fill(
        Path(__file__).with_suffix(".md"),
        **{"claims": claims, "findings": findings, "figure": figure, "runs": runs},
        counts=", ".join(f"{given.count(word)} {word}" for word in kinds),
        lacking=f" Not measured yet: {lacking}." if lacking else "",
        commits=", ".join(sorted({f"`{str(run['commit'])[:7]}`" for run in runs})),
        hours=f"{sum(run['wall_time_s'] for run in runs) / 3600:.1f}",
        dirty=" The code of some was not committed." if any(r["dirty"] for r in runs) else "",
        margin=f"{claims.margin:g}",
        processors=_processors(findings, results),
        table=Table(header, rows, names=5).markdown(),
        means=_means(results).markdown(),
        most=max((len(v) for of in claims.tuned.values() for v in of.values()), default=0),
        tunings=tunings and _tunings(claims, tunings).markdown(),
    )


def _row(finding: Finding, p: float, word: str) -> list[str]:
    claim, tested = finding.claim, finding.tested
    than = f"`{claim.than}`" if isinstance(claim.than, str) else f"{claim.than}"
    about = [claim.name, claim.claim, claim.paper, f"`{claim.better}` - {than}"]
    about += [_name_of(claim.metric), _difference(finding)]
    about.append(str(finding.seeds))
    if tested is None:
        return [*about, "", "", word]
    visible = "" if claim.equivalent else f"{tested.visible:.2f}"
    return [*about, "< 0.001" if p < 0.001 else f"{p:.3f}", visible, word]


def _difference(finding: Finding) -> str:
    if finding.tested is None:
        lost = (f"{row}, {named('seed', seeds)}" for row, seeds in finding.diverged.items())
        return f"diverged: {'; '.join(lost)}"
    return f"{finding.tested.mean:+.2f} ± {finding.tested.half_width:.2f}"


def _lacking(claims: Claims, findings: Sequence[Finding], tunings: Sequence[Tuning]) -> list[str]:
    """The claims without a finding."""
    measured = {finding.claim.name for finding in findings}
    hopeless = {tuning.row for tuning in tunings if tuning.chosen is None}
    return [
        claim.name
        + "".join(f" (all settings of `{r}` diverged)" for r in claim.rows() if r in hopeless)
        for claim in claims.claims
        if claim.name not in measured
    ]


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
        outputs = [outputs_of(run) for run in runs.values() if run["metrics"]]
        seeds = count_of_seeds(len(outputs), diverged)
        if diverged and not outputs:
            rows.append([f"`{row}`", *("" for _ in shown), seeds])
        for output in outputs[0] if outputs else ():
            found = [[of[output].get(metric) for of in outputs] for metric in shown]
            cells = ["" if None in values else estimate(values).percent() for values in found]
            rows.append([f"`{row}{output and ':'}{output}`", *cells, seeds])
    return Table(["row", *map(_name_of, shown), "seeds"], rows)


def _name_of(metric: str) -> str:
    return metric_name(metric).replace("_", " ")


def _tunings(claims: Claims, tunings: Sequence[Tuning]) -> Table:
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
    untuned = [row for row in claims.takes if row not in measured | claims.tuned.keys()]
    rows += [[row, "none", "", ""] for row in untuned]
    table = [
        [f"`{row}`", ", ".join(f"`{one}`" for one in claims.takes.get(row, [])), *about]
        for row, *about in rows
    ]
    return Table(["row", "takes over", "setting", "chosen: MAP@R", "also tried"], table, names=5)


def forest(claims: Claims, findings: Sequence[Finding]) -> bytes:
    """A PNG that shows each comparison's mean difference and interval beside zero or the margin."""
    told = zip(findings, words(findings, len(claims.claims)), strict=True)
    drawn = [(finding, word) for finding, (_, word) in told if finding.claim.than != 0]
    figure = Figure(figsize=(8, 1 + 0.28 * len(drawn)), layout="constrained")
    axes, seen = figure.add_subplot(), {}
    for y, (finding, word) in enumerate(drawn):
        if tested := finding.tested:
            seen[word] = axes.errorbar(
                tested.mean, y, xerr=tested.half_width, fmt="o", color=WORDS[word], capsize=3
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
    look = {"ncols": 3, "fontsize": 8, "frameon": False}
    figure.legend([seen[word] for word in keys], keys, loc="outside upper right", **look)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()
