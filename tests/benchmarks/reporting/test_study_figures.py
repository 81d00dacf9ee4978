"""The figures of a study: every mark and line at its place, in any theme, inside a phone's width."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.reporting.forest import COLOUR, study_figures
from benchmarks.reporting.paired import assess
from benchmarks.reporting.verdicts import Finding
from benchmarks.settings.study_files import CONTROL, StudyRow
from tests.benchmarks.reporting.made_study import MAP, NOISE, TRIPLET, N, compared, study_of

SVG = "{http://www.w3.org/2000/svg}"


def finding(name: str, mean: float | None, *words: str, **about: Any) -> Finding:
    tested = None if mean is None else assess([*(NOISE + mean)])
    lost = {} if tested else {name: [1]}
    seeds = [*range(N)]
    return Finding(compared(name, name, **about), seeds, tested, lost, words, 0.5, None, True)


def drawn(
    findings: Sequence[Finding], which: str = "", results: Any = None, **changes: Any
) -> ElementTree.Element | None:
    study = study_of(*(one.comparison for one in findings), **changes)
    content = study_figures(study, findings, results or {})
    return ElementTree.fromstring(content[which]) if which in content else None


def texts(figure: ElementTree.Element | None) -> list[str]:
    assert figure is not None
    return [str(text.text).replace("\N{NO-BREAK SPACE}", " ") for text in figure.iter(f"{SVG}text")]


def inside(figure: ElementTree.Element) -> ElementTree.Element:
    """What is drawn between the axes, without the key."""
    axes = figure.find(".//*[@id='axes_1']")
    assert axes is not None
    return axes


def dots(figure: ElementTree.Element, style: str) -> list[float]:
    """How far right the marks of a style are."""
    used = inside(figure).iter(f"{SVG}use")
    return [float(mark.attrib["x"]) for mark in used if style in mark.attrib["style"]]


def strokes(figure: ElementTree.Element, style: str) -> list[list[float]]:
    """How far right the points of the lines and bands of a style are."""
    paths = [path for path in inside(figure).iter(f"{SVG}path") if path.get("clip-path")]
    shown = [path for path in paths if style in path.attrib["style"]]
    return [[x for x, _ in points(path)] for path in shown]


def points(path: ElementTree.Element | dict[str, str]) -> list[tuple[float, float]]:
    found = re.findall(r"[ML] ?([\d.]+) ([\d.]+)", path.get("d") or "")
    return [(float(x), float(y)) for x, y in found]


FOUR = [
    finding("a", 0.5, "helps", method="HORDE", reported=TRIPLET),
    finding("b", -1.0, "harms", method="HORDE"),
    finding("c", 0.1, "negligible", method="JRS"),
    finding("d", None, "diverged", method="JRS"),
]


def test_every_mark_is_where_its_number_says():
    figure = drawn(FOUR, margin=0.25)
    assert figure is not None
    ticks = {}
    for tick in figure.findall(".//*[@id='matplotlib.axis_1']/*"):
        for text in tick.iter(f"{SVG}text"):
            if re.fullmatch("0|[+\N{MINUS SIGN}][0-9.]+", str(text.text)):
                number = float(text.text.replace("\N{MINUS SIGN}", "-"))
                ticks[number] = float(text.attrib["x"])
    (low, left), *_, (high, right) = sorted(ticks.items())

    def place(x: float) -> float:
        """In points, from the axis."""
        return (x - ticks[0]) / (right - left) * (high - low)

    for kind, mean in (("gain", 0.5), ("harm", -1.0), ("seen", 0.1)):
        colour = COLOUR[kind].lower()
        assert [*map(place, dots(figure, f"fill: {colour}"))] == pytest.approx([mean], abs=0.01)
        limits = assess([*(NOISE + mean)]).limits()
        line, *_ = strokes(figure, f"stroke: {colour}")
        assert [*map(place, line)] == pytest.approx(limits, abs=0.01)
    for style, mean in (("fill-opacity: 0", 3.1), (f"fill: {COLOUR['pool'].lower()}", -0.25)):
        assert [*map(place, dots(figure, style))] == pytest.approx([mean], abs=0.01)
    bands = strokes(figure, "opacity: 0.13")
    assert len(bands) == 5  # four, and a pooled one
    for band in bands:
        assert place(min(band)) == pytest.approx(-0.25, abs=0.01)
        assert place(max(band)) == pytest.approx(0.25, abs=0.01)


def test_the_axis_names_the_metric_of_what_is_drawn_and_the_file_is_the_same_again():
    other = finding("e", 0.2, metric=MAP, family="mechanisms")
    study = study_of(*(of.comparison for of in (*FOUR, other)))
    figures = study_figures(study, [*FOUR, other], {})
    assert figures == study_figures(study, [*FOUR, other], {})
    assert b"percentage points of Recall@1; right" in figures[""]
    assert b"percentage points of MAP@R; right" in figures["_mechanisms"]
    both = [FOUR[1], replace(other, comparison=replace(other.comparison, family="main"))]
    assert b">percentage points; right" in study_figures(study, both, {})[""]


def curves(steps: list[int], seen: list[float], unseen: list[float]) -> dict[str, Any]:
    return {"curves": {"step": steps, "seen_recall_at_1": seen, "unseen_recall_at_1": unseen}}


RECIPES = {
    "base": StudyRow("glyphs/demo/binomial"),
    "new": StudyRow("glyphs/demo/binomial_horde_sketch"),
    "control": StudyRow("glyphs/demo/binomial_horde"),
}
RESULTS = {
    "base": {
        0: curves([0, 10, 20], [0.1, 0.3, 0.5], [0.2, 0.2, 0.3]),
        1: curves([0, 10, 20], [0.1, 0.5, 0.7], [0.2, 0.4, 0.5]),
    },
    "new": {0: curves([0, 20], [0.1, 0.5], [0.2, 0.6]), 1: {}},
    "control": {0: curves([0, 2], [0.1, 0.9], [0.2, 0.9])},
}


def lines(figure: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The points of the lines, without those of the grid and of the key."""
    inside = [path for path in figure.iter(f"{SVG}path") if path.get("clip-path")]
    return [points(path) for path in inside if "currentColor" not in path.get("style", "")]


def test_each_line_is_the_mean_over_the_seeds_of_a_row_of_the_main_comparisons():
    findings = [finding("new", None), finding("control", None, family=CONTROL)]
    figure = drawn(findings, "_curves", RESULTS, rows=RECIPES)
    told = texts(figure)
    assert told[-2:] == ["binomial deviance", "binomial deviance + HORDE, sketches"]
    study = study_of(*(one.comparison for one in findings), rows=RECIPES)
    mine = study_figures(study, findings, RESULTS, {row: f"my {row}" for row in RECIPES})
    assert texts(ElementTree.fromstring(mine["_curves"]))[-2:] == ["my base", "my new"]
    found = lines(figure)
    assert [len(line) for line in found] == [3, 2, 3, 2]
    # The axis of new classes tells the same numbers.
    ticks = figure.findall(".//*[@id='axes_2']/*[@id='matplotlib.axis_4']/*")
    marks = ((tick.find(f".//{SVG}text"), tick.find(f".//{SVG}path")) for tick in ticks)
    places = {float(text.text): points(path)[0][1] for text, path in marks}
    base, new = ([y for _, y in line] for line in found[2:])
    assert [base[0], base[2]] == pytest.approx([places[20], places[40]], abs=0.2)
    assert new[-1] == pytest.approx(places[60], abs=0.2)
    (start, *_), (middle, _), (end, _) = found[2]
    assert middle == pytest.approx((start + end) / 2, abs=0.1), "at steps 0, 10 and 20"
