"""The curves of a study: a line for each row, where its numbers say, on training and on new classes."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.reporting.svg import study_figures
from benchmarks.reporting.verdicts import Finding
from benchmarks.settings import CONTROL, Comparison, StudyFile, StudyRow
from tests.benchmarks.reporting.test_forest import SVG, texts

RECIPES = {
    "base": "photographs/frozen/binomial",
    "new": "photographs/frozen/binomial_horde_sketch",
    "control": "photographs/frozen/binomial_short",
}


def curves(steps: list[int], seen: list[float], unseen: list[float]) -> dict[str, Any]:
    return {"curves": {"step": steps, "seen_recall_at_1": seen, "unseen_recall_at_1": unseen}}


def drawn(results: dict[str, Any], name: str = "_curves") -> ElementTree.Element | None:
    compared = [Comparison("a", "new helps", "new", "base")]
    compared.append(Comparison("b", "control", "base", "control", family=CONTROL))
    study = StudyFile("toy", "?", {row: StudyRow(of) for row, of in RECIPES.items()}, compared)
    findings = [Finding(of, [0, 1], None, {}, (), None, None, True) for of in compared]
    content = study_figures(study, findings, results).get(name)
    return None if content is None else ElementTree.fromstring(content)


def points(path: ElementTree.Element) -> list[tuple[float, float]]:
    found = re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d", ""))
    return [(float(x), float(y)) for x, y in found]


def lines(figure: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The points of the lines, without those of the grid and of the key."""
    inside = [path for path in figure.iter(f"{SVG}path") if path.get("clip-path")]
    return [points(path) for path in inside if "currentColor" not in path.get("style", "")]


RESULTS = {
    "base": {
        0: curves([0, 10, 20], [0.1, 0.3, 0.5], [0.2, 0.2, 0.3]),
        1: curves([0, 10, 20], [0.1, 0.5, 0.7], [0.2, 0.4, 0.5]),
    },
    "new": {0: curves([0, 20], [0.1, 0.5], [0.2, 0.6]), 1: {}},
    "control": {0: curves([0, 2], [0.1, 0.9], [0.2, 0.9])},
}


def test_each_line_is_the_mean_over_the_seeds_of_a_row_of_the_main_comparisons():
    figure = drawn(RESULTS)
    assert figure is not None
    told = texts(figure)
    assert told[-2:] == ["binomial deviance", "binomial deviance + HORDE, sketches"]
    assert "Recall@1 (%) on training classes" in told
    assert "Recall@1 (%) on new classes" in told
    found = lines(figure)
    assert [len(line) for line in found] == [3, 2, 3, 2]
    for line in found[0], found[2]:  # at steps 0, 10 and 20
        assert line[1][0] == pytest.approx((line[0][0] + line[2][0]) / 2, abs=0.1)
    (_, start), (_, middle), (_, end) = found[0]
    assert (start - middle) / (start - end) == pytest.approx((40 - 10) / (60 - 10), abs=0.01)
    assert found[0][0] == found[1][0], "the same network before training"
    assert found[3][-1][1] < found[2][-1][1], "60 % is higher than 40 %"
    # The axis tells the same numbers.
    marks = figure.findall(".//*[@id='axes_2']/*[@id='matplotlib.axis_4']/*")
    texts_and_lines = [(mark.find(f".//{SVG}text"), mark.find(f".//{SVG}path")) for mark in marks]
    ticks = {float(text.text): points(line)[0][1] for text, line in texts_and_lines}
    assert found[2][0][1] == pytest.approx(ticks[20], abs=0.2), "the base on new classes"
    assert found[2][2][1] == pytest.approx(ticks[40], abs=0.2)


def test_cosines_of_features_have_a_figure_where_they_were_kept():
    assert drawn(RESULTS, "_cosines") is None
    kinds = ("seen_same", "seen_other", "unseen_same", "unseen_other")
    values = dict(zip(kinds, ([0.5, 0.7], [0.5, 0.2], [0.5, 0.6], [0.5, 0.4]), strict=True))
    kept = {"step": [0, 20], **{f"{kind}_class_cosine": of for kind, of in values.items()}}
    figure = drawn({"base": {0: {"curves": kept}, 1: {"curves": kept}}, "new": {}}, "_cosines")
    assert figure is not None
    assert "Cosines, two classes, new classes" in texts(figure)
    rises = [start > end for (_, start), (_, end) in lines(figure)]
    assert rises == [True, False, True, False]


def test_without_kept_curves_there_is_no_figure():
    assert drawn({"base": {0: {}}, "new": {}}) is None
    assert drawn({"control": RESULTS["control"]}) is None
