"""Forests of differences with their intervals, and a study's curves: SVG for a page, and for a phone's width."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from textwrap import wrap
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.console.printing import printable
from benchmarks.reporting.curves import (
    COLOURS,
    COSINES,
    INK,
    RANKS,
    RECALLS,
    curves_svg,
    design,
    svg_of,
)
from benchmarks.reporting.names import metric_name, told_apart
from benchmarks.reporting.paired import Paired
from benchmarks.reporting.verdicts import (
    MAIN,
    PAPERS,
    Finding,
    Results,
    Word,
    by_method,
    name_of_claim,
    pooled,
)
from benchmarks.settings.recipe_files import read_entry
from benchmarks.settings.study_files import CONTROL, StudyFile

LETTERS = 40  # of a line of text, with room for a difference beside it
LINE, STRIP = 17, 22  # heights of a line of text and of a strip, in points

COLOUR = {"seen": "#0072B2", "gain": "#00825F", "harm": "#C95400", "pool": "#6E7781"}
KEY = {
    "seen": "here: mean and 95 % interval",
    "gain": "a gain, or as good as claimed",
    "harm": "a harm, or worse than claimed",
}


class Strip(NamedTuple):
    """A difference with its limits, below its name; a heading has neither colour nor numbers."""

    name: str
    colour: str = ""  # one of COLOUR
    told: str = ""
    mean: float | None = None
    limits: tuple[float, float] | None = None
    paper: float | None = None


def strip_of(name: str, colour: str, tested: Paired | None, paper: float | None = None) -> Strip:
    """The strip of a tested difference; None: a run diverged."""
    if tested is None:
        return Strip(name, colour, Word.DIVERGED, paper=paper)
    limits = tested.limits() if tested.has_interval else None
    return Strip(name, colour, tested.points(), tested.mean, limits, paper)


def forest_svg(strips: Sequence[Strip], margin: float, axis: str, title: str) -> bytes:
    """Draw the strips from the top down, under a key of what they show."""
    numbers = [-margin, margin]
    for strip in strips:
        shown = (strip.mean, strip.paper, *(strip.limits or ()))
        numbers += [number for number in shown if number is not None]
    edge = 0.04 * (max(numbers) - min(numbers))
    with design():
        figure = Figure(layout="constrained")
        panel = figure.add_subplot()
        panel.grid(visible=False)
        height = 0.0
        for strip in strips:
            height = _draw(panel, strip, margin, height)
        panel.set(xlim=(min(numbers) - edge, max(numbers) + edge), ylim=(height, 0), yticks=[])
        panel.set_xlabel(axis, fontsize=10)
        panel.spines["left"].set_visible(False)
        panel.tick_params(labelsize=10)
        panel.xaxis.set_major_formatter(lambda x, _: signed(f"{round(x, 9):+g}"))
        key = [*_key(strips, margin)]
        names = [str(mark.get_label()) for mark in key]
        figure.legend(key, names, loc="outside upper left", fontsize=10)
        figure.set_size_inches(4.6, (height + 16 * len(key) + 60) / 72)
        return svg_of(figure, title).encode()


def _draw(panel: Axes, strip: Strip, margin: float, height: float) -> float:
    """Draw a strip below this height; the height below it."""
    heading = not strip.colour
    weight, across = "bold" if heading else "normal", panel.get_yaxis_transform()
    write = partial(panel.text, transform=across, fontweight=weight, in_layout=False)
    height += 8 * heading
    for number, line in enumerate(wrap(printable(strip.name), LETTERS + 10 * heading)):
        height += LINE
        write(0, height, line, fontsize=11.5)
        if number == 0:
            write(1, height, signed(strip.told), fontsize=10, ha="right")
    if heading:
        return height
    pool, middle = strip.colour == "pool", height + 5 + STRIP / 2
    wide = STRIP * (0.6 if pool else 1)
    panel.barh(middle, 2 * margin, left=-margin, height=wide, color=INK, alpha=0.13)
    panel.plot([0, 0], [middle - wide / 2, middle + wide / 2], color=INK, linewidth=0.8)
    look: dict[str, Any] = {"color": COLOUR[strip.colour], "linewidth": 1.2 if pool else 2}
    if strip.limits is not None:
        panel.plot(strip.limits, [middle, middle], **look)
    if strip.mean is not None:
        panel.plot(strip.mean, middle, marker="o", markersize=4 if pool else 6, **look)
    if strip.paper is not None:
        panel.plot(strip.paper, middle, marker="D", markersize=7, color=INK, fillstyle="none")
    return height + STRIP + 10


def _key(strips: Sequence[Strip], margin: float) -> Iterator[Line2D | Patch]:
    seen = {strip.colour for strip in strips} | {"seen"}
    for colour, words in KEY.items():
        if colour in seen:
            yield Line2D([], [], color=COLOUR[colour], linewidth=2, marker="o", label=words)
    words = f"less than {margin:g} point{'s' * (margin != 1)}"
    yield Patch(facecolor=INK, linewidth=0, alpha=0.13, label=words)
    if any(strip.paper is not None for strip in strips):
        words = "the paper's gain, on its own dataset (Recall@1)"
        yield Line2D([], [], marker="D", color=INK, fillstyle="none", linewidth=0, label=words)


def signed(text: str) -> str:
    """The text with signs as wide as each other, and no sign at 0."""
    return "0" if text == "+0" else text.replace("-", "\N{MINUS SIGN}")


# -------------------------------------------------------------------------------------- of a study


def study_figures(
    study: StudyFile,
    findings: Sequence[Finding],
    results: Results,
    names: Mapping[str, str] | None = None,
    training: Sequence[Finding] = (),
) -> dict[str, bytes]:
    """The SVG files that have something to show.

    "" has the main comparisons by method, with their pooled effects, "_mechanisms" all others by family except
    controls, "_training" what trainings gain over the untrained network. "_curves" has the compared rows over the
    steps of a training, "_cosines" and "_ranks" likewise the cosines of features and the effective ranks.

    Args:
        names: Of the rows' methods, of which nothing is claimed; default: those of their recipes, as claimed.
        training: See `beyond_untrained`.
    """
    # Without the heading of a family.
    alone = [replace(f, comparison=replace(f.comparison, family=MAIN)) for f in training]
    right = "better" if names else "as claimed"
    main = [finding for finding in findings if finding.comparison.family == MAIN]
    others = [f for f in findings if f.comparison.family not in (MAIN, CONTROL)]
    judged = [*main, *others]
    panels = {"_curves": RECALLS, "_cosines": COSINES, "_ranks": RANKS}
    drawn = {
        "": forest(study, main, right),
        "_mechanisms": forest(study, others, right),
        "_training": forest(study, alone, right),
        **{name: curves(study, judged, results, shown, names) for name, shown in panels.items()},
    }
    return {name: figure for name, figure in drawn.items() if figure}


def forest(study: StudyFile, findings: Sequence[Finding], right: str) -> bytes:
    """Each comparison's difference and interval, beside the paper's gain; empty if none was measured."""
    if not any(finding.tested for finding in findings):
        return b""
    pools = {method: pool for method, pool in pooled(study, findings).items() if pool}
    metrics = dict.fromkeys(metric_name(study.metric(f.comparison)) for f in findings)
    strips = list[Strip]()
    for group, members in by_method(findings).items():
        strips += [Strip(group[:1].upper() + group[1:])] if group else []
        for finding in members:
            comparison = finding.comparison
            by_paper = study.metric(comparison) == PAPERS
            paper = comparison.reported_gain() if by_paper else None
            name = name_of_claim(study, comparison)
            strips.append(strip_of(name, colour_of(finding), finding.tested, paper))
        if group in pools:
            strips.append(strip_of("pooled, exploratory", "pool", pools[group]))
    named = f" of {metrics.popitem()[0]}" if len(metrics) == 1 else ""  # or else by each strip
    axis = f"percentage points{named}; right of 0: {right}"
    return forest_svg(strips, study.margin, axis, "Paired differences with 95 % intervals")


def colour_of(finding: Finding) -> str:
    """Its colour, one of `KEY`."""
    words = {*finding.words}
    if words & {Word.HELPS, Word.WORTH, Word.AS_GOOD}:
        return "gain"
    return "harm" if words & {Word.HARMS, Word.WORSE} else "seen"


def curves(
    study: StudyFile,
    findings: Sequence[Finding],
    results: Results,
    panels: Mapping[str, str],
    names: Mapping[str, str] | None = None,
) -> bytes:
    """The panels of the first compared rows, as many as there are colours; empty if no row kept such curves.

    Args:
        names: Of the rows; default: the labels of their recipes.
    """
    kept = {
        row: [run["curves"] for run in results.get(row, {}).values() if run.get("curves")]
        for finding in findings
        for row in reversed(finding.comparison.rows())  # a base loss before its methods
    }
    rows = [row for row in kept if kept[row]][: len(COLOURS)]
    labels = names or told_apart({row: read_entry(study.rows[row].recipe).label for row in rows})
    return curves_svg({labels[row]: kept[row] for row in rows}, panels, singles=False).encode()
