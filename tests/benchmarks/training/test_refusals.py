"""All that does not fit, said at once, before weights are fetched or a network is built."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from benchmarks.backbones import weights
from benchmarks.building import network
from benchmarks.run import main
from benchmarks.training import trial

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


def test_missing_images_hide_no_other_fault(refused: Any, tmp_path: Path) -> None:
    missing = f"--data.root={tmp_path / 'nowhere'}"
    images, *others = refused(missing)
    assert images.startswith(
        f"data.root: {tmp_path / 'nowhere'}: cannot be read (FileNotFoundError"
    )
    assert others == [FETCHED]
    losses = "--losses=[{loss: {class_path: pml_regularizers.HORDELoss, init_args: {ordr: 3}}}]"
    assert [line.partition(": ")[0] for line in refused(missing, losses)] == [
        *("data.root", "model.trunk_args", "losses[0].loss.init_args.ordr"),
    ]
    trained = (*SMALL, "--model.batch_norm=train")
    overrides = "--optimization.overrides={model.head.fcc: {lr: 1}}"
    named = [line.partition(": ")[0] for line in refused(missing, *trained, overrides)]
    assert named == ["data.root", "optimization.overrides"]


def test_all_that_does_not_fit_is_said_at_once(
    refused: Any, photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(trial, "try_one_step")  # which takes long
    assert refused(f"--data.root={photographs}") == [
        "data.batch_size: 80 images, 4 per class, need 20 classes, but there are 5; expected at most 20, or "
        "data.samples_per_class: 16",
        FETCHED,
        "evaluation.descriptor: its PCA to 512 dimensions needs more training images than the 10 there are; set it "
        "to false, or model.embedding_size to at most 9",
    ]


def test_the_values_that_fit_do(refused: Any, photographs: Path) -> None:
    """Each fault of the one before it is mended as it says."""
    root, batch = f"--data.root={photographs}", ("--data.samples_per_class=16",)
    assert refused(root, *batch, "--model.embedding_size=9") == [FETCHED]
    [tag] = refused(root, *batch, "--model.embedding_size=9", "--model.trunk=test_resnet.nobodys")
    assert tag.startswith("model: test_resnet.nobodys: Invalid pretrained tag (nobodys)")
    [frozen] = refused(root, *SMALL, "--model.embedding_size=9")
    assert frozen.startswith("model.batch_norm: frozen_statistics keeps the statistics of a trunk")
    assert "--model.weights FILE" in frozen and frozen.endswith("--model.batch_norm train")


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
