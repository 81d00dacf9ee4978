"""The exported network equals the checkpoint's, read back by timm; its card; mistakes write nothing."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.models import save_for_hf
from torch import Tensor, nn

from benchmarks.backbones import register
from benchmarks.building.images import build_datasets, show_to
from benchmarks.export import writing
from benchmarks.export.__main__ import main
from benchmarks.export.card import card, preprocessing
from benchmarks.export.trained import embed, load_trained
from benchmarks.records.files import read_json, write_json
from benchmarks.settings.command import parse
from benchmarks.settings.data import Data
from benchmarks.settings.yaml_files import dump, read_yaml
from tests.benchmarks.export.conftest import SIZE, VEM, change, make_run, rebuilt, save, views
from tests.support.processes import ROOT
from tests.support.tolerances import assert_close

NETWORKS = {
    "ViT": {"trunk": "test_vit", "trunk_args": {"img_size": SIZE}},
    "ResNet": {
        **{"pool": "max", "bias": True, "weights": "gone.pth"},
        "trunk_args": {"pretrained": True, "output_stride": 8},
    },
    "ConvNeXt, folded": {"trunk": "test_convnext", "pool": "max", "attention": VEM},
}


def code_of_card(folder: Path) -> str:
    text = (folder / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(code)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_cards_code_embeds_as_the_checkpoint(name, trained, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "timm.models._builder.load_state_dict_from_hf", lambda *_, **__: pytest.fail("a download")
    )
    run, output = tmp_path / "run", tmp_path / "exported"
    network = make_run(trained, run, **NETWORKS[name])
    assert main([str(run), f"--output={output}"]) == 0
    monkeypatch.chdir(output)
    shutil.copy(pictures / "class3" / "1.png", "image.jpg")
    found: dict[str, Any] = {}
    exec(code_of_card(output), found)
    assert_close(found["embedding"], embed(network, views(pictures, network)["class3/1.png"][None]))


def test_the_pages_graph_takes_batches_of_any_size(exported, tmp_path, monkeypatch):
    """What the page hands to `torch.onnx.export`, without the package onnx."""
    given: dict[str, Any] = {}
    keep = lambda *arguments, **options: given.update(options, all=arguments)  # noqa: E731
    monkeypatch.setattr(torch.onnx, "export", keep)
    (tmp_path / "exported").symlink_to(exported)
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)
    exec(code, {})
    model, seen, _ = given["all"]
    graph = torch.export.export(model, seen, dynamic_shapes=given["dynamic_shapes"]).module()
    for n in (1, 3):
        images = torch.randn(n, *seen[0].shape[1:])
        assert_close(graph(images).detach(), model(images).detach())


VIEWS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("test_resnet", {}),
    "given": ("test_resnet", {"resize": 67, "keep_aspect": False, "interpolation": "bicubic"}),
    "no crop": ("test_resnet", {"augmentation": "multi_resolution", "keep_aspect": True}),
    "the trunk's": ("googlenet", {"interpolation": "lanczos"}),
}


@pytest.mark.parametrize("name", VIEWS)
def test_timm_prepares_images_as_the_runner_does(name, pictures):
    trunk_name, given = VIEWS[name]
    register()
    trunk = timm.create_model(trunk_name, num_classes=0, global_pool="")
    data = Data(dataset="folder", root=pictures, image_size=SIZE, **given)
    _, test, _ = show_to(trunk, build_datasets(data), data)
    transform = timm.data.create_transform(**preprocessing(data, trunk))
    with Image.open(pictures / test.name(0)) as image:
        assert_close(transform(image), test[0][0])


def test_glyphs_are_gray(trained, tmp_path, capsys):
    run, output = tmp_path / "run", tmp_path / "exported"
    make_run(trained, run)
    change(run, "data", dataset="glyphs")
    network = rebuilt(run)
    save(run, 3, network)
    output.mkdir()
    assert main([str(run), f"--output={output}"]) == 0, "it was empty"
    assert "Search with it" not in capsys.readouterr().out, "there is no folder of images"
    (tmp_path / "new").touch()
    mode = (tmp_path / "new").stat().st_mode
    assert {path.stat().st_mode for path in output.iterdir()} == {mode}, "others may read them"
    assert {path.name for path in tmp_path.iterdir()} == {"exported", "run", "new"}, "no lock stays"
    model = timm.create_model(f"local-dir:{output}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    assert 'convert("L")' in code_of_card(output)
    pixels = np.arange(SIZE * SIZE).reshape(SIZE, SIZE).astype(np.uint8)
    view = transform(Image.fromarray(pixels))
    assert_close(view[0], torch.from_numpy(pixels / 127.5 - 1))
    assert_close(embed(model, view[None]), embed(network, view[None]))


def test_timm_resizes_to_the_same_size():
    trunk = timm.create_model("test_resnet", num_classes=0, global_pool="")
    for resize in range(227, 2 * 227):
        view = preprocessing(Data(dataset="folder", image_size=227, resize=resize), trunk)
        assert floor(227 / view["crop_pct"]) == resize


def change_record(run: Path, **entries: Any) -> None:
    write_json(run / "run.json", read_json(run / "run.json") | entries)


@pytest.fixture
def not_exported(run: Path, tmp_path: Path, refused: Callable[..., str]) -> Callable[..., None]:
    """Checks that an export of the run is refused, and leaves nothing."""

    def check(expected: str, *arguments: str) -> None:
        before = sorted(tmp_path.iterdir())
        assert expected in refused(main, run, f"--output={tmp_path / 'out'}", *arguments)
        assert sorted(tmp_path.iterdir()) == before

    return check


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda run: shutil.rmtree(run / "checkpoints"), "has no checkpoint"),
        (lambda run: [p.write_bytes(b"") for p in (run / "checkpoints").iterdir()], "checkpoints"),
        (lambda run: change_record(run, files={"config.yaml": "0" * 64}), "yaml: is damaged"),
        (lambda run: change_record(run, seed=1), "is of a run with"),
        (lambda run: change(run, "model", trunks=1), "config.yaml: "),
        (lambda run: change(run, "model", embedding_size=9), "yaml: describes another network"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(make, expected, run, not_exported):
    make(run)
    not_exported(expected)


@pytest.mark.filterwarnings("ignore")  # of timm's
def test_a_trunk_whose_pooling_timm_does_not_share_is_refused(trained, tmp_path, refused):
    make_run(trained, tmp_path / "run", trunk="mobilenetv3_small_050", trunk_args={})
    line = refused(main, tmp_path / "run", f"--output={tmp_path / 'out'}")
    assert "gives other embeddings" in line


def test_an_output_in_use_is_left_alone(tmp_path, not_exported):
    mine = tmp_path / "out" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    not_exported(f"--output: {mine.parent} is not an empty folder")
    not_exported(f"--output: {mine / 'new'}", f"--output={mine / 'new'}")
    assert mine.read_text() == "mine"


def test_files_that_give_other_embeddings_are_not_kept(monkeypatch, not_exported):
    def spoiled(model: nn.Module, folder: Path, **options: Any) -> None:
        model.fc.weight.data[0] += 0.01
        save_for_hf(model, folder, **options)

    monkeypatch.setattr(writing, "save_for_hf", spoiled)
    not_exported("embeddings of what was written differ by ")


class Doubled(nn.Module):
    """An attention without `fold`."""

    def forward(self, features: Tensor) -> Tensor:
        return 2 * features


def test_an_attention_that_does_not_fold_is_not_for_timm(run, not_exported, trusting):
    change(run, "model", attention={"class_path": f"{__name__}.Doubled"})
    trusting()
    not_exported(f"--trust {__name__}")
    not_exported("timm has no Doubled", f"--trust={__name__}")


@pytest.fixture
def tested(trained: Path, tmp_path: Path) -> Path:
    """A run whose test had enough images for a threshold."""
    run = shutil.copytree(trained, tmp_path / "tested")
    verification = read_json(run / "run.json")["verification"]
    for rate in verification["rates"]:
        rate["threshold"] = None if rate["false_accepts"] < 0.001 else 0.5
    change_record(run, verification=verification)
    return run


def test_the_thresholds_of_the_test_are_exported(trained, tested, tmp_path, capsys):
    """Those of the checkpoint that was tested, and of no other; none without a threshold."""
    info, output = read_json(tested / "run.json"), tmp_path / "out"
    assert main([str(tested), f"--output={output}"]) == 0
    assert "approximate" not in capsys.readouterr().out
    stored = read_json(output / "thresholds.json")
    tested_on = {"data": info["data"]["name"], "images": info["data"]["test_images"]}
    assert stored.pop("tested_on") == tested_on
    network = {"run": info["name"], "train_classes": info["data"]["train_classes"]}
    assert stored.pop("tested_network") == network and stored["approximate"] is False
    assert stored.pop("identification") == info["identification"]
    assert stored.items() > info["verification"].items()
    assert "approximate" not in (output / "README.md").read_text()
    none = read_json(trained / "run.json")["verification"]
    for changes in ({"steps": 4}, {"verification": none}):
        write_json(tested / "run.json", info | changes)
        assert load_trained(tested).thresholds is None
    del info["identification"]  # a record of older code
    write_json(tested / "run.json", info)
    assert load_trained(tested).thresholds["identification"] is None


def test_the_thresholds_of_a_tested_run_of_the_same_method(tested, tmp_path, refused, capsys):
    """For a network of all classes, whose card shows that run's results; of another training they mean nothing."""
    info, run = read_json(tested / "run.json"), shutil.copytree(tested, tmp_path / "run")
    config = info["config"]
    classes = {"train_classes": 1 + info["data"]["train_classes"], "split": "all"}
    own = dict.fromkeys(info["metrics"], 0.925)  # on the images that it was trained on
    mine = info | {"verification": None, "data": info["data"] | classes, "metrics": own}
    del mine["identification"]
    write_json(run / "run.json", mine)
    words = [str(run), f"--output={tmp_path / 'out'}", f"--thresholds={tested}"]
    assert "--thresholds" in refused(main, tested, *words[1:])
    # The checkpoint knows its own settings: those of the other run are what differs.
    data, evaluation = config["data"] | {"split": "all"}, config["evaluation"] | {"every": 5}
    info["config"] = config = config | {"data": data, "evaluation": evaluation}
    write_json(tested / "run.json", info)
    assert main([words[0], f"--output={tmp_path / 'none'}"]) == 0
    card = (tmp_path / "none" / "README.md").read_text()
    assert "\nNot tested: this network was trained on all " in card and "Recall@" not in card
    capsys.readouterr()
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "Known or unknown? The test has" in told and "This is approximate" in told
    stored = read_json(tmp_path / "out" / "thresholds.json")
    assert stored["rates"] == info["verification"]["rates"] and stored["approximate"] is True
    card = (tmp_path / "out" / "README.md").read_text()
    assert "are approximate" in card and "Known or unknown? The test has" in card
    assert f"| {100 * info['metrics']['recall_at_1']:.2f} |" in card and "92.50" not in card
    assert f"{info['data']['train_classes']} classes (run {info['name']}):\n\n## " in card

    words[1] += "2"
    length = config["optimization"]["steps"]
    longer = config | {"optimization": config["optimization"] | {"steps": 20 * length}}
    other = config | {"losses": [], "data": config["data"] | {"batch_size": 4}}
    chosen = {"selection": {"step": length, "value": 0.5}, "config": longer}
    for more, message in (
        ({"config": other}, "differ in data.batch_size, losses"),
        ({"data": info["data"] | {"view": {}}}, "differ in data (view); expected"),
        ({"config": longer}, "differ in optimization.steps; expected"),
        (chosen | {"selection": {"step": 3 * length}}, "differ in optimization.steps; expected"),
        ({"weights": {"file": "other", "sha256": "0"}}, "differ in model.weights; expected"),
        ({"verification": None}, "--evaluation.verification=true"),
    ):
        write_json(tested / "run.json", info | more)
        assert message in refused(main, *words)
    assert not (tmp_path / "out2").exists()
    write_json(tested / "run.json", info | chosen)
    assert main(words) == 0, "validation classes chose this length"


def told(plain: Path, info: dict[str, Any], **changes: dict[str, Any]) -> str:
    """The card of a run whose run.json, and whose settings by their section, say something else."""
    trained = load_trained(plain)
    run, old = replace(trained.run, info=trained.run.info | info), trained.experiment
    sections = {name: replace(getattr(old, name), **values) for name, values in changes.items()}
    return card(replace(trained, run=run, experiment=replace(old, **sections)), 0.0)


def settings_of(card: str) -> Any:
    """The settings of a card, all of whose lines are indented."""
    block = card.partition("</summary>\n")[2].partition("</details>")[0]
    assert all(line.startswith("    ") for line in block.splitlines() if line)
    return yaml.safe_load(block)


def test_the_card_tells_what_was_measured(trained, exported):
    text = (exported / "README.md").read_text()
    info = read_json(trained / "run.json")
    front = yaml.safe_load(text.split("---\n", 2)[1])
    assert (front["library_name"], front["license"]) == ("timm", "unknown")
    assert info["outputs"]["descriptor"]
    assert "†" not in text, "HORDE's descriptor is not exported"
    [row] = re.findall(rf"^\| {re.escape(info['label'])} \|(.*)\|$", text, re.MULTILINE)
    percents = [float(cell) for cell in row.split("|")[:-1]]
    assert percents == [round(100 * value, 2) for value in info["metrics"].values()]
    assert f" at commit {info['commit']}." in text


def test_a_card_names_ones_own_folder_and_no_path_to_it(plain):
    data = {"dataset": "folder", "root": Path("/home/me/my shoes")}
    paths = {"root": "/home/me/my= shoes", "weights": "/home/me,/a b.pt", "url": "https://x.org/a"}
    info = {"command": "run.py --x=/home/me", "config": {"data": {**paths, "stage": "a/b"}}}
    text = told(plain, info, data=data)
    assert " on my shoes\n" in text
    kept = {"root": "my= shoes", "weights": "a b.pt", "url": "https://x.org/a", "stage": "a/b"}
    assert settings_of(text) == {"data": kept} and "/home" not in text


def test_the_cards_command_trains_the_same(trained, pictures, exported, tmp_path):
    """With its settings in a file, and the folder of images put in."""
    text = (exported / "README.md").read_text()
    [command] = re.findall("`python (benchmarks/run.py [^`]+)`", text)
    (tmp_path / "settings.yaml").write_text(dump(settings_of(text)))
    words = command.replace("settings.yaml", f"{tmp_path / 'settings.yaml'}").split()[1:]
    words[words.index("RUN")] = read_yaml(trained / "config.yaml")["output"]
    again = parse([*words, f"--data.root={pictures}"])
    assert again.experiment == parse([f"--config={trained / 'config.yaml'}"]).experiment


def test_the_card_of_an_unfinished_run_has_no_results(plain):
    text = told(plain, {"status": "stopped", "steps": 7000})
    assert "this is the checkpoint of step 3 of a run that is stopped" in text
    assert "Recall" not in text
    assert "Recall" in told(plain, {})
    assert "Recall" not in told(plain, {"steps": 4}), "measured at another checkpoint"


def test_a_setting_writes_no_lines_into_the_card(plain):
    lines = "x\n\n# Mine\n\n```\n\n````\n# Mine"
    text = told(plain, {"config": {"label": lines}})
    assert "# Mine" not in text.partition("<summary>")[0]
    assert settings_of(text)["label"] == lines


def test_the_card_imports_the_trunks_that_timm_lacks(plain):
    for trunk, ours in (("test_resnet", False), ("googlenet", True)):
        assert ("\nregister()" in told(plain, {}, model={"trunk": trunk})) == ours
