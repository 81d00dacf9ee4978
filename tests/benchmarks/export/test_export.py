"""The exported network equals the checkpoint's, read back by timm; mistakes write nothing."""

import shutil
from collections.abc import Callable
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf
from torch import Tensor, nn

from benchmarks.backbones import register
from benchmarks.building.images import build_datasets, show_to
from benchmarks.export import writing
from benchmarks.export.__main__ import main
from benchmarks.export.card import preprocessing
from benchmarks.records import load_checkpoint
from benchmarks.records.files import read_json, write_json
from benchmarks.settings.data import Data
from tests.benchmarks.export.conftest import (
    SIZE,
    VEM,
    change,
    embed,
    make_run,
    rebuilt,
    save,
    snippets,
    views,
)
from tests.support.tolerances import assert_close


def test_timm_gives_the_embeddings_of_a_trained_run(trained: Path, exported: Path) -> None:
    model = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
    network, state = rebuilt(trained), load_checkpoint(trained)
    assert state is not None
    network.load_state_dict(state["model"])
    images = torch.randn(3, 3, SIZE, SIZE)
    assert_close(nn.functional.normalize(embed(model, images)), embed(network, images))


NETWORKS = {
    "ViT": {"trunk": "test_vit", "trunk_args": {"img_size": SIZE}},
    "ViT, token": {"trunk": "test_vit", "trunk_args": {"img_size": SIZE}, "pool": "token"},
    "ResNet": {
        **{"pool": "max", "bias": True, "weights": "gone.pth"},
        "trunk_args": {"pretrained": True, "output_stride": 8},
    },
    "ResNet, folded": {"attention": VEM},
    "ConvNeXt": {"trunk": "test_convnext", "bias": True},
    "ConvNeXt, folded": {"trunk": "test_convnext", "pool": "max", "attention": VEM},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_cards_code_gives_the_checkpoints_embeddings(
    name: str, trained: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "timm.models._builder.load_state_dict_from_hf", lambda *_, **__: pytest.fail("a download")
    )
    run, output = tmp_path / "run", tmp_path / "exported"
    network = make_run(trained, run, **NETWORKS[name])
    assert main([str(run), f"--output={output}"]) == 0
    [code] = snippets(output)
    monkeypatch.chdir(output)
    shutil.copy(pictures / "class3" / "1.png", "image.jpg")
    found: dict[str, Any] = {}
    exec(code, found)
    assert_close(found["embedding"], embed(network, views(pictures, network)["class3/1.png"][None]))


VIEWS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("test_resnet", {}),
    "given": ("test_resnet", {"resize": 67, "keep_aspect": False, "interpolation": "bicubic"}),
    "no crop": ("test_resnet", {"augmentation": "multi_resolution", "keep_aspect": True}),
    "the trunk's": ("googlenet", {"interpolation": "lanczos"}),
}


@pytest.mark.parametrize("name", VIEWS)
def test_timm_prepares_images_as_the_runner_does(name: str, pictures: Path) -> None:
    trunk_name, given = VIEWS[name]
    register()
    trunk = timm.create_model(trunk_name, num_classes=0, global_pool="")
    data = Data(dataset="folder", root=pictures, image_size=SIZE, **given)
    _, test, _ = show_to(trunk, build_datasets(data), data)
    transform = timm.data.create_transform(**preprocessing(data, trunk))
    with Image.open(pictures / test.name(0)) as image:
        assert_close(transform(image), test[0][0])


def test_glyphs_are_gray(trained: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "exported"
    make_run(trained, run)
    change(run, "data", dataset="glyphs")
    network = rebuilt(run)
    save(run, 3, network)
    output.mkdir()
    assert main([str(run), f"--output={output}"]) == 0, "it was empty"
    assert {path.name for path in output.iterdir()} == {
        *("README.md", "config.json", "model.safetensors"),
    }
    (tmp_path / "new").touch()
    mode = (tmp_path / "new").stat().st_mode
    assert {path.stat().st_mode for path in output.iterdir()} == {mode}, "others may read them"
    assert {path.name for path in tmp_path.iterdir()} == {"exported", "run", "new"}, "no lock stays"
    model = timm.create_model(f"local-dir:{output}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    assert 'convert("L")' in snippets(output)[0]
    pixels = np.arange(SIZE * SIZE).reshape(SIZE, SIZE).astype(np.uint8)
    view = transform(Image.fromarray(pixels))
    assert_close(view[0], torch.from_numpy(pixels / 127.5 - 1))
    assert_close(nn.functional.normalize(embed(model, view[None])), embed(network, view[None]))


def test_timm_resizes_to_the_same_size() -> None:
    trunk = timm.create_model("test_resnet", num_classes=0, global_pool="")
    for resize in range(227, 2 * 227):
        view = preprocessing(Data(dataset="folder", image_size=227, resize=resize), trunk)
        assert floor(227 / view["crop_pct"]) == resize


Refused = Callable[..., None]

MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no run": (lambda run: (run / "run.json").unlink(), "run.json: No such file or directory"),
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), "has no checkpoint yet"),
    "other settings than those of the run": (
        lambda run: write_json(
            run / "run.json", read_json(run / "run.json") | {"files": {"config.yaml": "0" * 64}}
        ),
        "config.yaml: is damaged (run.json has the SHA-256 000",
    ),
    "unknown setting": (lambda run: change(run, "model", trunks=1), "config.yaml: "),
    "another network": (
        lambda run: change(run, "model", embedding_size=9),
        "config.yaml: describes another network",
    ),
    "the checkpoint of another run": (
        lambda run: write_json(run / "run.json", read_json(run / "run.json") | {"seed": 1}),
        "is of a run with",
    ),
}


@pytest.fixture
def refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Checks that an export of the run is refused in one line, and leaves nothing."""

    def check(expected: str, *arguments: str) -> None:
        capsys.readouterr()
        before = sorted(tmp_path.iterdir())
        assert main([str(run), f"--output={tmp_path / 'out'}", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        [line] = captured.err.splitlines()
        assert line.startswith("error: ")
        assert line.count("config.yaml") <= 1
        assert expected in line
        assert sorted(tmp_path.iterdir()) == before

    return check


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    mistake: str, run: Path, refused: Refused
) -> None:
    make, expected = MISTAKES[mistake]
    make(run)
    refused(expected)


def test_an_output_in_use_is_left_alone(tmp_path: Path, refused: Refused) -> None:
    mine = tmp_path / "out" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    for output in (mine.parent, mine):
        refused(f"--output: {output} is not an empty folder; choose a new", f"--output={output}")
    refused(f"error: --output: {mine / 'new'}", f"--output={mine / 'new'}")
    assert mine.read_text() == "mine"


def test_files_that_give_other_embeddings_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:

    def spoiled(model: nn.Module, folder: Path, **options: Any) -> None:
        model.fc.weight.data[0] += 0.01
        save_for_hf(model, folder, **options)

    monkeypatch.setattr(writing, "save_for_hf", spoiled)
    refused("run: the embeddings of what was written differ by ")


class Doubled(nn.Module):
    """An attention without `fold`."""

    def forward(self, features: Tensor) -> Tensor:
        return 2 * features


def test_an_attention_that_does_not_fold_is_not_for_timm(
    run: Path, refused: Refused, trusting: Callable[..., None]
) -> None:
    change(run, "model", attention={"class_path": f"{__name__}.Doubled"})
    trusting()
    refused(f"--trust {__name__}")
    refused("timm has no Doubled", f"--trust={__name__}")


def test_a_trunk_that_normalises_after_pooling_is_not_for_timm(
    trained: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "NORM_BEFORE_POOLING", ({},))
    shutil.rmtree(tmp_path / "run")
    make_run(trained, tmp_path / "run", trunk="test_convnext")
    refused("timm's test_convnext with model.pool avg and the embedding layer as its classifier")


def with_thresholds(trained: Path, run: Path) -> dict[str, Any]:
    """A copy of a run whose test had enough images for a threshold; its record."""
    info = read_json(shutil.copytree(trained, run) / "run.json")
    for rate in info["verification"]["rates"]:
        rate["threshold"] = None if rate["false_accepts"] < 0.001 else 0.5
    write_json(run / "run.json", info)
    return info


def test_the_thresholds_of_the_test_are_exported(trained: Path, tmp_path: Path) -> None:
    """Those of the checkpoint that was tested, and of no other; none without a threshold."""
    run, output = tmp_path / "run", tmp_path / "out"
    info = with_thresholds(trained, run)
    assert main([str(run), f"--output={output}"]) == 0
    stored = read_json(output / "thresholds.json")
    tested_on = {"data": info["data"]["name"], "images": info["data"]["test_images"]}
    del stored["sha256"]  # of the file, as in run.json
    assert stored.pop("similarity") == "cosine of two embeddings"
    assert stored.pop("tested_on") == tested_on
    network = {"run": info["name"], "train_classes": info["data"]["train_classes"]}
    assert stored.pop("tested_network") == network
    assert stored == info["verification"] and 0 < stored["area"] <= 1
    card = (output / "README.md").read_text()
    assert "`thresholds.json` has the similarities" in card and "its own may differ" not in card
    assert "area under the ROC" in card
    verification = read_json(trained / "run.json")["verification"]
    assert not any(rate["threshold"] for rate in verification["rates"])
    for changes in ({"steps": 4}, {"verification": None}, {"verification": verification}):
        write_json(run / "run.json", info | changes)
        shutil.rmtree(output)
        assert main([str(run), f"--output={output}"]) == 0
        assert not (output / "thresholds.json").exists()
        assert "thresholds" not in (output / "README.md").read_text()


def test_the_thresholds_of_a_tested_run_of_the_same_method(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a network of all classes; of another method they mean nothing."""
    run, tested = tmp_path / "run", tmp_path / "tested"
    info = with_thresholds(trained, tested)
    shutil.copytree(tested, run)
    classes = {"train_classes": 1 + info["data"]["train_classes"]}
    changes = {"verification": None, "data": info["data"] | classes}
    write_json(run / "run.json", info | changes)
    words = [str(run), f"--output={tmp_path / 'out'}"]
    assert main([*words, f"--thresholds={tested}"]) == 0
    rates = read_json(tmp_path / "out" / "thresholds.json")["rates"]
    assert rates == info["verification"]["rates"]
    assert "its own may differ" in (tmp_path / "out" / "README.md").read_text()

    words[1] += "2"
    other = shutil.copytree(trained, tmp_path / "other")
    for more, message in (
        (
            {"config": info["config"] | {"losses": []}},
            "differ in losses; expected a run of the same",
        ),
        ({"data": info["data"] | {"view": {"image_size": 9}}}, "differ in data (view); expected"),
        ({"verification": None}, "measured none; train it with --evaluation.verification=true"),
    ):
        write_json(other / "run.json", info | more)
        assert main([*words, f"--thresholds={other}"]) == 2
        assert message in capsys.readouterr().err
    assert main([str(tested), words[1], f"--thresholds={tested}"]) == 2
    assert "measured its own; leave the option out" in capsys.readouterr().err
    assert main([*words, f"--thresholds={tmp_path / 'nothing'}"]) == 2
    assert "error: --thresholds: " in capsys.readouterr().err
    assert not (tmp_path / "out2").exists()
