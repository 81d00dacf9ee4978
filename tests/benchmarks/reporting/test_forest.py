"""The figure of a study: every mark at its place, in any theme, inside a phone's width."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.reporting.paired import assess
from benchmarks.reporting.svg import LETTERS, study_figures
from benchmarks.reporting.verdicts import Finding
from benchmarks.settings import CONTROL, Comparison, StudyFile, StudyRow
from tests.benchmarks.reporting.test_study_page import NOISE, TRIPLET

SVG = "{http://www.w3.org/2000/svg}"


def finding(name: str, mean: float | None, *words: str, **about: Any) -> Finding:
    given = {"claim": f"{name} helps", "better": name, "than": "base", **about}
    tested = None if mean is None else assess([*(NOISE + mean)])
    lost = {} if tested else {name: [1]}
    return Finding(Comparison(name, **given), [*range(8)], tested, lost, words, 0.5, None, True)


def drawn(findings: Sequence[Finding], which: str = "", **changes: Any) -> ElementTree.Element:
    rows = {name: StudyRow(f"toy/table/{name}") for name in ("new", "base")}
    study = StudyFile("toy", "?", rows, [one.comparison for one in findings], **changes)
    content = study_figures(study, findings, {})
    assert content == study_figures(study, findings, {}), "the same bytes for the same findings"
    return ElementTree.fromstring(content[which])


def texts(figure: ElementTree.Element) -> list[str]:
    return [str(text.text) for text in figure.iter(f"{SVG}text")]


def marks(figure: ElementTree.Element, tag: str, kind: str) -> list[dict[str, str]]:
    """The attributes of the marks of a class, without those of the key."""
    found = [one.attrib for one in figure.iter(SVG + tag) if one.get("class") == kind]
    return found[kind != "pool" :]


def x_of(mark: dict[str, str]) -> float:
    return float(mark["cx"]) if "cx" in mark else float(re.split("[M ]", mark["d"])[1])


def scale(figure: ElementTree.Element) -> tuple[float, float]:
    """The place of 0 and the pixels of one point, from the axis."""
    ticks = {
        float(text.text.replace("\N{MINUS SIGN}", "-")): float(text.get("x"))
        for text in figure.iter(f"{SVG}text")
        if re.fullmatch("0|[+\N{MINUS SIGN}][0-9.]+", str(text.text))
    }
    (low, left), *_, (high, right) = sorted(ticks.items())
    return ticks[0], (right - left) / (high - low)


FOUR = [
    finding("a", 0.5, "helps", method="HORDE", reported=TRIPLET),
    finding("b", -1.0, "harms", method="HORDE"),
    finding("c", 0.1, "negligible", method="JRS"),
    finding("d", None, "diverged", method="JRS"),
]


def test_every_mark_is_where_its_number_says():
    figure = drawn(FOUR, margin=0.25)
    zero, point = scale(figure)
    for kind, mean in (("gain", 0.5), ("harm", -1.0), ("seen", 0.1)):
        [dot], [line] = marks(figure, "circle", kind), marks(figure, "path", kind)
        assert (x_of(dot) - zero) / point == pytest.approx(mean, abs=0.01)
        low, high = assess([*(NOISE + mean)]).limits()
        assert (x_of(line) - zero) / point == pytest.approx(low, abs=0.01)
        assert (float(line["d"].partition("H")[2]) - zero) / point == pytest.approx(high, abs=0.01)
    [diamond] = marks(figure, "path", "paper")
    assert (x_of(diamond) - zero) / point == pytest.approx(3.1, abs=0.01)
    for band in marks(figure, "rect", "band"):
        assert float(band["width"]) / point == pytest.approx(0.5, abs=0.02)
        assert float(band["x"]) + float(band["width"]) / 2 == pytest.approx(zero, abs=0.2)
    assert len(marks(figure, "rect", "band")) == 5  # four, and a pooled one
    told = texts(figure)
    assert "+0.50 ± 0.24" in told
    assert "\N{MINUS SIGN}1.00 ± 0.24" in told
    assert "diverged" in told
    assert "the paper's gain, on its own dataset (Recall@1)" in told
    assert told[1:3] == ["a gain, or as good as claimed", "a harm, or worse than claimed"]
    key = ["here: mean and 95 % interval", "less than 1 point", "JRS"]
    assert texts(drawn(FOUR[2:]))[:3] == key, "no more than what is drawn"


def test_a_method_stands_above_its_comparisons_and_its_pooled_effect_below():
    figure = drawn(FOUR)
    told = [text for text in texts(figure) if "\N{PLUS-MINUS SIGN}" not in text]
    start = told.index("HORDE")
    names = ["HORDE", "A helps (a)", "B helps (b)", "pooled, exploratory", "JRS", "C helps (c)"]
    assert [text.replace("\N{NO-BREAK SPACE}", " ") for text in told[start:][:6]] == names
    [pool] = marks(figure, "circle", "pool")
    zero, point = scale(figure)
    assert (x_of(pool) - zero) / point == pytest.approx(-0.25, abs=0.01)
    [other] = marks(figure, "circle", "harm")
    assert float(pool["r"]) < float(other["r"])
    lacking = drawn([*FOUR[:2], finding("e", None, "diverged", method="HORDE")])
    assert "pooled, exploratory" not in texts(lacking)


def test_long_text_is_wrapped_and_escaped():
    figure = drawn(
        [finding("1", 0.0, claim="a claim that is longer than a phone is wide <b>&amp; \x1b")]
    )
    lines = [text for text in texts(figure) if "phone" in text or "&amp;" in text]
    assert len(lines) == 2 and all(len(line) <= LETTERS for line in lines)
    assert lines[1].endswith("<b>&amp; \\x1b\N{NO-BREAK SPACE}(1)")


def test_main_comparisons_and_the_others_have_a_figure_each_and_controls_none():
    findings = [
        finding("a", 0.0),
        finding("b", 0.0, family="mechanisms of HORDE", method="HORDE", metric="seen_recall_at_1"),
        finding("c", 0.0, family="mechanisms of HORDE", method="HORDE"),
        finding("d", 0.0, family=CONTROL),
    ]
    letters = {
        which: [text[0] for text in texts(drawn(findings, which)) if "helps" in text]
        for which in ("", "_mechanisms")
    }
    assert letters == {"": ["A"], "_mechanisms": ["B", "C"]}
    told = texts(drawn(findings, "_mechanisms"))
    assert "Mechanisms of HORDE" in told
    assert "B helps\N{NO-BREAK SPACE}(b, seen Recall@1)" in told, "a metric of its own is named"
    assert "pooled, exploratory" not in told


def test_equal_differences_are_a_dot_without_an_interval():
    equal = replace(FOUR[2], tested=assess([2.5, 2.5]))
    figure = drawn([equal])
    assert "+2.50 ± 0.00 (equal)" in texts(figure)
    [dot] = marks(figure, "circle", "seen")
    zero, point = scale(figure)
    assert (x_of(dot) - zero) / point == pytest.approx(2.5, abs=0.01)
    assert not marks(figure, "path", "seen")


def test_nothing_measured_has_no_figure():
    study = StudyFile("toy", "?", {}, [])
    assert study_figures(study, [], {}) == {}
    assert study_figures(study, [finding("a", None, "diverged")], {}) == {}
