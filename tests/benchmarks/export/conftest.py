"""Run folders to export, and what is found in an export."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from PIL import Image
from torch import Tensor

from benchmarks import run as runner
from benchmarks.building.images import build_datasets, show_to
from benchmarks.building.network import EmbeddingModel, build_model
from benchmarks.export.__main__ import main
from benchmarks.records.files import read_json, write_json
from benchmarks.records.run_folder import RunFolder, run_identity
from benchmarks.settings.command import parse
from benchmarks.settings.data import Data
from benchmarks.settings.recipe_files import read_yaml

SIZE = 64
CLASSES, IMAGES = 8, 4
VEM = {"class_path": "pml_regularizers.VEMAttention"}
HORDE = {
    "class_path": "pml_regularizers.HORDELoss",
    "init_args": {
        "loss": {"class_path": "pml_regularizers.BinomialDevianceLoss"},
        **{"order": 3, "moment_dim": 16, "projections": "cascaded"},
    },
}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CLASS/IMAGE, each class a mosaic of its own colours, upright and wider than high."""
    root = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for label in range(CLASSES):
        mosaic = np.kron(draw.integers(0, 255, (5, 7, 3)), np.ones((8, 8, 1)))
        (root / f"class{label}").mkdir()
        for number in range(IMAGES):
            noisy = mosaic + draw.normal(0, 20, mosaic.shape)
            picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
            picture.save(root / f"class{label}" / f"{number}.png")
    return root


@pytest.fixture(scope="session")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as the runner writes it: a metric loss with HORDE and VEM."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    variance = {"class_path": "pml_regularizers.VarianceRegularizer"}
    settings = {
        "data": {
            **{"dataset": "folder", "root": str(pictures), "image_size": SIZE, "batch_size": 8},
            "num_workers": 0,
        },
        "model": {"trunk_args": {}, "embedding_size": 8, "attention": VEM},
        "losses": [{"loss": HORDE}, {"loss": variance}],
        "optimization": {"steps": 3},
        "evaluation": {"every": 0, "verification": True},
    }
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        assert runner.main([f"--config={file}", f"--output={folder}", "--report=false"]) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return folder


@pytest.fixture(scope="session")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an export."""
    output = tmp_path_factory.mktemp("exported") / "new" / "folder"
    assert main([str(trained), f"--output={output}"]) == 0
    return output


def make_run(trained: Path, folder: Path, **model: Any) -> EmbeddingModel:
    """A run folder as the runner leaves it, of another network, whose loss cannot be made; its random weights."""
    folder.mkdir()
    config = read_yaml(trained / "config.yaml")
    config["losses"] = [{"loss": {}}]
    config["model"] |= {"attention": None, **model}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    record = json.loads((trained / "run.json").read_text())
    write_json(folder / "run.json", record | {"config": config, "files": {}})
    torch.manual_seed(1)  # the same ones whatever ran before
    network = rebuilt(folder)
    with torch.no_grad():  # nothing is as it started: norms, their statistics, biases
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.02 * torch.rand_like(tensor))
    save(folder, record["steps"], network)
    return network


def save(folder: Path, step: int, network: EmbeddingModel) -> None:
    run = RunFolder(folder)
    about = {"run": run_identity(read_json(folder / "run.json"))}
    run.save(step, {"model": network.state_dict(), "loss": {}} | about)
    run.close()


@pytest.fixture(scope="session")
def plain(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of another ResNet without attention."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    make_run(trained, folder)
    return folder


@pytest.fixture
def run(plain: Path, tmp_path: Path) -> Path:
    """A copy of it to be changed."""
    return shutil.copytree(plain, tmp_path / "run")


def change(folder: Path, section: str, **settings: Any) -> None:
    """Settings of a run, in its config.yaml."""
    config = read_yaml(folder / "config.yaml")
    config[section] |= settings
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def rebuilt(folder: Path) -> EmbeddingModel:
    """The network of a run folder, with weights that were drawn."""
    run = parse([f"--config={folder / 'config.yaml'}"]).experiment
    run.model.trunk_args.pop("pretrained", None)
    return build_model(replace(run.model, weights=None), run.data).eval()


def views(pictures: Path, network: EmbeddingModel) -> dict[str, Tensor]:
    """Test views of all images, as the runner makes them."""
    data = Data(dataset="folder", root=pictures, image_size=SIZE)
    train, test, _ = show_to(network.trunk, build_datasets(data), data)
    return {part.name(i): part[i][0] for part in (train, test) for i in range(len(part))}
