"""The curves of a study: a line for each row, where its numbers say, on training and on new classes."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.reporting.curves import COLOURS
from benchmarks.reporting.svg import study_figures
from benchmarks.reporting.verdicts import Finding
from benchmarks.settings import CONTROL, Comparison, StudyFile, StudyRow

SVG = "{http://www.w3.org/2000/svg}"
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


def texts(figure: ElementTree.Element) -> list[str]:
    return [str(text.text) for text in figure.iter(f"{SVG}text")]


def styled(figure: ElementTree.Element) -> list[ElementTree.Element]:
    """The lines, without those of the grid and of the key."""
    inside = [path for path in figure.iter(f"{SVG}path") if path.get("clip-path")]
    return [path for path in inside if "currentColor" not in path.get("style", "")]


def points(path: ElementTree.Element) -> list[tuple[float, float]]:
    found = re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d", ""))
    return [(float(x), float(y)) for x, y in found]


def lines(figure: ElementTree.Element) -> list[list[tuple[float, float]]]:
    return [points(path) for path in styled(figure)]


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
    width, height = map(float, figure.get("viewBox").split()[2:])
    assert figure.get("width") == "331.2pt", "441.6 pixels"
    assert all(8 < x < width - 8 and 0 < y < height for line in found for x, y in line)


def test_the_axes_tell_the_numbers():
    figure = drawn(RESULTS)
    assert figure is not None
    marks = figure.findall(".//*[@id='axes_2']/*[@id='matplotlib.axis_4']/*")
    texts_and_lines = [(mark.find(f".//{SVG}text"), mark.find(f".//{SVG}path")) for mark in marks]
    ticks = {float(text.text): points(line)[0][1] for text, line in texts_and_lines}
    last = lines(figure)[2]  # the base on new classes: 20, 30 and 40 %
    assert last[0][1] == pytest.approx(ticks[20], abs=0.2)
    assert last[2][1] == pytest.approx(ticks[40], abs=0.2)


def test_cosines_of_features_have_a_figure_where_they_were_kept():
    assert drawn(RESULTS, "_cosines") is None
    kinds = ("seen_same", "seen_other", "unseen_same", "unseen_other")
    values = dict(zip(kinds, ([0.5, 0.7], [0.5, 0.2], [0.5, 0.6], [0.5, 0.4]), strict=True))
    kept = {"step": [0, 20], **{f"{kind}_class_cosine": of for kind, of in values.items()}}
    figure = drawn({"base": {0: {"curves": kept}, 1: {"curves": kept}}, "new": {}}, "_cosines")
    assert figure is not None
    titles = [text for text in texts(figure) if text.startswith("Cosines, ")]
    assert titles[::3] == [
        "Cosines, same class, training classes",
        "Cosines, two classes, new classes",
    ]
    found = lines(figure)
    assert len(found) == 4
    rises = [start > end for (_, start), (_, end) in found]
    assert rises == [True, False, True, False]


def test_without_kept_curves_there_is_no_figure():
    assert drawn({"base": {0: {}}, "new": {}}) is None
    assert drawn({"control": RESULTS["control"]}) is None


def test_lines_differ_in_colour_and_all_else_follows_the_theme():
    figure = drawn(RESULTS)
    assert figure is not None
    assert len({path.get("style") for path in styled(figure)}) == 2
    light, dark = str(figure.find(f".//{SVG}style").text).split("@media")
    assert "color-scheme: light dark; color: #1f2328" in light and "color: #e6edf3" in dark
    styles = ";".join(element.get("style", "") for element in figure.iter())
    colours = set(re.findall(r"\b(?:fill|stroke): ([^;]+)", styles))
    assert colours == {"none", "currentColor", *(colour.lower() for colour in COLOURS[:2])}
    assert b"http" not in ElementTree.tostring(figure).replace(b"http://www.w3.org", b"")
