"""The files of recipes are as described; an unknown one is one line; --list shows them all."""

import os
import re
from itertools import chain

import pytest

from benchmarks.run import main
from benchmarks.settings import recipe_files
from benchmarks.settings.recipe_files import RECIPES, Remark, read_entry, read_table, table_names
from benchmarks.settings.yaml_files import read_yaml

NUMBERS = {"cells", "half_widths"}
REMARKS = {"differs", "not_given", "printed", "published_code"}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_files, "RECIPES", tmp_path)
    (tmp_path / "a").mkdir()
    return tmp_path / "a" / "b.yaml"


def test_tables_and_remarks_are_as_described():
    """Other tests check what the trainings build."""
    for name in table_names():
        content = read_yaml(RECIPES / f"{name}.yaml")
        assert {"trainings"} <= content.keys() <= {"title", "shared", "trainings", "quoted"}
        for entry, own in zip(read_table(name).entries, content["trainings"].values(), strict=True):
            rows = chain(entry.cells.values(), entry.half_widths.values())
            assert {type(number) for row in rows for number in row.values()} <= {int, float}
            assert isinstance(entry.label, str) and isinstance(entry.settings["losses"], list)
            assert "same_as" not in (own or {}) or own.keys() <= {"label", "same_as"} | NUMBERS
        for line in content.get("quoted", []):
            assert isinstance(line["row"], str) and isinstance(line["dataset"], str)
    papers = sorted(RECIPES.glob("*.yaml"))
    assert len(papers) == 4
    for content in map(read_yaml, papers):
        assert content.keys() <= REMARKS
        for remark in (Remark(**line) for line in chain(*content.values())):
            assert isinstance(remark.text, str) and isinstance(remark.facts, dict)
            re.compile(remark.of)


def test_an_unknown_training_is_one_line(file, capsys):
    file.write_text("trainings: {x: {same_as: a/b/y}}")
    assert main(["--list"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "recipe: no 'y' in a/b; there are x" in line


def test_a_changed_file_is_read_again_whatever_its_time(file):
    """Two changes may come within one tick of a file system's clock."""
    for label in "XY":
        file.write_text(f"trainings: {{x: {{label: {label}}}}}")
        os.utime(file, ns=(0, 0))
        assert read_entry("a/b/x").label == label


def test_a_row_of_another_training(file):
    """It has that training's settings, under its own label and without its numbers."""
    file.write_text(
        "shared: {seed: 1}\ntrainings: {x: {label: X, data: {root: r}}, y: {same_as: a/c/z}}"
    )
    other = "trainings: {z: {label: Z, seed: 2, cells: {embedding: {NMI: 5}}}}"
    (file.parent / "c.yaml").write_text(other)
    x, y = read_table("a/b").entries
    assert (x.training, x.label) == ("a/b/x", "X")
    assert x.settings == {"seed": 1, "label": "X", "data": {"root": "r"}}
    assert (y.name, y.training, y.label, y.cells) == ("a/b/y", "a/c/z", "Z", {})
    assert y.settings == {"label": "Z", "seed": 2}


def test_remarks_are_of_the_entries_that_they_match(file):
    file.write_text("trainings: {x: {label: X}, y: {label: Y, data: {dataset: sop}}}")
    (file.parents[1] / "a.yaml").write_text(
        "differs: [{facts: {f: 1, g: null}, text: all}, {of: ^b  X$, text: one}]\n"
        "printed: [{of: ' sop ', text: odd}]"
    )
    x, y = (entry.remarks for entry in read_table("a/b").entries)
    assert x == {
        "differs": [Remark("all", {"f": 1, "g": None}), Remark("one", of="^b  X$")],
        "printed": [],
    }
    assert [len(remarks) for remarks in y.values()] == [1, 1]
