"""The report: hand-computed intervals, pairing by seed, a file that loads nothing, clear errors."""

import html
import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.records.files import write_json
from benchmarks.records.results import Run, digests, load_run
from benchmarks.report import main
from benchmarks.reporting.comparison import compare
from benchmarks.reporting.figures import write_html
from benchmarks.reporting.table import Table
from tests.benchmarks.made import DIVERGED
from tests.benchmarks.reporting.made_runs import (
    CONFIG,
    DATA,
    METRICS,
    add_curves_and_images,
    metrics,
    table,
    write_run,
)

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(write_run, tmp_path)


VERIFICATION = {
    **{"classes": 9, "groups": 9, "same_pairs": 80, "other_pairs": 2000},
    **{"area": 0.9, "area_half_width": 0.05},
    "rates": [
        {
            **{"false_accepts": 0.01, "true_accepts": 0.4, "true_accepts_half_width": 0.1},
            **{"threshold": 0.625, "threshold_half_width": 0.03},
        },
        {
            **{"false_accepts": 0.0001, "true_accepts": None, "true_accepts_half_width": None},
            **{"threshold": None, "threshold_half_width": None, "needs": 100_000},
        },
    ],
}


def test_verification_is_told_in_words(make: Make, tmp_path: Path) -> None:
    one = load_run(make("A", 0, 0.4, verification=VERIFICATION))
    text = compare([one]).markdown()
    assert "an area under the ROC of 90.00 ± 5.00 %" in text
    shown = [list(row.values()) for row in table(text, 1)]
    assert shown == [["1 %", "0.625 ± 0.030", "40.00 ± 10.00"], ["0.01 %", "–", "–"]]
    assert "the test has 2,000 pairs of two classes, and needs 100,000" in text
    other = load_run(make("A", 1, 0.4, verification=VERIFICATION | {"area": 0.8}))
    write_html([one, other, load_run(make("B", 0, 0.5))], tmp_path / "page.html")
    text = compare([one, other, load_run(tmp_path / "B-0")]).markdown()
    [row] = (row for row in table(text, 1) if "area under the ROC (%)" in row)
    assert row["method"] == "A" and [*row.values()][2:] == ["40.00 ± 0.00", "–"]
    assert row["area under the ROC (%)"].startswith("85.00 ± ")


def test_the_start_of_the_baseline_is_a_row(make: Make) -> None:
    """It is not compared as a method."""
    start = {seed: {"before_training": metrics(recall)} for seed, recall in ((0, 0.6), (1, 0.7))}
    runs = [
        load_run(make(label, seed, recall, **start[seed]))
        for label, recall in (("A", 0.4), ("B", 0.5))
        for seed in (0, 1)
    ]
    found = compare([*runs, load_run(make("C", 0, 0.4, before_training=metrics(0.1)))])
    rows = table(found.markdown())
    assert [row["method"] for row in rows] == ["A", "B", "C", "before training"]
    assert rows[-1]["Recall@1 (%)"].startswith("65.00 ± ") and rows[-1]["seeds"] == "2"
    assert rows[1]["Recall@1 (%)"].startswith("50.00")
    assert "before training" not in found.blocks[0]
    below = table(found.markdown(), 1)
    assert [row["method"] for row in below] == ["B", "before training"]
    assert below[1]["Recall@1"].startswith("+25.00")
    unknown = [load_run(make("D", 0, 0.4)), load_run(make("E", 0, 0.4, before_training=None))]
    assert [row["method"] for row in table(compare(unknown).markdown())] == ["D", "E"]


def test_a_table_in_its_two_forms() -> None:
    shown = Table(["a|b", "kind", "%"], [["x", "long one", "9.5"], ["<y>", "z", "10.25"]], names=2)
    assert shown.markdown().splitlines() == [
        *(r"| a\|b | kind | % |", "| :-- | :-- | --: |"),
        *("| x | long one | 9.5 |", "| <y> | z | 10.25 |"),
    ]
    assert shown.terminal(width=20).splitlines() == [
        *("a|b  kind          %", "x    long one    9.5", "<y>  z         10.25")
    ]
    wide = Table(["", "one (%)", "two (%)", "n"], [["a", "1", "22.5", "3"]])
    assert wide.terminal(width=12).splitlines() == [
        *("   one   two", "   (%)   (%)", "a    1  22.5", ""),
        *("   n", "a  3"),
    ]


def test_groups_seeds_by_label(make: Make) -> None:
    given = [("base", 0, 0.40), ("horde", 0, 0.50), ("base", 1, 0.42)]
    runs = [load_run(make(*one, never_acted=one == given[1])) for one in given]
    base, horde = table(compare(runs).markdown())
    found = base["method"], base["Recall@1 (%)"], base["seeds"], horde["seeds"]
    assert found == ("base", "41.00 ± 12.71", "2", "1")
    assert [horde[f"{name} (%)"] for name in METRICS.values()] == [
        f"{value:.2f}" for value in (50, 51, 52, 53, 54, 55)
    ]
    text = compare(runs).markdown()
    assert "glyphs: unseen test classes (1,075 classes, 12,900 images) after 1,500 steps" in text
    assert text.count("| :--") == 1, "one shared seed has no difference table"
    assert text.count("the loss was 0 in every step") == 1
    assert f"{runs[1].folder}: the loss was 0" in text
    with pytest.raises(ValueError, match=r"no finished run has the label 'x'; .*\['base', 'horde'"):
        compare(runs, "x")


def test_differences_pair_the_same_seeds_only(make: Make) -> None:
    recalls = {"base": {0: 0.40, 1: 0.50, 2: 0.90}, "horde": {3: 0.10, 1: 0.53, 0: 0.42}}
    folders = [make(label, s, r) for label, seeds in recalls.items() for s, r in seeds.items()]
    (row,) = table(compare([load_run(f) for f in folders]).markdown(), 1)
    # Seeds 0 and 1: +2 and +3 points; 12.706205 * 0.5.
    assert (row["method"], row["Recall@1"], row["pairs"]) == ("horde", "+2.50 ± 6.35", "2")


def test_rows_and_columns_are_what_was_measured(make: Make) -> None:
    run = load_run(make("odd", 0, 0.4, metrics={"recall_at_1000": 0.9, "NMI": 0.5}))
    (row,) = table(compare([run]).markdown())
    assert list(row) == ["method", "Recall@1000 (%)", "NMI (%)", "seeds"]
    base = load_run(make("base", 0, 0.4))
    outputs = {"descriptor": metrics(0.6), "parts": {}, "order_2": metrics(0.3)}
    text = compare([base, load_run(make("horde", 0, 0.5, outputs=outputs))]).markdown()
    names = ["base", "horde", "horde †", "horde, order 2"]
    assert [row["method"] for row in table(text)] == names
    assert table(text)[2]["Recall@1 (%)"] == "60.00"
    assert "† the test-time descriptor" in text
    assert "†" not in compare([base]).markdown()


def test_a_metric_of_one_method_is_no_hindrance(make: Make) -> None:
    vem = load_run(make("vem", 0, 0.5, metrics={**metrics(0.5), "variance_correlation": 0.8}))
    base = load_run(make("base", 0, 0.4))
    for runs in ([vem, base], [base, vem]):
        assert {row["method"] for row in table(compare(runs).markdown())} == {"vem", "base"}
    other = load_run(make("other", 0, 0.4, metrics={**metrics(0.4), "NMI": 0.5}))
    with pytest.raises(ValueError, match="test both with the same evaluation settings"):
        compare([base, other])


def test_the_result_in_a_sentence(make: Make) -> None:
    recalls = {"base": (0.40, 0.50, 0.90), "horde": (0.42, 0.53, 0.91), "better": (0.5, 0.6, 1.0)}
    base, horde, better = (
        [load_run(make(label, seed, recall)) for seed, recall in enumerate(of)]
        for label, of in recalls.items()
    )

    def result(*runs: Run) -> str:
        return str(compare(runs).blocks[0]).removeprefix("Recall@1 ")

    # +2, +3 and +1 points: s = 1, t(0.975, 2) = 4.302653; the half-width 2.48 is not below 2.
    told = "compared with base: +2.00 ± 2.48 points for horde (3 pairs of seeds: undecided)."
    assert result(*base, *horde) == told
    assert result(base[0], *horde).endswith(": +2.00 points for horde (one seed: undecided).")
    assert result(horde[0]) == "of horde: 42.00 %."
    assert "+10.00 ± 0.00 points for better (3 pairs of seeds: higher)" in result(*base, *better)
    assert "-10.00 ± 0.00 points for base (3 pairs of seeds: lower)" in result(*better, *base)


def test_a_run_that_diverged_is_counted_and_named(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [make("wild", 0, 0, **DIVERGED), make("base", 0, 0.4), make("base", 1, 0.4)]
    folders += [make("horde", 0, 0.5), make("horde", 1, 0, **DIVERGED)]
    for folder in folders:
        add_curves_and_images(folder)
    assert main([*map(str, folders), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert [(row["method"], row["seeds"], row["Recall@1 (%)"]) for row in table(text)] == [
        ("wild", "0 (diverged: seed 0)", "–"),
        ("base", "2", "40.00 ± 0.00"),
        ("horde", "1 (diverged: seed 1)", "50.00"),
    ]
    assert f"diverged: {folders[4]}, seed 1: the loss is nan" in text
    assert f"diverged: {folders[0]}, seed 0: the loss is nan" in text
    assert "0 (diverged: seed 0)" in (folders[0] / "comparison.html").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (DIVERGED | {"label": "base", "seed": 0}, "label 'base' already has seed 0 in .*base-0"),
        ({"status": "stopped"}, r"horde-0: the run is 'stopped', not finished.*--resume"),
        ({"data": DATA | {"fold": "1 of 4"}}, "data fold is '1 of 4', but None in .*base-0"),
        ({"data": DATA | {"fingerprint": "xyz"}}, "fingerprint is 'xyz', but 'abc' in .*base-0"),
        ({"metrics": {"recall_at_10": 0.5}}, r"measured \['recall_at_10'\], but .*base-0"),
        ({"label": "base", "seed": 1, "steps": 7}, "7 steps, but 1500 in .*base-0"),
        ({"label": "base", "seed": 1, "config": {"a": 1}}, "its a is not that of .*base-0"),
        (
            {"label": "base", "seed": 1, "weights": {"file": "x.pth", "sha256": "1"}},
            "its model.weights is not that of .*base-0",
        ),
    ],
)
def test_runs_that_cannot_be_compared(
    make: Make, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    folders = [make("base", 0, 0.4), make("horde", 0, 0.5, **changes)]
    assert main([str(folder) for folder in folders]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err)
    assert not list(folders[0].parent.rglob("*.html"))


def test_runs_that_all_diverged_cannot_be_compared(make: Make) -> None:
    with pytest.raises(ValueError, match=r"the run is diverged \(the loss is nan\), not"):
        compare([load_run(make("wild", 0, 0, **DIVERGED))])


def test_runs_of_a_label_may_differ_in_what_changes_no_result(make: Make) -> None:
    """And in the files of a folder of weights, which seeds use in turn."""
    folders = []
    for seed in (0, 1):
        config = CONFIG | {"output": f"runs/{seed}", "seed": seed, "checkpoint_every": 10 + seed}
        config |= {"model": {"weights": "weights"}, "data": {"root": f"data{seed}"}}
        weights = {"file": f"{seed}.safetensors", "sha256": f"{seed}"}
        folders.append(make("base", seed, 0.4 + seed / 10, config=config, weights=weights))
    [row] = table(compare([load_run(folder) for folder in folders]).markdown())
    assert row["seeds"] == "2" and row["Recall@1 (%)"].startswith("45.00 ±")


@pytest.mark.parametrize(
    ("label", "first"), [("before training", True), ("horde †", True), ("horde, order 2", False)]
)
def test_a_label_that_is_another_row_is_refused(
    make: Make, capsys: pytest.CaptureFixture[str], label: str, first: bool
) -> None:
    outputs = {"descriptor": metrics(0.6), "order_2": metrics(0.3)}
    folders = [make("horde", 0, 0.5, outputs=outputs, before_training=metrics(0.1))]
    folders.insert(not first, make(label, 0, 0.7))
    assert main([*map(str, folders), "--baseline=horde"]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert captured.out == "" and f"the label '{label}' is also the name of another row" in line
    assert f"{label}-0: " in line
    assert not [*folders[0].parent.rglob("*.html")]


def attributes(page: str, tag: str, name: str) -> list[str]:
    return [html.unescape(value) for value in re.findall(rf'<{tag}\b[^>]*? {name}="([^"]*)"', page)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    parent = tmp_path_factory.mktemp("runs")
    runs = [("base", 0, 0.4), ("base", 1, 0.4), ("ho<r>de", 0, 0.5)]
    folders = [write_run(parent, *run) for run in runs]
    for folder in folders:
        add_curves_and_images(folder)
    with redirect_stdout(io.StringIO()) as printed:
        assert main([str(folder) for folder in folders]) == 0
    path = folders[0] / "comparison.html"
    lines = printed.getvalue().strip().splitlines()
    assert lines[0].startswith("glyphs")
    assert lines[-1] == f"Report: {path}"
    return path.read_text(encoding="utf-8")


def test_html_loads_nothing(page: str) -> None:
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    for outside in ("://", "<script", "<link"):
        assert outside not in without_namespaces
    sources = attributes(page, "img", "src")
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<r>" not in page, "labels are escaped"
    assert "<B>" not in page, "image names are escaped"
    assert "<b>not html</b>" not in page
    assert '<th scope="row">ho&lt;r&gt;de</th><td>50.00</td>' in page


def test_html_holds_curves_tables_and_provenance(page: str) -> None:
    assert attributes(page, "svg", "aria-label") == [
        "Recall@1 (%) on training classes",
        "Recall@1 (%) on new classes",
        "Training loss",
    ]
    for name in ("base", "ho&lt;r&gt;de", "training step"):
        assert page.count(f">{name}</text>") == 3
    for title in attributes(page, "svg", "aria-label"):
        assert page.count(f">{title}</text>") == 1
    lights = page.count("stroke-opacity: 0.3")
    assert lights == 6, "two seeds: a light line each for loss, seen and unseen"
    assert "no setting may be chosen by test classes" in page
    assert page.count("commit: 0123abc\ndirty: true") == 3
    assert "lr: 0.003" in page
    assert page.count("<details>") == 3 + 4, "runs, and the best and the worst of each label"


def test_report_of_one_run_lies_in_its_folder(make: Make) -> None:
    folder = make("base", 0, 0.4, data=DATA | {"split": "validation"})
    assert main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "unseen validation classes" in page
    assert "No curves were recorded" in page and "No neighbours" in page
    elsewhere = folder.parent / "new" / "folder" / "elsewhere.html"
    assert main([str(folder), "--output", str(elsewhere)]) == 0
    assert elsewhere.read_bytes() == (folder / "report.html").read_bytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("retrieval.npz", {"query_groups": np.array(["best"])}),
        ("retrieval.npz", b"no zip"),
        ("retrieval.npz", b""),
        ("records/training.csv", b"~iteration~,loss\n1,x\n"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    make: Make, capsys: pytest.CaptureFixture[str], name: str, content: bytes | dict[str, Any]
) -> None:
    folder = make("base", 0, 0.4)
    add_curves_and_images(folder)
    if not content:  # another one than the run has written
        write_json(folder / "run.json", load_run(folder).info | {"files": digests(folder)})
        np.savez(folder / name, query_groups=[])
    elif isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        np.savez(folder / name, **content)
    assert main([str(folder)]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith(f"report: {folder / name}: ")
    assert "run that training again" in line or "delete it" in line
    assert captured.out == ""
    assert not (folder / "report.html").exists()
