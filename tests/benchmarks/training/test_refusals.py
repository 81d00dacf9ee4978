"""A run whose settings do not fit the images is refused before weights are fetched, with a value that fits."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.building import network
from benchmarks.run import main

RECIPE = ("--recipe=images/resnet50/binomial_horde", "--data.image_size=32", "--data.num_workers=0")
SMALL = ("--model.trunk=test_resnet", "--model.trunk_args={}", "--data.batch_size=8")


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
    """The line on a run that cannot start; weights of resnet50 cannot be fetched."""
    create = network.timm.create_model

    def unreachable(name: str, **arguments: Any) -> Any:
        if name == "resnet50" and arguments.get("pretrained"):
            raise ConnectionError("no network.")
        return create(name, **arguments)

    monkeypatch.setattr(network.timm, "create_model", unreachable)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def refused(*arguments: str) -> str:
        assert main([*RECIPE, *arguments, f"--output={tmp_path / 'run'}"]) == 2
        assert not (tmp_path / "run").exists()
        [line] = capsys.readouterr().err.splitlines()
        return line.removeprefix("error: ")

    return refused


def test_nothing_is_fetched_for_what_cannot_start(
    refused: Any, photographs: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "nowhere"
    assert refused(f"--data.root={missing}").startswith(f"data.root: {missing}: cannot be read")
    assert refused(f"--data.root={photographs}").startswith("data.batch_size: 80 images")
    losses = "--losses=[{loss: {class_path: pml_regularizers.HORDELoss, init_args: {ordr: 3}}}]"
    assert refused(f"--data.root={missing}", losses).startswith("losses[0].loss.init_args.ordr: ")


def test_the_values_that_fit_do(refused: Any, photographs: Path) -> None:
    """Each fault of the one before it is mended as it says."""
    root = f"--data.root={photographs}"
    assert refused(root).startswith("data.batch_size: 80 images, 4 per class, need 20 classes")
    fetched = refused(root, "--data.batch_size=20")
    assert fetched.startswith("model: resnet50: no network; --model.weights FILE")
    tag = refused(root, "--data.batch_size=20", "--model.trunk=test_resnet.nobodys")
    assert tag.startswith("model: test_resnet.nobodys: Invalid pretrained tag (nobodys)")
    frozen = refused(root, *SMALL)
    assert frozen.startswith("model: batch_norm or frozen_stages would keep random weights")
    assert "--model.weights FILE" in frozen and frozen.endswith("--model.frozen_stages null")
    small = refused(root, *SMALL, "--model.batch_norm=train")
    assert small.startswith("evaluation.descriptor: its PCA") and small.endswith("at most 9")
    asked = (
        "--model.batch_norm=train",
        "--evaluation.descriptor=false",
        "--evaluation.features=11",
    )
    features = refused(root, *SMALL, *asked)
    assert features.startswith("evaluation.features: 11 ") and features.endswith("at most 10")
