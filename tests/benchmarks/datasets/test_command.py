"""`python -m benchmarks.datasets` checks: on complete trees, and on each kind of broken one."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.datasets import IMAGE_DATASETS, __main__
from tests.support.fake_trees import cub


@pytest.fixture
def command(capsys):
    """Runs the command; its status, and what it wrote to stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        try:
            status = __main__.main([str(argument) for argument in argv])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def publish(monkeypatch, **counts: object) -> None:
    """Take these counts of CUB-200-2011 for the published ones."""
    info = replace(IMAGE_DATASETS["cub"], counts=counts)
    monkeypatch.setitem(IMAGE_DATASETS, "cub", info)


def table(output: str) -> dict[str, str]:
    """The rest of the line of each check, after its name."""
    _, *lines = output.partition("\n\n")[0].splitlines()
    return {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in lines}


def failed(output: str) -> list[str]:
    return [name for name, rest in table(output).items() if rest.startswith("FAILED")]


def test_the_table_says_what_there_is(command, tmp_path, monkeypatch):
    publish(monkeypatch, train=(33, 8), test=(20, 5))
    listing = IMAGE_DATASETS["cub"].read(cub.write(tmp_path))
    status, output, _ = command("verify", "cub", "--data.root", tmp_path)
    assert status == 0
    found = table(output)
    assert " images of part train have a copy in it, such as " in found.pop("copies")
    assert " images are in two classes, such as " in found.pop("two classes")
    # The 16 pictures train; they come again from the 17th image on, and the last 20 test.
    assert found.pop("train and test").startswith("33 images train and test, such as ")
    assert found == {
        "counts": "ok      train 33 / 8, test 20 / 5",
        "one image": "ok      0 of 5 classes to test on, 0 of 8 classes to train on have one image",
        "images": "ok      0 of 53 cannot be used",
        "fingerprint": listing.fingerprint,
    }


def test_all_that_is_wrong_is_told_at_once(command, tmp_path, monkeypatch):
    publish(monkeypatch, train=(34, 8), test=(20, 5))
    folder = cub.write(tmp_path)
    paths = IMAGE_DATASETS["cub"].read(tmp_path).paths
    for path in paths[:30]:
        (folder / path).unlink()
    content = (folder / paths[40]).read_bytes()
    for path, damaged in ((paths[40], content[:-40]), (paths[41], b"not found\n")):
        (folder / path).unlink()  # the pictures are hard links
        (folder / path).write_bytes(damaged)
    status, output, _ = command("verify", "cub", "--data.root", tmp_path)
    assert status == 1
    assert failed(output) == ["counts", "images"]
    assert "train 33 / 8, test 20 / 5; published: train 34 / 8, test 20 / 5" in output
    assert output.count("cannot be read (FileNotFoundError: ") == 30
    assert f"\n{folder / paths[40]}: cannot be read (OSError: image file is truncated" in output
    assert (
        f"\n{folder / paths[41]}: cannot be read (UnidentifiedImageError: cannot identify image"
        in output
    )
    assert "fingerprint" not in table(output)  # of half a dataset


def write_folder(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3)).save(root / path)
    return root


@pytest.mark.parametrize(
    ("train", "test", "status"),
    [((2, 2), (1, 1), 1), ((1, 1), (2, 2), 1), ((1, 2), (2, 1), 0)],
)
def test_classes_of_one_image_are_counted_and_must_not_be_all(
    command, tmp_path, train, test, status
):
    """A batch has no pair of them, and a search with one of them finds nothing."""
    sizes = dict(zip("abcd", (*train, *test), strict=True))
    paths = [f"{name}/{i}.png" for name, size in sizes.items() for i in range(size)]
    write_folder(tmp_path / "photos", *paths)
    (tmp_path / "test.txt").write_text("c\nd\n")
    listed = ("--data.test_classes", tmp_path / "test.txt")
    found, output, _ = command("verify", "folder", "--data.root", tmp_path / "photos", *listed)
    assert (found, failed(output)) == (status, ["one image"] * status)
    counts = [f"{of.count(1)} of 2 classes to" for of in (test, train)]
    said = f"{counts[0]} test on, {counts[1]} train on have one image"
    assert said in table(output)["one image"]
    assert ("nothing can be trained or retrieved" in output) == (status == 1)


def test_a_folder_of_ones_own_is_checked(command, tmp_path):
    write_folder(tmp_path, *(f"{name}/{i}.png" for name in ("A/a", "A/b", "C/c/d") for i in (1, 2)))
    arguments = ("verify", "folder", "--data.root", tmp_path, "--data.test_classes", 1 / 3)
    status, output, _ = command(*arguments)
    assert status == 0
    assert table(output)["counts"] == "train 4 / 2, test 2 / 1"  # nothing published to compare with
    assert table(output)["classes"] == "2 classes at depth 2, 1 classes at depth 3"
    _, output, _ = command(*arguments[:4], "--data.class_level", 1)
    assert table(output)["classes"] == "2 classes at depth 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("verify cub", "arguments are required: --data.root"),
        ("verify cub --data.root . --data.test_classes 0.5", "arguments: --data.test_classes 0.5"),
        (
            "verify folder --data.root . --data.test_classes 1.5",
            "--data.test_classes: expected a f",
        ),
        ("verify folder --data.root . --data.test_classes x", "--data.test_classes: x: cannot be"),
    ],
)
def test_a_usage_error_is_told(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(write_folder(tmp_path, "a/1.png", "b/1.png"))
    status, output, errors = command(*arguments.split())
    assert (status, output) == (2, "")
    assert message in errors
