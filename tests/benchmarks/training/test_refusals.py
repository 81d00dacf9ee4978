"""What does not fit is refused before weights are fetched or a step is taken."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from benchmarks.backbones import weights
from benchmarks.building import network
from benchmarks.run import main

RECIPE = ("--recipe=images/resnet50/binomial_horde", "--data.image_size=32", "--data.num_workers=0")
SMALL = ("--model.trunk=test_resnet", "--model.trunk_args={}", "--data.batch_size=8")
FETCHED = (
    "model.trunk_args: pretrained: the Hub, which has the weights of resnet50, cannot be reached; --model.weights "
    "FILE loads them from a file, --model.trunk_args '{}' with --model.batch_norm train begins with random ones"
)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Five training and five test classes of two images."""
    for name in "abcdefghij":
        (tmp_path / "photographs" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (40, 30), "red").save(tmp_path / "photographs" / name / f"{i}.jpg")
    return tmp_path / "photographs"


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """The lines on a run that cannot start; the Hub cannot be reached."""
    monkeypatch.setattr(network, "can_be_fetched", lambda trunk: False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def refused(*arguments: str) -> list[str]:
        assert main([*RECIPE, *arguments, f"--output={tmp_path / 'run'}"]) == 2
        assert not (tmp_path / "run").exists()
        first, *others = capsys.readouterr().err.splitlines()
        return [first.removeprefix("error: "), *(line.removeprefix("  ") for line in others)]

    return refused


def test_images_come_before_weights(refused: Any, tmp_path: Path, photographs: Path) -> None:
    """Each fault is mended as the line on it says."""
    [line] = refused(f"--data.root={tmp_path / 'nowhere'}")
    assert line.startswith(f"data.root: {tmp_path / 'nowhere'}: cannot be read as a folder")
    root = f"--data.root={photographs}"
    assert refused(root) == [
        "data.batch_size: 80 images, 4 per class, need 20 classes, but there are 5; expected at most 20, or "
        "data.samples_per_class: 16"
    ]
    assert refused(root, "--data.samples_per_class=16") == [FETCHED]
    [line] = refused(root, *SMALL)
    assert line.startswith("model.batch_norm: frozen_statistics keeps the statistics of a trunk")
    assert line.endswith("--model.batch_norm train")
    assert refused(root, *SMALL, "--model.batch_norm=train") == [
        "evaluation.descriptor: its PCA to 512 dimensions needs more training images than the 10 there are; set it "
        "to false, or model.embedding_size to at most 9"
    ]


def answers(error: Exception | None) -> Any:
    def asked(url: str) -> None:
        assert url.startswith("https://") and "timm/test_resnet" in url
        if error is not None:
            raise error

    return asked


def test_whether_weights_can_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HF_HUB_CACHE", str(tmp_path))
    response: Any = SimpleNamespace(headers={}, request=None)
    for error, expected in (
        (None, True),
        (HfHubHTTPError("not found", response=response), True),  # timm says what it lacks
        (ConnectionError("no network"), False),
    ):
        monkeypatch.setattr(weights, "get_hf_file_metadata", answers(error))
        assert weights.can_be_fetched("test_resnet") is expected
    assert weights.can_be_fetched("bn_inception")  # not on the Hub
    kept = (
        tmp_path / "models--timm--test_resnet.r160_in1k" / "snapshots" / "0" / "model.safetensors"
    )
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert weights.can_be_fetched("test_resnet")
