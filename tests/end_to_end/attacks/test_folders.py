"""Damaged and hostile run folders: reports, tables and exports of them are right, or end with one line.

Damaged: bits flipped, files cut off, garbled, emptied, gone, or a pipe, a folder or a device in their place.
Hostile: the record has other values and the SHA-256 that belongs to them.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import report, tables
from benchmarks.building import resolved
from benchmarks.export import __main__ as export
from benchmarks.records import digests, load_run, write_json
from benchmarks.records.files import signed
from benchmarks.settings import dump, merge, parse, read_yaml, recipe_files
from tests.benchmarks.export.conftest import pictures, plain, trained  # noqa: F401
from tests.benchmarks.reporting.made_runs import add_curves_and_images, write_run
from tests.end_to_end.attacks.test_dataset_files import damaged, is_shown
from tests.end_to_end.attacks.test_settings import Watch, drawn_settings, watch  # noqa: F401

VALUES: tuple[Any, ...] = (
    *(None, 0, -1, 10**400, 1e308, float("nan"), True, [], [[]], {}, {"": 1}),
    *("", "x" * 999, "\ud800", "a\x1b[2J\nb\u202e", "<script>", "../../x"),
)


def swap_value(draw: random.Random, content: bytes) -> bytes:
    """Replace a value anywhere in JSON; empty any other content."""
    try:
        record = json.loads(content)
    except ValueError:
        return b""
    place: Any = record
    while True:
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], (dict, list)) and place[key] and draw.random() < 0.6):
            break
        place = place[key]
    place[key] = draw.choice(VALUES)
    return json.dumps(record).encode()


def hostile(draw: random.Random, content: bytes) -> bytes:
    """A record of other values, in good order."""
    return json.dumps(signed(json.loads(swap_value(draw, content)))).encode()


IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def damage(draw: random.Random, whole: Path, place: Path) -> str:
    """Make a copy of a folder with one file damaged; what was done."""
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    files = [file for file in files if file.name != ".lock"]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(whole, place)
    file, kind = draw.choice([*files, Path("run.json")]), draw.random()
    if kind < 0.2:
        what = draw.choice(list(IN_ITS_PLACE))
        (place / file).unlink()
        IN_ITS_PLACE[what](place / file)
        return f"{what} for {file}"
    change = (
        hostile if file.name == "run.json" and kind < 0.5 else draw.choice((damaged, swap_value))
    )
    (place / file).write_bytes(change(draw, (whole / file).read_bytes()))
    return f"{change.__name__} {file}"


def check_said(status: int, captured: Any, what: str, place: Path | str) -> None:
    """All is well, or one line names the place; nothing steers the terminal."""
    errors = captured.err.splitlines()
    assert status in (0, 2), what
    assert len(errors) == (status != 0), (what, errors)
    assert all(str(place) in line for line in errors), (what, errors)
    assert all(map(is_shown, captured.out.split("\n"))), (what, captured.out)
    assert all(map(is_shown, errors)), (what, errors)


def sealed(folder: Path) -> Path:
    """A run whose record has the digests of its files, without those that nobody reads here."""
    for events in folder.glob("records/*events*"):
        events.unlink()
    write_json(folder / "run.json", load_run(folder).info | {"files": digests(folder)})
    return folder


DRAW = st.randoms(use_true_random=False)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = write_run(tmp_path, "base", 0, 0.4)
    add_curves_and_images(folder)
    return sealed(folder)


@pytest.fixture
def printed(whole: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The report of a run that is whole."""
    assert report.main([str(whole)]) == 0
    (whole / "report.html").unlink()
    return capsys.readouterr().out.partition("Report: ")[0]


@pytest.mark.filterwarnings("ignore")
@given(draw=DRAW)
def test_reports_of_damaged_folders(
    whole: Path, printed: str, capsys: pytest.CaptureFixture[str], draw: random.Random
) -> None:
    """A page, or one line that names the file."""
    spoilt = whole.with_name("damaged")
    what = damage(draw, whole, spoilt)
    status = report.main([str(spoilt)])
    captured = capsys.readouterr()
    check_said(status, captured, what, spoilt)
    if status == 0 and not what.startswith("hostile"):
        assert captured.out.startswith(printed), what
    assert status or "<script>" not in (spoilt / "report.html").read_text(), what


TABLE = {
    "shared": {"losses": [{"loss": {"class_path": "pml_regularizers.BinomialDevianceLoss"}}]},
    "trainings": {"base": {"label": "base", "cells": {"embedding": {"recall_at_1": 49.5}}}},
    "figure": {"panels": {"a": {"lines": {"base": "base"}, "metrics": ["seen_recall_at_1"]}}},
}


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run of a table's one row."""
    recipe = tmp_path / "recipes" / "toy" / "table.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(dump(TABLE))
    monkeypatch.setattr(recipe_files, "RECIPES", recipe.parents[1])
    config = resolved(parse(["--recipe=toy/table/base"]).config)
    about = {"recipe": "toy/table/base", "protocol": "paper", "config": config}
    folder = write_run(tmp_path, "base", 0, 0.4321, **about)
    add_curves_and_images(folder)
    return sealed(folder)


@pytest.mark.filterwarnings("ignore")
@given(draw=DRAW)
def test_tables_of_damaged_folders(
    row: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], draw: random.Random
) -> None:
    """The row as it is, or a note or line that names the file."""
    figure, spoilt = tmp_path / "figure.svg", tmp_path / "runs" / "damaged"
    what = damage(draw, row, spoilt)
    figure.unlink(missing_ok=True)
    status = tables.main(["toy/table", f"--runs={spoilt.parent}", f"--figure={figure}"])
    captured = capsys.readouterr()
    check_said(status, captured, what, spoilt)
    assert figure.exists() == (status == 0), what
    left_out = f"leftout:{spoilt}" in "".join(captured.out.split())  # lines are folded
    gone = what in ("nothing for run.json", "a folder for run.json")  # it is no run
    if status == 0 and not what.startswith("hostile") and not gone:
        assert left_out != ("43.21" in captured.out), (what, captured.out)


@pytest.fixture
def exported(plain: Path, tmp_path: Path) -> tuple[Path, bytes]:  # noqa: F811
    """A run, and the weights that its export has."""
    whole, output = tmp_path / "whole", tmp_path / "out"
    shutil.copytree(plain, whole, ignore=shutil.ignore_patterns("records", "report.html"))
    sealed(whole)
    assert export.main([str(whole), f"--output={output}", "--formats=timm"]) == 0
    weights = (output / "model.safetensors").read_bytes()
    shutil.rmtree(output)
    return whole, weights


@pytest.mark.filterwarnings("ignore")
@given(draw=DRAW)
def test_exports_of_damaged_folders(
    exported: tuple[Path, bytes],
    watch: Watch,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    draw: random.Random,
) -> None:
    """The network as it is, or one line and nothing; what settings name is not run."""
    (whole, expected), spoilt, output = exported, tmp_path / "damaged", tmp_path / "out"
    if draw.random() < 0.6:
        what = damage(draw, whole, spoilt)
    else:
        what = "hostile settings in a whole folder"
        shutil.rmtree(spoilt, ignore_errors=True)
        shutil.copytree(whole, spoilt)
        base = read_yaml(whole / "config.yaml")
        (spoilt / "config.yaml").write_text(json.dumps(merge(base, drawn_settings(draw, base))))
        sealed(spoilt)
    capsys.readouterr()
    with watch.on(tmp_path):
        status = export.main([str(spoilt), f"--output={output}", "--formats=timm"])
    check_said(status, capsys.readouterr(), what, spoilt)
    assert output.exists() == (status == 0), what
    if status == 0:
        assert (output / "model.safetensors").read_bytes() == expected, what
        shutil.rmtree(output)
