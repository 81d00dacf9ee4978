"""A paper's figure: it draws the recorded numbers, leaves out missing ones, and says so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.building import resolved
from benchmarks.reporting.paper_figure import draw_figure
from benchmarks.settings import parse, recipe_files
from benchmarks.settings.recipe_files import read_table, table_names
from benchmarks.tables import main
from tests.benchmarks.made import DIVERGED
from tests.benchmarks.reporting.test_tables import write_table_run

ROWS = ("a", "b", "c", "d")
TABLE = """
title: Toy
shared: {losses: [{loss: {class_path: pml_regularizers.BinomialDevianceLoss}}], optimization: {steps: 30}}
trainings: {a: {label: A}, b: {label: B}, c: {label: C}, d: {label: D}}
figure:
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_files, "RECIPES", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)


def draw(figure: str) -> Figure:
    path = Path("recipes/toy/figure.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TABLE + figure)
    return draw_figure(read_table("toy/figure"), [Path("runs")])


def make(row: str, seed: int = 0, **changes: Any) -> Path:
    """A finished run; a list of a column is a curve over the steps 10, 20, ..."""
    Path("recipes/toy").mkdir(parents=True, exist_ok=True)
    Path("recipes/toy/figure.yaml").write_text(TABLE.replace("figure:", ""))
    path = Path("runs") / f"{row}-{seed}"
    for table, columns in changes.pop("records", {}).items():
        (path / "records").mkdir(parents=True, exist_ok=True)
        rows = [
            ["~iteration~", *columns],
            *zip(range(10, 1000, 10), *columns.values(), strict=False),
        ]
        lines = [",".join(map(str, row)) + "\n" for row in rows]
        (path / "records" / f"{table}.csv").write_text("".join(lines))
    changes = {"metrics": {"recall_at_1": 0.5}, **changes}
    return write_table_run(path, f"toy/figure/{row}", seed, **changes)


def lines(figure: Figure, panel: int = 0) -> dict[str, tuple[list[float], list[float]]]:
    """{name: (x, y)}, y to a thousandth."""
    return {
        str(line.get_label()): (
            [float(x) for x in line.get_xdata()],
            [round(float(y), 3) for y in line.get_ydata()],
        )
        for line in figure.axes[panel].lines
    }


def band(figure: Figure, number: int = 0) -> set[tuple[float, float]]:
    [path] = figure.axes[0].collections[number].get_paths()
    return {(float(x), round(float(y), 3)) for x, y in path.vertices}


def test_over_a_setting_with_the_half_widths_of_the_parts_as_band() -> None:
    for row, recall in zip(ROWS, (0.4, 0.5, 0.45, 0.3), strict=True):
        make(
            row,
            metrics={"recall_at_1": recall + 0.2},
            outputs={"parts": {"recall_at_1": recall}, "bound": {"h_divergence": recall + 0.1}},
            half_widths={"parts": {"recall_at_1": 0.01}, "bound": {"h_divergence": 0.02}},
        )
    panel = "lines: {one: {0: a, 0.5: b, 1: c}, two: {0: a, 1: d}}"
    figure = draw(f"  output: parts\n  x: alpha\n  panels: {{P: {{{panel}}}}}")
    assert lines(figure) == {"one": ([0, 0.5, 1], [40, 50, 45]), "two": ([0, 1], [40, 30])}
    edges = {(0, 39), (0, 41), (0.5, 49), (0.5, 51), (1, 44), (1, 46)}
    assert band(figure) == edges
    assert band(figure, 1) == {(0, 39), (0, 41), (1, 29), (1, 31)}
    [axes] = figure.axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        *("P", "alpha", "Recall@1 (%)"),
    )
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "0.5", "1"]
    assert figure.get_supxlabel().startswith("Bands: 95 % intervals")
    # Whatever output has the metric; Recall@1 without a name is that of the whole test set.
    figure = draw("  lines: {one: {0: a}}\n  panels: {P: {metrics: [h_divergence]}, Q: {}}")
    assert lines(figure) == {"one": ([0], [50])}
    assert band(figure) == {(0, 48), (0, 52)}
    assert lines(figure, 1) == {"one": ([0], [60])}
    assert not figure.axes[1].collections


def test_a_missing_or_stale_run_leaves_a_gap_and_is_named() -> None:
    for row in ("a", "b", "d"):
        make(row, metrics={"recall_at_1": 0.5})
    info = make("d", metrics={"recall_at_1": 0.9})
    config = resolved(parse(["--recipe", "toy/figure/d", "--optimization.steps", "7"]).config)
    make("d", metrics={"recall_at_1": 0.9}, config=config)
    assert info.exists()
    figure = draw("  panels: {P: {lines: {one: {1: a, 2: c, 3: d, 40: b}}}}")
    [(name, (x, y))] = lines(figure).items()
    assert (name, x) == ("one", [1, 2, 3, 40])
    np.testing.assert_equal(y, [50, np.nan, np.nan, 50])
    assert figure.axes[0].get_xscale() == "symlog", "the values span decades"
    assert "No run of: c, d." in figure.get_supxlabel().replace("\n", " ")
    make("b", 7, **DIVERGED)
    make("c", 4, **DIVERGED)
    figure = draw("  panels: {P: {lines: {one: {1: a, 2: c, 3: d, 40: b}}}}")
    assert "Diverged: b (seed 7), c (seed 4)." in figure.get_supxlabel().replace("\n", " ")


def test_over_steps_with_the_interval_over_seeds_as_band() -> None:
    for seed, recall in enumerate((0.50, 0.52, 0.54)):
        make("a", seed, records={"evaluation": {"unseen_recall_at_1": [0.1, recall]}})
    make("b", records={"oracle": {"recall_at_1": [0.2, 0.3, 0.4], "NMI": [0.6, 0.7, 0.8]}})
    figure = draw(
        "  panels:\n    P: {metrics: [unseen_recall_at_1], lines: {A: a, C: c}}\n"
        "    Q: {metrics: [recall_at_1, NMI], lines: {B: b}, x: epoch, steps: 20}"
    )
    assert lines(figure) == {"A": ([10, 20], [10, 52]), "C (no curve)": ([], [])}
    assert {y for x, y in band(figure) if x == 20} == {52 - 4.968, 52 + 4.968}
    assert figure.axes[0].get_ylabel() == "Recall@1 (%)"
    assert lines(figure, 1) == {
        "Recall@1": ([0.5, 1, 1.5], [20, 30, 40]),
        "NMI": ([0.5, 1, 1.5], [60, 70, 80]),
    }
    assert figure.axes[1].get_xlabel() == "epoch"


def test_the_command_draws_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    make("a", metrics={"recall_at_1": 0.5})
    assert main(["toy/figure", "--figure", "x.png"]) == 2
    assert "toy/figure describes no figure" in capsys.readouterr().err
    draw("  panels: {P: {lines: {one: {0: a}}}}")
    assert main(["toy/figure", "--figure", "x.svg"]) == 0
    assert "Recall@1" in capsys.readouterr().out
    assert Path("x.svg").read_text().startswith("<?xml")
    for file, words in {"x.doc": "expected a suffix of", "no/x.png": "No such file"}.items():
        assert main(["toy/figure", "--figure", file]) == 2
        captured = capsys.readouterr()
        assert f"--figure: {file}: {words}" in captured.err
        assert captured.out == "", "at once"


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        ("  panels: {P: {lines: {one: e}}}", "figure.P: expected lines"),
        ("  panels: {P: {lyne: {one: a}}}", "figure.P: Option 'lyne.one' is not acc"),
        ("  panels: {P: {lines: {one: a}, metrics: []}}", "figure.P: expected lines"),
        (
            "  panels: {P: {lines: {one: a}, steps: 0}}",
            "figure.P: steps: expected a number >0, got 0",
        ),
        ("  panels: [P]", "figure: its panels is not as"),
    ],
)
def test_a_wrong_description_is_refused(figure: str, words: str) -> None:
    with pytest.raises(recipe_files.ConfigError, match=words):
        draw(figure)


def test_every_figure_of_results_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    figures = {name: read_table(name) for name in table_names() if read_table(name).figure}
    assert len(figures) == 6
    for name, table in figures.items():
        shown = {row for panel in table.figure.values() for row in panel.rows()}
        assert {f"{name}/{row}" for row in shown} == {entry.name for entry in table.entries}


def test_the_rows_measure_what_their_panels_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    needs = {"NMI": "clustering", "F1": "clustering"}
    needs |= {"ideal_joint_error": "divergence", "h_divergence": "divergence"}
    checked = 0
    for name in table_names():
        entries = {entry.name: entry.settings["evaluation"] for entry in read_table(name).entries}
        for panel in read_table(name).figure.values():
            for evaluation in [entries[f"{name}/{row}"] for row in panel.rows()]:
                for metric in panel.metrics:
                    kind, _, K = metric.partition("recall_at_")
                    assert kind in ("", "seen_", "unseen_", *needs)
                    assert kind or int(K) in evaluation["recall_at"]
                    assert metric not in needs or evaluation[needs[metric]]
                assert panel.output != "parts" or evaluation["parts"] == 10
                checked += 1
    assert checked > 70
