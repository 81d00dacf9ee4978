"""What is read of the files of recipes and of the remarks on them."""

import pytest

from benchmarks.run import main
from benchmarks.settings import recipe_files
from benchmarks.settings.recipe_files import Remark, read_table


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_files, "RECIPES", tmp_path)
    (tmp_path / "a").mkdir()
    return tmp_path / "a" / "b.yaml"


def test_an_unknown_training_is_one_line(file, refused):
    file.write_text("trainings: {x: {same_as: a/b/y}}")
    assert "recipe: no 'y' in a/b; there are x" in refused(main, "--list")


def test_a_row_of_another_training(file):
    """It has that training's settings, under its own label and without its numbers."""
    trainings = "trainings: {x: {label: X, data: {root: r}}, y: {same_as: a/c/z}}"
    file.write_text(f"shared: {{seed: 1}}\n{trainings}")
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
    differs = [Remark("all", {"f": 1, "g": None}), Remark("one", of="^b  X$")]
    assert x == {"differs": differs, "printed": []}
    assert [len(remarks) for remarks in y.values()] == [1, 1]
