"""A broken file of recipes gives one line that names the key; --list shows the others."""

import os
from pathlib import Path

import pytest

from benchmarks.run import main
from benchmarks.settings import recipe_files
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.recipe_files import read_entry, read_table

BROKEN = {
    "trainings: {x: hello}": "its trainings.x is not as benchmarks/settings/recipe_files.py describes it",
    "trainings: {x: {same_as: a/b/y}}": "recipe: no 'y' in a/b; there are x",
    "trainings: {x: {same_as: a/b/y, seed: 1}, y: {}}": "a/b/x: has the settings of a/b/y; leave",
    "trainings: {x: {label: 3}}": "a/b/x: its label is not as ",
    "trainings: {x: {cells: {embedding: {NMI: abc}}}}": "x: its cells.embedding.NMI is not as ",
    "training: {x: {}}": "b.yaml: its training is not as ",
    "shared: {data: null}\ntrainings: {x: {}}": "a/b/x: its data is not as ",
    "trainings: {x: {}}\nquoted: [{NMI: 3}]": "its quoted.0.row is not as ",
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(recipe_files, "RECIPES", tmp_path)
    (tmp_path / "a").mkdir()
    return tmp_path / "a" / "b.yaml"


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_one_line(
    content: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_table("a/b")
    assert BROKEN[content] in str(caught.value)
    assert main(["--list"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert BROKEN[content] in line


def test_a_changed_file_is_read_again_whatever_its_time(file: Path) -> None:
    """Two changes may come within one tick of a file system's clock."""
    for label in "XY":
        file.write_text(f"trainings: {{x: {{label: {label}}}}}")
        os.utime(file, ns=(0, 0))
        assert read_entry("a/b/x").label == label


def test_a_row_of_another_training(file: Path) -> None:
    """It has that training's settings, under its own label."""
    file.write_text(
        "shared: {seed: 1}\ntrainings: {x: {label: X, data: {root: r}}, y: {same_as: a/c/z}}"
    )
    (file.parent / "c.yaml").write_text(
        "trainings: {z: {label: Z, seed: 2, cells: {embedding: {NMI: 5}}}}"
    )
    x, y = read_table("a/b").entries
    assert (x.training, x.label) == ("a/b/x", "X")
    assert x.settings == {"seed": 1, "label": "X", "data": {"root": "r"}}
    assert (y.name, y.training, y.label) == ("a/b/y", "a/c/z", "Z")
    assert y.settings == {"label": "Z", "seed": 2}
    assert y.cells == {}
    assert read_entry("a/c/z").cells == {"embedding": {"NMI": 5}}


def test_remarks_are_of_the_entries_that_they_match(file: Path) -> None:
    file.write_text(
        "shared: {data: {dataset: cub}}\ntrainings: {x: {label: X}, y: {label: Y, data: {dataset: sop}}}"
    )
    x, y = read_table("a/b").entries
    assert x.remarks == y.remarks == {}
    (file.parents[1] / "a.yaml").write_text(
        "differs: [{facts: {f: 1, g: null}, text: all}, {facts: {h: x}, of: ^b cub X$, text: one}]\n"
        "printed: [{of: ' sop ', text: odd}]"
    )
    x, y = read_table("a/b").entries
    assert [(remark.facts, remark.text) for remark in x.remarks["differs"]] == [
        ({"f": 1, "g": None}, "all"),
        ({"h": "x"}, "one"),
    ]
    assert [remark.text for remark in y.remarks["differs"]] == ["all"]
    assert (x.remarks["printed"], [r.text for r in y.remarks["printed"]]) == ([], ["odd"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("differ: []", "its differ is not as "),
        ("differs: [{text: [t]}]", "its differs.0.text is not as "),
    ],
)
def test_broken_remarks_are_one_line(content: str, said: str, file: Path) -> None:
    file.write_text("trainings: {x: {}}")
    (file.parents[1] / "a.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"a\.yaml") as caught:
        read_table("a/b")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_list_tells_dataset_backbone_number_and_images(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "data: {batch_size: 50, image_size: 64}, optimization: {steps: 20}"
    file.write_text(
        f"trainings: {{x: {{{settings}, cells: {{embedding: {{recall_at_1: 58.3}}}}}}, y: {{same_as: a/b/x}}}}"
    )
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-2:] == ["Recall@1", "images"]
    assert lines[2] == "a/b: glyphs, test_resnet"
    assert lines[3].split()[:3] == ["x", "58.3", "1,000"]
    assert lines[4].split() == ["y", "=", "b/x"]
