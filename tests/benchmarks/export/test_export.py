"""The exported network equals the checkpoint's, read back by timm, torch and onnxruntime alone."""

import base64
import io
import json
import re
import runpy
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from accelerate.state import AcceleratorState
from PIL import Image
from torch import Tensor, nn

from benchmarks import run as runner
from benchmarks.backbones import register
from benchmarks.building.images import build_datasets
from benchmarks.building.network import EmbeddingModel, build_model
from benchmarks.console import alone
from benchmarks.export import timm_files, writing
from benchmarks.export.__main__ import main
from benchmarks.export.card import card, pooling
from benchmarks.export.timm_files import crop_fraction, preprocessing
from benchmarks.export.trained import Exported, load_trained
from benchmarks.records.files import write_json
from benchmarks.records.run_folder import RunFolder, load_checkpoint, saved_checkpoints
from benchmarks.settings.command import parse
from benchmarks.settings.data import Data
from benchmarks.settings.recipe_files import read_yaml
from pml_regularizers import EmbeddingHead
from tests.support.processes import ROOT
from tests.support.tolerances import assert_close

SIZE = 64
PRINTED = 1e-4  # distances have four decimals
CLASSES, IMAGES = 8, 4
VEM = {"class_path": "pml_regularizers.VEMAttention"}
HORDE = {
    "class_path": "pml_regularizers.HORDELoss",
    "init_args": {
        "loss": {"class_path": "pml_regularizers.BinomialDevianceLoss"},
        "order": 3,
        "moment_dim": 16,
    },
}
needs_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="pip install '.[export]'",
)


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run folder as the runner writes it: a metric loss with HORDE and VEM."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    losses = [
        {"loss": HORDE},
        {"loss": {"class_path": "pml_regularizers.VarianceRegularizer"}},
    ]
    settings = {
        "data": {"dataset": "folder", "root": str(pictures), "image_size": SIZE, "batch_size": 8},
        "model": {"trunk_args": {}, "embedding_size": 8, "attention": VEM},
        "losses": losses,
        "optimization": {"steps": 3},
        "evaluation": {"every": 0},
    }
    settings["data"]["num_workers"] = 0
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        assert runner.main([f"--config={file}", f"--output={folder}"]) == 0
    yield folder
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an export in both formats."""
    output = tmp_path_factory.mktemp("exported") / "new" / "folder"
    assert main([str(trained), f"--output={output}"]) == 0
    return output


def make_run(trained: Path, folder: Path, **model: Any) -> EmbeddingModel:
    """A run folder as the runner leaves it, of another network; its random weights."""
    folder.mkdir()
    config = read_yaml(trained / "config.yaml")
    config["model"] |= {"attention": None, **model}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    record = json.loads((trained / "run.json").read_text())
    write_json(folder / "run.json", record | {"config": config, "files": {}})
    network = rebuilt(folder)
    with torch.no_grad():  # nothing is as it started: norms, their statistics, biases
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.02 * torch.rand_like(tensor))
    save(folder, record["steps"], network)
    return network


def save(folder: Path, step: int, network: EmbeddingModel) -> None:
    run = RunFolder(folder)
    run.save(step, {"model": network.state_dict(), "loss": {}})
    run.close()


@pytest.fixture(scope="module")
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


def checkpointed(folder: Path) -> EmbeddingModel:
    """The network of a run folder as the runner tests it, attention and all."""
    network, state = rebuilt(folder), load_checkpoint(folder)
    assert state is not None
    network.load_state_dict(state["model"])
    return network


def embed(network: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        embeddings: Tensor = network(images)
    return embeddings


def snippets(folder: Path) -> list[str]:
    """The Python code of a card."""
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)


# -------------------------------------------------------------------------------- the same embeddings


@needs_onnx
def test_timm_gives_the_checkpoints_embeddings(trained: Path, exported: Path) -> None:
    network, images = checkpointed(trained), torch.randn(4, 3, SIZE, SIZE)
    assert network.head.attention.variance.std() > 0.1
    model = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
    assert_close(nn.functional.normalize(embed(model, images)), embed(network, images))
    # Nothing but a plain timm model is in the file.
    plain = timm.create_model("test_resnet", num_classes=8)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert type(model) is type(plain)


@needs_onnx
def test_onnx_gives_the_checkpoints_embeddings(trained: Path, exported: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(exported / "model.onnx")
    for count in (1, 3):
        images = torch.randn(count, 3, SIZE, SIZE)
        [embeddings] = session.run(None, {"images": images.numpy()})
        assert embeddings.shape == (count, 8)
        assert_close(torch.from_numpy(embeddings), embed(checkpointed(trained), images))


NETWORKS = {
    "ViT": ({"trunk": "test_vit", "trunk_args": {"img_size": SIZE}}, False),
    "ViT, token": ({"trunk": "test_vit", "trunk_args": {"img_size": SIZE}, "pool": "token"}, False),
    "ResNet": (
        {
            **{"pool": "max", "bias": True, "weights": "gone.pth"},
            "trunk_args": {"pretrained": True, "output_stride": 8},
        },
        False,
    ),
    "ConvNeXt": ({"trunk": "test_convnext", "bias": True}, True),
    "ConvNeXt, folded": ({"trunk": "test_convnext", "pool": "max", "attention": VEM}, True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_cards_code_gives_the_checkpoints_embeddings(
    name: str, trained: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parts = NETWORKS[name]
    monkeypatch.setattr(
        "timm.models._builder.load_state_dict_from_hf", lambda *_, **__: pytest.fail("a download")
    )
    run, output = tmp_path / "run", tmp_path / "exported"
    network = make_run(trained, run, **model)
    assert main([str(run), f"--output={output}", "--formats=timm"]) == 0
    assert (output / "head.safetensors").exists() == parts
    [code] = snippets(output)
    monkeypatch.chdir(output)
    shutil.copy(pictures / "class3" / "1.png", "image.jpg")
    found: dict[str, Any] = {}
    exec(code, found)
    assert_close(found["embedding"], embed(network, views(pictures, network)["class3/1.png"][None]))


def views(pictures: Path, network: EmbeddingModel) -> dict[str, Tensor]:
    """Test views of all images, as the runner makes them."""
    data = Data(dataset="folder", root=pictures, image_size=SIZE)
    train, test, _ = build_datasets(data, network.trunk)
    return {part.name(i): part[i][0] for part in (train, test) for i in range(len(part))}


@pytest.mark.parametrize("pool", ["avg", "max", "token"])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2, 5, 4, 3), {}),
        ((2, 4, 3, 5), {"data_format": "NHWC"}),
        ((2, 7, 5), {}),
        ((2, 7, 5), {"num_prefix_tokens": 2}),
    ],
)
def test_the_pooling_in_the_card_is_the_heads(
    pool: Any, shape: tuple[int, ...], layout: dict[str, Any]
) -> None:
    if pool == "token":
        shape, layout = (2, 7, 5), {"num_prefix_tokens": 2}
    head = EmbeddingHead(5, 6, pool=pool, **{"data_format": "NCHW", **layout})
    pooled = []
    head.pooled.register_forward_hook(lambda *call: pooled.append(call[-1]))
    features = torch.randn(shape)
    head(features)
    assert_close(eval(pooling(head, features.ndim), {"features": features}), pooled[0])


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
    _, test, _ = build_datasets(data, trunk)
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
    assert main([str(run), f"--output={output}", "--formats=timm"]) == 0, "it was empty"
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


def test_crop_fraction_is_exact_for_every_size() -> None:
    sizes = [(size, shown) for size in (32, 224, 227, 256) for shown in range(size, 2 * size)]
    for size, shown in sizes:
        fraction = crop_fraction(size, shown)
        assert floor(size / fraction) == shown
        assert fraction == pytest.approx(size / shown)
    assert any(floor(size / (size / shown)) != shown for size, shown in sizes), "rounding matters"


# ----------------------------------------------------------------------------------------------- card


@needs_onnx
def test_the_card_tells_what_was_measured(
    trained: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (exported / "README.md").read_text()
    info = json.loads((trained / "run.json").read_text())
    front = yaml.safe_load(text.split("---\n", 2)[1])
    assert front["library_name"] == "timm"
    assert front["license"] == "unknown"
    assert {"timm", "onnx"} < set(front["tags"])
    assert info["outputs"]["descriptor"]
    assert "†" not in text, "HORDE's descriptor is not exported"
    [row] = re.findall(r"^\| binomial deviance \|(.*)\|$", text, re.MULTILINE)
    percents = [float(cell) for cell in row.split("|")[:-1]]
    assert percents == [round(100 * value, 2) for value in info["metrics"].values()]
    for part in (info["data"]["fingerprint"], f"`{info['command']}`", info["versions"]["torch"]):
        assert part in text
    assert "- weights at the start: drawn from the seed\n" in text
    assert "- folded into the linear layer: VEMAttention\n" in text
    state = load_checkpoint(trained)
    assert state is not None
    numbers = sum(tensor.numel() for tensor in state["loss"].values())
    assert f"(HORDELoss, VarianceRegularizer; {numbers:,} numbers of its own)" in text
    assert text.count("except for at most") == 2
    monkeypatch.chdir(exported)
    _, onnx = snippets(exported)
    found: dict[str, Any] = {}
    exec(onnx, found)
    assert found["embeddings"].shape == (2, 8)


def told(plain: Path, info: dict[str, Any], **model: Any) -> str:
    """The card of a run whose run.json and model say something else."""
    trained = load_trained(plain)
    run = replace(trained.run, info=trained.run.info | info)
    experiment = replace(trained.experiment, model=replace(trained.experiment.model, **model))
    timm_files = Exported(("model.safetensors", "config.json"), 0.0)
    return card(replace(trained, run=run, experiment=experiment), {"timm": timm_files})


def test_the_card_of_an_unfinished_run_has_no_results(plain: Path) -> None:
    text = told(plain, {"status": "stopped", "steps": 7000, "recipe": None})
    assert "this is the checkpoint of step 3 of a run of 7,000 steps that is stopped" in text
    assert "Recall" not in text
    assert "- recipe" not in text
    assert "Recall" in told(plain, {})
    assert "Recall" not in told(plain, {"steps": 4}), "measured at another checkpoint"


def test_a_name_writes_no_lines_into_the_card(run: Path) -> None:
    lines = "x\n\n# Mine\n\n```\n\n````\n# Mine"
    info = json.loads((run / "run.json").read_text())
    config = info["config"] | {"label": lines}
    info |= {"label": lines, "recipe": lines, "config": config}
    write_json(run / "run.json", info)
    text = told(run, {})
    card, settings = text.split("<summary>")
    assert not re.search(r"^# Mine", card, re.MULTILINE)
    block = settings.partition("</summary>\n")[2].partition("</details>")[0]
    assert all(line.startswith("    ") for line in block.splitlines() if line)
    assert yaml.safe_load(block)["label"] == lines


@pytest.mark.parametrize("description", [{}, {"class_path": 3}, {"class_path": "a.b\n# Mine"}])
def test_an_export_does_not_need_the_loss(
    description: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    config = read_yaml(run / "config.yaml")
    config["losses"] = [{"loss": description}]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main([str(run), f"--output={tmp_path / 'exported'}", "--formats=timm"]) == 0
    assert "\n# Mine" not in (tmp_path / "exported" / "README.md").read_text()


@pytest.mark.parametrize(
    ("weights", "trunk_args", "expected"),
    [
        ({"file": "a.pth", "sha256": "0123"}, {"pretrained": True}, "a.pth, SHA-256 0123"),
        (None, {"pretrained": True}, "timm's, from timm/test_resnet.r160_in1k, licence apache-2.0"),
        (None, {"checkpoint_path": "b.pth"}, "b.pth"),
        (None, {"pretrained": False}, "drawn from the seed"),
    ],
)
def test_the_card_names_the_weights_at_the_start(
    weights: dict[str, str] | None, trunk_args: dict[str, Any], expected: str, plain: Path
) -> None:
    text = told(plain, {"weights": weights}, trunk_args=trunk_args)
    assert f"- weights at the start: {expected}\n" in text


def test_an_empty_folder_of_weights_is_not_asked(run: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    change(run, "model", weights=str(tmp_path / "weights"))
    trained = load_trained(run)
    assert trained.step == trained.run.info["steps"]


@pytest.mark.parametrize(("dataset", "seen"), [("folder", "upright, as"), ("cub", "as stored;")])
def test_the_card_says_whether_images_are_turned(run: Path, dataset: str, seen: str) -> None:
    change(run, "data", dataset=dataset)
    assert f"- pixels: red, green, blue {seen}" in told(run, {})


@pytest.mark.parametrize(("trunk", "ours"), [("test_resnet", False), ("googlenet", True)])
def test_the_card_imports_the_trunks_that_timm_lacks(trunk: str, ours: bool, plain: Path) -> None:
    text = told(plain, {}, trunk=trunk)
    assert ("\nregister()" in text) == ours
    assert ("Using it does not need\npml-regularizers, except for the trunk." in text) == ours


# ------------------------------------------------------------------------------------------- mistakes


def diverge(run: Path) -> None:
    network = rebuilt(run)
    nn.init.constant_(network.head.fc.weight, torch.nan)
    save(run, 9, network)


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no run": (lambda run: (run / "run.json").unlink(), "run.json: No such file or directory"),
    "broken run.json": (lambda run: (run / "run.json").write_text("{"), "run.json: is damaged"),
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), "has no checkpoint yet"),
    "broken checkpoint": (
        lambda run: saved_checkpoints(run)[0].write_bytes(b"x"),
        ".pt: missing or damaged (its SHA-256 is not",
    ),
    "settings that are no YAML": (
        lambda run: (run / "config.yaml").write_text("a: [1"),
        "config.yaml: not valid YAML",
    ),
    "other settings than those of the run": (
        lambda run: write_json(
            run / "run.json",
            json.loads((run / "run.json").read_text()) | {"files": {"config.yaml": "0" * 64}},
        ),
        "config.yaml: is damaged or no file (run.json has the SHA-256 000",
    ),
    "damaged versions": (
        lambda run: write_json(
            run / "run.json", json.loads((run / "run.json").read_text()) | {"versions": 5}
        ),
        "run.json: its versions is damaged",
    ),
    "no settings": (lambda run: (run / "config.yaml").unlink(), "config.yaml: cannot be read"),
    "unknown setting": (lambda run: change(run, "model", trunks=1), "config.yaml: "),
    "another network": (
        lambda run: change(run, "model", embedding_size=9),
        "config.yaml: describes another network",
    ),
    "no such trunk": (
        lambda run: change(run, "model", trunk="resnet5000"),
        "timm has no 'resnet5000'",
    ),
    "diverged": (diverge, "gives NaN or inf"),
}


Refused = Callable[..., None]


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
    refused(expected, "--formats=timm")


def test_what_a_killed_export_left_is_removed(run: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial" / "some"
    partial.mkdir(parents=True)
    assert main([str(run), "--formats=timm", f"--output={tmp_path / 'out'}"]) == 0
    assert not partial.parent.exists()
    assert not (tmp_path / "out" / "some").exists()


def test_a_second_export_is_sent_away(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone(tmp_path / "out"):
        arguments = [str(run), "--formats=timm"]
        assert main([*arguments, f"--output={tmp_path / 'out'}"]) == 2
    assert "out: another process exports to it; wait for it, or" in capsys.readouterr().err


def test_an_output_in_use_is_left_alone(tmp_path: Path, refused: Refused) -> None:
    mine = tmp_path / "out" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    for output in (mine.parent, mine, mine / "new"):
        refused(f"error: --output: {output}", "--formats=timm", f"--output={output}")
    assert mine.read_text() == "mine"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setattr(writing, "find_spec", lambda name: None)
    refused("--formats: onnx needs onnx, onnxscript, onnxruntime; pip install '.[export]'")


def test_files_that_give_other_embeddings_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:

    def spoiled(folder: Path) -> nn.Module:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        model.fc.weight.data[0] += 0.01
        return model

    monkeypatch.setattr(timm_files, "_reload", spoiled)
    refused("--formats: timm: the embeddings of what was written differ by ", "--formats=timm")


def test_a_network_that_onnx_cannot_hold(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such\noperator")

    monkeypatch.setattr(writing, "find_spec", lambda name: 1)
    monkeypatch.setattr(torch.onnx, "export", fail)
    refused("onnx: torch cannot export test_resnet (no such operator); leave it out")


class Doubled(nn.Module):
    """An attention without `fold`."""

    def forward(self, features: Tensor) -> Tensor:
        return 2 * features


def test_an_attention_that_does_not_fold_is_not_for_timm(
    run: Path, refused: Refused, trusting: Callable[..., None]
) -> None:
    change(run, "model", attention={"class_path": f"{__name__}.Doubled"})
    trusting()
    refused(f"--trust {__name__}", "--formats=timm")
    refused("timm has no Doubled", "--formats=timm", f"--trust={__name__}")


# -------------------------------------------------------------------------------------------- example


@pytest.fixture(scope="module")
def search() -> Callable[[Sequence[str]], int]:
    return runpy.run_path(str(ROOT / "examples" / "search_folder.py"))["main"]


@pytest.mark.parametrize("trunk", ["test_resnet", "test_convnext"])
def test_the_example_finds_the_nearest_images(
    trunk: str,
    trained: Path,
    pictures: Path,
    tmp_path: Path,
    search: Callable[[Sequence[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, output = tmp_path / "run", tmp_path / "exported"
    network = make_run(trained, run, trunk=trunk)
    assert main([str(run), f"--output={output}", "--formats=timm"]) == 0
    capsys.readouterr()
    queries = ["class5/2.png", "class1/0.png"]
    paths = [str(pictures / name) for name in queries]
    assert search([str(output), str(pictures), *paths, "--neighbours=6"]) == 0

    seen = views(pictures, network)
    names = list(seen)
    assert len(names) == CLASSES * IMAGES
    embeddings = embed(network, torch.stack(list(seen.values()))).double()
    lines = iter(capsys.readouterr().out.splitlines())
    for query in queries:
        assert next(lines) == str(pictures / query)
        distances = (embeddings - embeddings[names.index(query)]).norm(dim=1)
        nearest = distances.sort()
        for expected, index in zip(nearest.values[:6], nearest.indices[:6], strict=True):
            distance, path = next(lines).split()
            assert path == str(pictures / names[index])
            assert float(distance) == pytest.approx(expected.item(), abs=PRINTED)
    assert next(lines, None) is None


@pytest.fixture(scope="module")
def searchable(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("searchable") / "out"
    assert main([str(plain), f"--output={output}", "--formats=timm"]) == 0
    return output


def test_the_example_shows_photographs_upright(
    searchable: Path,
    pictures: Path,
    tmp_path: Path,
    search: Callable[[Sequence[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(pictures / "class2" / "1.png") as image:
        image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    query = str(tmp_path / "turned.png")
    assert search([str(searchable), str(pictures), query, "--neighbours=1"]) == 0
    _, nearest = capsys.readouterr().out.splitlines()
    distance, path = nearest.split()
    assert path == str(pictures / "class2" / "1.png")
    assert float(distance) == pytest.approx(0, abs=PRINTED)


@pytest.mark.parametrize("missing", ["exported", "images", "query", "decodable query"])
def test_the_example_says_what_is_missing(
    missing: str,
    searchable: Path,
    pictures: Path,
    search: Callable[[Sequence[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    query = pictures / "class0" / "0.png"
    arguments, wrong = {
        "exported": ([searchable / "nowhere", pictures, query], 0),
        "images": ([searchable, searchable, query], 1),
        "query": ([searchable, pictures, pictures / "class0" / "99.png"], 2),
        "decodable query": ([searchable, pictures, searchable / "config.json"], 2),
    }[missing]
    with pytest.raises(SystemExit) as stopped:
        search(list(map(str, arguments)))
    assert stopped.value.code == 2
    assert str(arguments[wrong]) in capsys.readouterr().err


def test_the_example_shows_the_images_upright(
    searchable: Path,
    tmp_path: Path,
    search: Callable[[Sequence[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a page that loads nothing; a photograph on its side is found as the upright one."""
    folder, exif = tmp_path / "a <b>", Image.Exif()
    folder.mkdir()
    upright = Image.new("L", (30, 60))
    upright.paste(255, (0, 0, 30, 20))  # its sky
    upright.save(folder / "0.png")
    exif[0x0112] = 6  # turn it clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(folder / "1.png", exif=exif)
    upright.transpose(Image.Transpose.ROTATE_180).save(folder / "2.png")
    page = tmp_path / "neighbours.html"
    query = str(folder / "0.png")
    assert search([str(searchable), str(folder), query, f"--html={page}"]) == 0
    distances = [line.split(maxsplit=1)[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert distances[:2] == ["0.0000"] * 2 and float(distances[2]) > 0
    text = page.read_text()
    pictures = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', text)
    assert len(pictures) == text.count("<img") == 4 and "http" not in text
    assert text.count("a &lt;b&gt;") == 4 and "a <b>" not in text
    for picture in pictures[:3]:
        with Image.open(io.BytesIO(base64.b64decode(picture))) as shown:
            assert shown.size == (30, 60)
            assert np.asarray(shown)[5].mean() > 200 > 50 > np.asarray(shown)[50].mean()

    with pytest.raises(SystemExit) as stopped:
        search([str(searchable), str(folder), query, f"--html={tmp_path / 'none' / 'page.html'}"])
    assert stopped.value.code == 2
    assert "--html: " in capsys.readouterr().err
    before = (folder / "0.png").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        search([str(searchable), str(folder), query, f"--html={query}"])
    assert (stopped.value.code, (folder / "0.png").read_bytes()) == (2, before)
    assert f"--html: {query} is there already" in capsys.readouterr().err
