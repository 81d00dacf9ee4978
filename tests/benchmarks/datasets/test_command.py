"""`python -m benchmarks.datasets` checks: on complete trees, and on each kind of broken one."""

import re
import shlex
from dataclasses import replace

import pytest

from benchmarks.datasets import __main__
from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.datasets.remarks import verify_command
from tests.support.fake_trees import cub, write_pictures


@pytest.fixture
def command(capsys):
    """Runs the command; its status, and what it wrote to stdout."""

    def run(*argv: object) -> tuple[int, str]:
        return __main__.main(["verify", *map(str, argv)]), capsys.readouterr().out

    return run


def table(output: str) -> dict[str, str]:
    """The rest of the line of each check, after its name."""
    _, *lines = output.partition("\n\n")[0].splitlines()
    return {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in lines}


def failed(output: str) -> list[str]:
    return [name for name, rest in table(output).items() if rest.startswith("FAILED")]


def test_a_published_dataset_and_all_that_is_wrong_with_it(command, tmp_path, monkeypatch):
    counts = {"train": (33, 8), "test": (20, 5)}
    info = replace(IMAGE_DATASETS["cub"], counts=counts)
    monkeypatch.setitem(IMAGE_DATASETS, "cub", info)
    folder = cub.write(tmp_path)
    listing = info.read(tmp_path)
    status, output = command("cub", "--data.root", tmp_path)
    assert status == 0
    checks = table(output)
    # The 16 pictures train; they come again from the 17th image on, and the last 20 test.
    assert checks["train and test"].startswith("33 images train and test, such as ")
    assert checks["one image"].startswith("ok      0 of 5 classes to test on, 0 of 8 classes to ")
    assert checks.items() >= {
        ("counts", "ok      train 33 / 8, test 20 / 5"),
        ("queries", "ok      20 queries"),
        ("images", "ok      0 of 53 cannot be used"),
        ("fingerprint", listing.fingerprint),
    }
    monkeypatch.setitem(IMAGE_DATASETS, "cub", replace(info, counts=counts | {"test": (21, 5)}))
    for path in listing.paths[:31]:
        (folder / path).unlink()  # the pictures are hard links
    (folder / listing.paths[0]).write_bytes(b"not found\n")
    status, output = command("cub", "--data.root", tmp_path)
    assert (status, failed(output)) == (1, ["counts", "images"])
    assert "train 33 / 8, test 20 / 5; published: train 33 / 8, test 21 / 5" in output
    assert output.count("cannot be read (No such file or directory)") == 30
    assert f"\n{folder / listing.paths[0]}: cannot be read (UnidentifiedImageError" in output
    assert "fingerprint" not in table(output)  # of half a dataset


@pytest.mark.parametrize(
    "data",
    [
        {"dataset": "cub"},
        {"dataset": "folder", "test_classes": 0.5, "class_level": "last"},
        {"dataset": "table", "table": "-t.csv", "known_classes": True, "camera": "shot by"},
        {"dataset": "table", "table": "-t.csv", "known_classes": False, "sequence": None},
    ],
)
def test_the_command_that_a_run_prints_is_understood(data, tmp_path, refused):
    """Whatever its settings are; it finds no lists there."""
    root = tmp_path / "- b"
    words = shlex.split(verify_command({**data, "root": root}))[4:]
    line = refused(__main__.main, "verify", *words)
    assert re.match(f"data.(root|table): {data.get('table', root)}: ", line)


def test_of_many_files_that_cannot_be_used_some_are_named(command, tmp_path):
    for path in (tmp_path / name / f"{i}.png" for name in "ab" for i in range(60)):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    status, output = command("folder", "--data.root", tmp_path)
    assert (status, output.count("cannot be read")) == (1, 100)
    assert output.endswith("\nand 20 more\n")


def test_a_folder_of_ones_own_is_checked(command, tmp_path, refused):
    write_pictures(tmp_path, [f"{name}/{i}.jpg" for name in ("A/a", "A/b", "C/c/d") for i in "12"])
    arguments = ("folder", "--data.root", tmp_path)
    status, output = command(*arguments, "--data.test_classes", 1 / 3)
    assert status == 0
    assert table(output)["counts"] == "train 4 / 2, test 2 / 1"  # nothing published to compare with
    uses = "you have 3 classes, 2 to train on, 1 to test on: .* two of each, and the study .* 12,"
    assert re.match(uses, table(output)["both uses"])
    assert table(output)["classes"] == "2 classes at depth 2, 1 classes at depth 3"
    _, output = command(*arguments, "--data.class_level", 1)
    assert table(output)["classes"] == "2 classes at depth 1"
    line = refused(__main__.main, "verify", *arguments, "--data.test_classes=1.5")
    assert line.startswith("data.test_classes: expected a fraction ")
