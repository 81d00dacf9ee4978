"""Damaged and hostile run folders: reports, tables and exports of them are right, or end with one line.

Damaged: bits flipped, files cut off, garbled, emptied, gone, or a pipe, a folder or a device in their place.
Hostile: the record has other values and the SHA-256 that belongs to them.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, tables
from benchmarks.building import parse_resolved
from benchmarks.export import __main__ as export
from benchmarks.records import digests, load_run, write_json
from benchmarks.records.files import signed
from benchmarks.settings import dump, merge, read_yaml, recipe_files
from tests.benchmarks.export.test_export import pictures, plain, trained  # noqa: F401
from tests.benchmarks.reporting.test_figures import save_features
from tests.benchmarks.reporting.test_report import add_curves_and_images, write_run
from tests.end_to_end.attacks.test_dataset_files import is_shown
from tests.end_to_end.attacks.test_settings import Watch, drawn_settings

VALUES: tuple[Any, ...] = (
    None,
    0,
    -1,
    10**400,
    1e308,
    float("nan"),
    "",
    "x" * 999,
    "\ud800",
    [],
    [[]],
    {},
    {"": 1},
    True,
    "a\x1b[2J\nb\u202e",
    "<script>",
    "../../x",
)


def flip(draw: random.Random, content: bytes) -> bytes:
    place = draw.randrange(max(1, 8 * len(content)))
    return bytes(byte ^ (1 << place % 8) * (i == place // 8) for i, byte in enumerate(content))


def cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def garble(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] + draw.randbytes(9) + content[at + 9 :]


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


DAMAGE: tuple[Callable[[random.Random, bytes], bytes], ...] = (flip, cut, garble, swap_value)
IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def damages(seed: int, whole: Path, damaged: Path, count: int) -> Iterator[str]:
    """Damage a copy of a folder in one file, again and again; what was done."""
    draw = random.Random(seed)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    files = [file for file in files if file.name != ".lock"]
    for _ in range(count):
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        file, kind = draw.choice([*files, Path("run.json")]), draw.random()
        if kind < 0.2:
            what = draw.choice(list(IN_ITS_PLACE))
            (damaged / file).unlink()
            IN_ITS_PLACE[what](damaged / file)
            yield f"{what} for {file}"
        else:
            damage = hostile if file.name == "run.json" and kind < 0.5 else draw.choice(DAMAGE)
            (damaged / file).write_bytes(damage(draw, (whole / file).read_bytes()))
            yield f"{damage.__name__} {file}"


def check_said(status: int, captured: Any, what: str, place: Path | str) -> None:
    """All is well, or one line names the place; nothing steers the terminal."""
    errors = captured.err.splitlines()
    assert status in (0, 2), what
    assert len(errors) == (status != 0), (what, errors)
    assert all(str(place) in line for line in errors), (what, errors)
    assert all(map(is_shown, captured.out.split("\n"))), (what, captured.out)
    assert all(map(is_shown, errors)), (what, errors)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = write_run(tmp_path, "base", 0, 0.4)
    add_curves_and_images(folder)
    save_features(folder)
    for events in folder.glob("records/*events*"):
        events.unlink()  # nobody reads them here
    write_json(folder / "run.json", load_run(folder).info | {"files": digests(folder)})
    return folder


@pytest.mark.filterwarnings("ignore")
def test_reports_of_damaged_folders(
    whole: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page, or one line that names the file."""
    damaged, attacks = tmp_path / "damaged", request.config.getoption("--attacks")
    assert report.main([str(whole)]) == 0
    expected = capsys.readouterr().out.partition("Report: ")[0]
    (whole / "report.html").unlink()
    for what in damages(0, whole, damaged, attacks):
        status = report.main([str(damaged)])
        captured = capsys.readouterr()
        check_said(status, captured, what, damaged)
        if status == 0 and not what.startswith("hostile"):
            assert captured.out.startswith(expected), what
        page = damaged / "report.html"
        assert "<script>" not in (page.read_text() if status == 0 else ""), what


TABLE = {
    "shared": {"losses": [{"loss": {"class_path": "pml_regularizers.BinomialDevianceLoss"}}]},
    "trainings": {"base": {"label": "base", "cells": {"embedding": {"recall_at_1": 49.5}}}},
    "figure": {
        "panels": {
            "a": {"lines": {"base": "base"}, "metrics": ["seen_recall_at_1"]},
            "b": {"picture": "retrieval", "row": "base"},
        }
    },
}


@pytest.mark.filterwarnings("ignore")
def test_tables_of_damaged_folders(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The row as it is, or a note or line that names the file."""
    recipe, runs = tmp_path / "recipes" / "toy" / "table.yaml", tmp_path / "runs"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(dump(TABLE))
    monkeypatch.setattr(recipe_files, "RECIPES", recipe.parents[1])
    config = parse_resolved(["--recipe=toy/table/base"]).config
    about = {"recipe": "toy/table/base", "protocol": "paper", "config": config}
    whole = write_run(tmp_path, "base", 0, 0.4321, **about)
    add_curves_and_images(whole)
    for events in whole.glob("records/*events*"):
        events.unlink()
    write_json(whole / "run.json", load_run(whole).info | {"files": digests(whole)})
    figure = tmp_path / "figure.svg"
    command = ["toy/table", f"--runs={runs}", f"--figure={figure}"]
    attacks = request.config.getoption("--attacks")
    for what in damages(1, whole, runs / "damaged", attacks):
        figure.unlink(missing_ok=True)
        status = tables.main(command)
        captured = capsys.readouterr()
        check_said(status, captured, what, runs / "damaged")
        assert figure.exists() == (status == 0), what
        left_out = f"left out: {runs / 'damaged'}" in captured.out
        gone = what in ("nothing for run.json", "a folder for run.json")  # it is no run
        if status == 0 and not what.startswith("hostile") and not gone:
            assert left_out != ("43.21" in captured.out), (what, captured.out)


@pytest.mark.filterwarnings("ignore")
def test_exports_of_damaged_folders(
    plain: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The network as it is, or one line and nothing; what settings name is not run."""
    whole, damaged, output = tmp_path / "whole", tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(plain, whole)
    for name in "records", "report.html":
        shutil.rmtree(whole / name, ignore_errors=True)
    base = read_yaml(whole / "config.yaml")
    write_json(whole / "run.json", load_run(whole).info | {"files": digests(whole)})
    command = [str(damaged), f"--output={output}", "--formats=timm"]
    assert export.main([str(whole), *command[1:]]) == 0
    expected, watch = (output / "model.safetensors").read_bytes(), Watch()
    shutil.rmtree(output)
    attacks = request.config.getoption("--attacks")
    for seed, what in enumerate(damages(2, whole, damaged, attacks)):
        if (draw := random.Random(seed)).random() < 0.4:  # hostile settings in a whole folder
            what = f"settings of seed {seed}"
            shutil.rmtree(damaged)
            shutil.copytree(whole, damaged)
            settings = merge(base, drawn_settings(draw, base))
            (damaged / "config.yaml").write_text(json.dumps(settings))
            record = load_run(whole).info
            write_json(damaged / "run.json", record | {"files": digests(damaged)})
        capsys.readouterr()
        with watch.on(tmp_path):
            status = export.main(command)
        check_said(status, capsys.readouterr(), what, damaged)
        assert output.exists() == (status == 0), what
        if status == 0:
            assert (output / "model.safetensors").read_bytes() == expected, what
            shutil.rmtree(output)
