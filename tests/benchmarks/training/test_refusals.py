"""What does not fit is said before weights are fetched, and before anything is written."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.run import main
from benchmarks.training import trial

RECIPE = ("--recipe=images/resnet50/binomial_horde", "--data.image_size=32", "--data.num_workers=0")
SMALL = ("--model.trunk=test_resnet", "--model.trunk_args={}", "--data.batch_size=8")


@pytest.fixture
def photographs(tmp_path: Path) -> str:
    """Five training and five test classes of two images."""
    for name in "abcdefghij":
        (tmp_path / "photographs" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (40, 30), "red").save(tmp_path / "photographs" / name / f"{i}.jpg")
    return f"--data.root={tmp_path / 'photographs'}"


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The line on a run that cannot start."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def refused(*arguments: str) -> str:
        assert main([*RECIPE, *arguments, f"--output={tmp_path / 'run'}"]) == 2
        assert not (tmp_path / "run").exists()
        [line] = capsys.readouterr().err.splitlines()
        return line.removeprefix("error: ")

    return refused


def test_images_are_read_before_weights_are_fetched(
    refused: Callable[..., str],
    photographs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(trial, "build_model")
    nowhere = tmp_path / "nowhere"
    line = refused(f"--data.root={nowhere}")
    assert line.startswith(f"data.root: {nowhere}: cannot be read as a folder")
    assert refused(photographs) == (
        "data.batch_size: 80 images, 4 per class, need 20 classes, but there are 5; expected at most 20, or more "
        "images per class"
    )


def test_what_the_images_are_too_few_for_is_said(
    refused: Callable[..., str], photographs: str
) -> None:
    line = refused(photographs, *SMALL, "--model.batch_norm=train")
    assert line.startswith("evaluation.descriptor: its PCA to 512 dimensions needs more training")
    assert line.endswith("set it to false, or model.embedding_size to at most 9")


def test_frozen_statistics_of_random_weights_are_refused(
    refused: Callable[..., str], photographs: str
) -> None:
    line = refused(photographs, *SMALL, "--model.embedding_size=9")
    assert line.startswith("model.batch_norm: frozen_statistics keeps the statistics of a trunk")
    assert "--model.weights FILE" in line and line.endswith("--model.batch_norm train")
