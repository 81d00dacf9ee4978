"""The curves of a study: Recall@1 on seen and on unseen classes over the steps of a training."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.reporting.figures import COLOURS, over_steps, placed
from benchmarks.reporting.svg import EDGE, WIDTH, svg_file, svg_text, ticks
from benchmarks.reporting.verdicts import MAIN, Finding, Result, Results
from benchmarks.settings import CONTROL, StudyFile, read_entry

PANELS = {"seen_recall_at_1": "training classes", "unseen_recall_at_1": "new classes"}

LEFT, RIGHT = 38, 24  # beside a panel
HEIGHT = 170  # of a panel
DASHES = ("", "7 4", "2 4")
IN_THE_DARK = ("#4aa8e8", "#ff8c3a", "#2fc79a", "#e39ac2", "#e69f00", "#8fd3ff")

STYLE = (
    ".line { fill: none; stroke-width: 2.2; }\n.grid { stroke: #8c959f; stroke-opacity: 0.3; }\n"
    + "".join(f".c{i} {{ stroke: {colour}; }}\n" for i, colour in enumerate(COLOURS))
)
DARK = "".join(f".c{i} {{ stroke: {colour}; }}\n" for i, colour in enumerate(IN_THE_DARK))

Line = tuple[NDArray[np.floating], NDArray[np.floating]]
"""Steps, and means over seeds in percent."""


def study_curves(study: StudyFile, findings: Sequence[Finding], results: Results) -> bytes | None:
    """An SVG file of the compared rows, those of main comparisons first, as many as there are colours.

    Controls are left out; None if no row kept its curves. A row's line is the mean over the seeds that kept theirs,
    at the steps that all of them have.
    """
    compared = [of.comparison for of in findings if of.comparison.family != CONTROL]
    main = {row for of in compared if of.family == MAIN for row in of.rows()}
    every = main.union(*(of.rows() for of in compared))
    by_place = sorted(every, key=lambda row: (row not in main, [*study.rows].index(row)))
    drawn = {row: lines for row in by_place if (lines := _lines(results.get(row, {})))}
    if not drawn:
        return None
    rows = [*drawn][: len(COLOURS)]
    labels = {row: read_entry(study.rows[row].recipe).label for row in rows}
    twice = {of for of in labels.values() if [*labels.values()].count(of) > 1}
    labels = {row: f"{of}, {row}" if of in twice else of for row, of in labels.items()}
    places = placed(f"{labels[row]} ({row})" for row in rows)
    looks = {row: place % len(COLOURS) for row, place in zip(rows, places.values(), strict=True)}
    parts, y = list[str](), 0.0
    for row in rows:
        y += 22
        parts += [_path(f"M8 {y - 5:g}h28", looks[row]), svg_text(46, y, labels[row], "soft")]
    longest = max(float(drawn[row][name][0][-1]) for row in rows for name in drawn[row])
    for name, classes in PANELS.items():
        lines = {row: drawn[row][name] for row in rows if name in drawn[row]}
        if lines:
            y += 30
            parts.append(svg_text(EDGE, y, f"Recall@1 (%) on {classes}", "group"))
            parts += _panel(lines, looks, y + 12, longest)
            y += 12 + HEIGHT + 22
    parts.append(svg_text(WIDTH / 2, y + 16, "training step", "soft middle"))
    return svg_file(parts, y + 26, "Recall@1 over the steps of a training", STYLE, DARK)


def _lines(runs: Mapping[int, Result]) -> dict[str, Line]:
    curves = [run["curves"] for run in runs.values() if run.get("curves")]
    found = {name: over_steps(curves, name) for name in PANELS if curves}
    return {name: (of[0], 100 * of[1].mean(axis=0)) for name, of in found.items() if of}


def _panel(
    lines: Mapping[str, Line], looks: Mapping[str, int], top: float, longest: float
) -> list[str]:
    every = np.concatenate([values for _, values in lines.values()])
    spare = max(1.0, 0.08 * float(np.ptp(every)))
    low, high = float(every.min()) - spare, float(every.max()) + spare
    wide = WIDTH - LEFT - RIGHT

    def x(step: float) -> float:
        return round(LEFT + wide * step / max(longest, 1), 1)

    def y(value: float) -> float:
        return round(top + HEIGHT * (high - value) / (high - low), 1)

    parts = []
    for value in ticks(low, high, 5):
        parts.append(f'<path class="grid" d="M{LEFT} {y(value)}h{wide}"/>')
        parts.append(svg_text(LEFT - 6, y(value) + 4, f"{value:g}", "soft right"))
    parts.append(f'<path class="rule" d="M{LEFT} {top + HEIGHT:g}h{wide}"/>')
    for step in ticks(0, max(longest, 1), 6):
        parts.append(f'<path class="rule" d="M{x(step)} {top + HEIGHT:g}v5"/>')
        parts.append(svg_text(x(step), top + HEIGHT + 19, f"{step:,.0f}", "soft middle"))
    for row, (steps, values) in lines.items():
        points = [f"{x(step)} {y(value)}" for step, value in zip(steps, values, strict=True)]
        parts.append(_path(f"M{'L'.join(points)}", looks[row]))
    return parts


def _path(points: str, place: int) -> str:
    dash = DASHES[place % len(DASHES)]
    return f'<path class="line c{place}" d="{points}"{dash and f" stroke-dasharray={dash!r}"}/>'
