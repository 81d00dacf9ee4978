"""The figures of a study: every mark and line at its place, in any theme, inside a phone's width."""

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.reporting.paired import assess
from benchmarks.reporting.svg import LETTERS, study_figures
from benchmarks.reporting.verdicts import Finding
from benchmarks.settings.study_files import CONTROL, StudyRow
from tests.benchmarks.reporting.made_study import NOISE, TRIPLET, N, compared, study_of

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


def marks(figure: ElementTree.Element, tag: str, kind: str) -> list[dict[str, str]]:
    """The attributes of the marks of a class, without those of the key."""
    found = [one.attrib for one in figure.iter(SVG + tag) if one.get("class") == kind]
    return found[kind != "pool" :]


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
    ticks = {
        float(text.text.replace("\N{MINUS SIGN}", "-")): float(text.get("x"))
        for text in figure.iter(f"{SVG}text")
        if re.fullmatch("0|[+\N{MINUS SIGN}][0-9.]+", str(text.text))
    }
    (low, left), *_, (high, right) = sorted(ticks.items())

    def place(x: float | str) -> float:
        """In points, from the axis."""
        return (float(x) - ticks[0]) / (right - left) * (high - low)

    for kind, mean in (("gain", 0.5), ("harm", -1.0), ("seen", 0.1)):
        [dot], [line] = marks(figure, "circle", kind), marks(figure, "path", kind)
        assert place(dot["cx"]) == pytest.approx(mean, abs=0.01)
        ends = [points(line)[0][0], line["d"].partition("H")[2]]
        limits = assess([*(NOISE + mean)]).limits()
        assert [place(end) for end in ends] == pytest.approx(limits, abs=0.01)
    [diamond], [pool] = marks(figure, "path", "paper"), marks(figure, "circle", "pool")
    assert place(points(diamond)[0][0]) == pytest.approx(3.1, abs=0.01)
    assert place(pool["cx"]) == pytest.approx(-0.25, abs=0.01)
    bands = marks(figure, "rect", "band")
    assert len(bands) == 5  # four, and a pooled one
    for band in bands:
        edges = place(band["x"]), place(float(band["x"]) + float(band["width"]))
        assert edges == pytest.approx((-0.25, 0.25), abs=0.02)


def test_long_text_is_wrapped_and_escaped():
    claim = "a claim that is longer than a phone is wide <b>&amp; \x1b"
    told = texts(drawn([finding("1", 0.0, claim=claim)]))
    lines = [text for text in told if "phone" in text or "&amp;" in text]
    assert len(lines) == 2 and all(len(line) <= LETTERS for line in lines)
    assert lines[1].endswith("<b>&amp; \\x1b (1)")


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
    found = lines(figure)
    assert [len(line) for line in found] == [3, 2, 3, 2]
    # The axis of new classes tells the same numbers.
    ticks = figure.findall(".//*[@id='axes_2']/*[@id='matplotlib.axis_4']/*")
    places = {
        float(tick.find(f".//{SVG}text").text): points(tick.find(f".//{SVG}path"))[0][1]
        for tick in ticks
    }
    base, new = ([y for _, y in line] for line in found[2:])
    assert [base[0], base[2]] == pytest.approx([places[20], places[40]], abs=0.2)
    assert new[-1] == pytest.approx(places[60], abs=0.2)
    (start, *_), (middle, _), (end, _) = found[2]
    assert middle == pytest.approx((start + end) / 2, abs=0.1), "at steps 0, 10 and 20"
