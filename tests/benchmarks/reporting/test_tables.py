"""Tables: the paper's numbers beside ours, by hand; runs that may not be averaged; clear errors."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.settings.command import parse
from benchmarks.tables import main
from tests.benchmarks.made import DIVERGED, LOSSES, use_recipes, write_record
from tests.benchmarks.reporting.made_runs import table

CONTENT: dict[str, Any] = {
    "title": "Toy & Table_1",
    "shared": {
        "losses": LOSSES,
        "data": {"dataset": "glyphs", "image_size": 32},
        "optimization": {"steps": 30},
        "evaluation": {"recall_at": [1, 2]},
    },
    "trainings": {
        "base": {"label": "base", "cells": {"embedding": {"recall_at_1": 49.5, "NMI": 60}}},
        "horde": {
            "label": "HORDE",
            "cells": {
                "embedding": {"recall_at_1": 50.0},
                "order_2": {"recall_at_1": 48.25},
                "descriptor": {"recall_at_1": 52.0, "recall_at_2": 62.0},
            },
        },
        "jrd": {
            "label": "JRD",
            "cells": {"parts": {"recall_at_1": 50.6, "h_divergence": 92.75}},
            "half_widths": {"parts": {"recall_at_1": 1.3, "h_divergence": 0.3}},
        },
        "birds": {
            "label": "base",
            "data": {"dataset": "cub"},
            "cells": {"embedding": {"recall_at_10": 91.0}},
        },
    },
    "quoted": [
        {"row": "Angular [29]", "dataset": "glyphs", "backbone": "GoogLeNet", "recall_at_1": 47.0}
    ],
}
DATA = {
    **{"name": "glyphs", "split": "test", "fingerprint": "abcdefghij", "image_size": 32},
    **{"fold": None, "test_classes": 5, "test_images": 60, "view": "32 px"},
}


@pytest.fixture(autouse=True)
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One paper with two tables, in an empty working folder."""
    remarks = [{"facts": {"orders": 3}, "of": "HORDE", "text": "its orders are ours"}]
    again = {"again": {"same_as": "toy/table1/base", "label": "again"}}
    again["own"] = {"label": "own", **CONTENT["shared"]}
    tables = {"toy/table1": CONTENT, "toy/table2": {"trainings": again}}
    use_recipes(tmp_path, monkeypatch, {"toy": {"differs": remarks}} | tables)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def make(
    row: str, seed: int, recall: float, /, *options: str, folder: str = "", **changes: Any
) -> Path:
    """A finished run below runs/; `options` are as on the command line, `changes` of its run.json."""
    recipe = f"toy/table1/{row}"
    path = Path("runs") / (folder or f"{row}{seed}")
    command = parse(["--recipe", recipe, "--seed", str(seed), *options])
    info = {
        **{"recipe": recipe, "label": path.name, "seed": seed, "config": command.resolved().config},
        **{"protocol": command.experiment.protocol, "data": DATA, "commit": "0123abc"},
        **{"finished": f"2026-01-01T00:00:0{seed}", "oracle": None, "half_widths": {}},
        "metrics": {"recall_at_1": recall, "NMI": recall + 0.1},
    }
    return write_record(path, **info | changes)


Show = Callable[..., str]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    def run(*arguments: str) -> str:
        assert main([*(arguments or ["toy/table1"]), "--markdown"]) == 0
        return capsys.readouterr().out

    return run


def lines(text: str) -> list[tuple[str, ...]]:
    """The first columns and Recall@1 of the first table."""
    return [(row["method"], row["numbers"], row.get("Recall@1 (%)", "")) for row in table(text)]


def test_without_runs_the_table_is_the_papers(show, capsys):
    text = show()
    assert lines(text) == [
        ("Angular [29]", "quoted", "47.0"),
        ("base", "paper", "49.5"),
        ("HORDE", "paper", "50.0"),
        ("HORDE, order 2", "paper", "48.25"),
        ("HORDE †", "paper", "52.0"),
        ("JRD, parts", "paper", "50.6 ± 1.3"),
    ]
    first, *_ = table(text)
    measured = ["Recall@1 (%)", "NMI (%)", "Recall@2 (%)", "H-divergence (%)"]
    assert list(first) == ["method", "numbers", *measured, "trunk"]
    assert [list(row.values()) for row in table(text, 1)] == [["base", "paper", "91.0"]]
    assert "* 0 of 4 rows have runs of" in text
    assert "* horde: its orders are ours\n" in text
    assert main(["toy/table1"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_mean_interval_and_difference_by_hand(show):
    for seed, recall in enumerate((0.48, 0.50, 0.52)):
        make("base", seed, recall)
    text = show()
    _, ours, difference = table(text)[1:4]
    # 4.302653 * 0.02 / sqrt(3).
    assert (ours["Recall@1 (%)"], ours["NMI (%)"]) == ("50.00 ± 4.97", "60.00 ± 4.97")
    assert (difference["Recall@1 (%)"], difference["NMI (%)"]) == ("+0.50", "+0.00")
    shown = ("runs", "trunk", "crop", "dimension")
    assert [ours[key] for key in shown] == ["3", "test_resnet", "32", "64"]
    assert "* 1 of 4 rows have runs of" in text
    again = table(show("toy/table2"))  # a row of the same training, and one without runs
    assert [(row["NMI (%)"], row["runs"]) for row in again] == [("60.00 ± 4.97", "3"), ("", "0")]


def test_every_output_stands_beside_its_own_cells(show):
    outputs = {"order_2": {"recall_at_1": 0.4}, "descriptor": {"recall_at_1": 0.6}}
    make("horde", 0, 0.5, outputs=outputs)
    text = show()
    assert lines(text)[2:11] == [
        *(("HORDE", "paper", "50.0"), ("", "ours", "50.00"), ("", "difference", "+0.00")),
        ("HORDE, order 2", "paper", "48.25"),
        *(("", "ours", "40.00"), ("", "difference", "-8.25")),
        *(("HORDE †", "paper", "52.0"), ("", "ours", "60.00"), ("", "difference", "+8.00")),
    ]


def test_a_single_run_over_parts_has_their_interval(show):
    halves = {"half_widths": {"parts": {"recall_at_1": 0.011}}}
    make("jrd", 0, 0.7, outputs={"parts": {"recall_at_1": 0.5}}, **halves)
    assert lines(show())[-2] == ("", "ours, ± over parts", "50.00 ± 1.10")
    make("jrd", 1, 0.7, outputs={"parts": {"recall_at_1": 0.52}}, **halves)
    # Two seeds: 12.706205 times half their distance.
    assert lines(show())[-2] == ("", "ours", "51.00 ± 12.71")


def test_oracle_numbers_have_a_column(show):
    make("base", 0, 0.48, "--evaluation.oracle=true", oracle={"step": 20, "recall_at_1": 0.55})
    paper, ours, difference = table(show())[1:4]
    column = "oracle (test-selected) Recall@1 (%)"
    assert [row[column] for row in (paper, ours, difference)] == ["", "55.00", ""]
    assert (ours["Recall@1 (%)"], difference["Recall@1 (%)"]) == ("48.00", "-1.50")
    make("base", 1, 0.48)
    assert "oracle" not in show(), "one of two seeds has none"


def test_weights_that_seeds_take_in_turn_are_averaged(show, tmp_path):
    (trunks := tmp_path / "trunks").mkdir()
    for seed, recall in enumerate((0.48, 0.40)):
        (trunks / f"{seed}.safetensors").touch()
        weights = {"file": f"{seed}.safetensors", "sha256": f"{seed}"}
        make("base", seed, recall, f"--model.weights={trunks}", weights=weights)
    assert lines(show())[2][2].startswith("44.00 ± ")


def test_what_is_no_test_of_these_images_is_left_out(show):
    make("base", 0, 0.48, finished="2026-02-01")  # the newest one says which images and weights
    make("base", 1, 0.1, folder="odd", status="stopped")
    make("base", 1, 0.1, folder="others", weights={"file": "w.pth", "sha256": "9876543210"})
    make("base", 1, 0.1, folder="images", data=DATA | {"fingerprint": "klmnopqrst"})
    make("base", 1, 0.1, "--protocol=fair", folder="fair")
    make("base", 1, 0.1, "--optimization.steps=10", "--precision=float64", folder="short")
    path = make("base", 2, 0.1, folder="old") / "run.json"
    path.write_text(path.read_text().replace('"seed"', '"seeds"'))
    text = show()
    assert lines(text)[2] == ("", "ours", "48.00")
    for told in (
        "odd is stopped, not finished",
        "others started from other weights",
        "images: data fingerprint is 'klmnopqrst'",
        "fair was run with protocol 'fair', not 'paper'",
        "short was run with optimization.steps 10, not 30\n",
        "old/run.json: is damaged or of an earlier version (its sha256",
    ):
        assert f"* left out: runs/{told}" in text


def test_a_run_that_diverged_is_counted_and_named(show):
    make("base", 0, 0.48)
    folder = make("base", 3, 0.1, finished=None, **DIVERGED)
    make("horde", 1, 0.1, finished=None, **DIVERGED)
    text = show()
    assert lines(text)[2] == ("", "ours", "48.00")
    ours = [row["runs"] for row in table(text) if row["numbers"].startswith("ours")]
    assert ours == ["1 (diverged: seed 3)", *["0 (diverged: seed 1)"] * 3]
    assert f"* diverged: {folder}, seed 3: the loss is nan" in text


def test_the_newest_run_of_a_seed_counts(show):
    """One that diverged is the oldest, and none counts twice that lies below two of the folders."""
    make("base", 0, 0.1, folder="lost", finished=None, **DIVERGED)
    make("base", 0, 0.48, finished="2026-01-02")
    for folder, day, recall in (("z/z", 1, 0.40), ("a", 3, 0.44)):
        make("base", 0, recall, folder=folder, finished=f"2026-01-0{day}")
    text = show("toy/table1", "--runs", "runs", "runs/z")
    assert (lines(text)[2], table(text)[2]["runs"]) == (("", "ours", "44.00"), "1")
    again = re.findall(r"left out: (.*), seed 0 was run again in (.*)", text)
    assert again == [
        *(("runs/lost", "runs/z/z"), ("runs/z/z", "runs/base0"), ("runs/base0", "runs/a"))
    ]


def test_mistakes(refused):
    for arguments, message in (
        (["toy/table9"], "recipe: no table 'toy/table9'; there are toy/table1, toy/table2"),
        (["toy/table1/none*"], "recipe: no 'none*' in toy/table1; there are base, horde"),
        (["toy/table1", "--runs", "nowhere"], "--runs: nowhere is not a folder"),
    ):
        assert refused(main, *arguments).startswith(message)
