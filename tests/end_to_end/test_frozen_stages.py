"""Runs whose trunk has frozen stages, with and without kept outputs."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.building.frozen_stages import FrozenStages, stage_names
from benchmarks.building.images import build_datasets, show_to
from benchmarks.building.network import EmbeddingModel, build_model
from benchmarks.records.run_folder import saved_checkpoints
from benchmarks.run import main
from benchmarks.settings.command import parse
from benchmarks.settings.errors import ConfigError
from benchmarks.training.cached_views import CachedViews
from tests.benchmarks.runs import finished, forget, mark_unfinished, same_on_all
from tests.support.fake_trees import write_pictures
from tests.support.processes import FROZEN_STATISTICS, NO_BATCH_STATISTICS, TINY, horde

_, WEIGHTS = FROZEN_STATISTICS
FROZEN = ("--model.frozen_stages=2", "--model.trunk_args={output_stride: 8}", WEIGHTS)
SHORT = ("--optimization.steps=4", "--checkpoint_every=2", "--data.batch_size=20")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "cache"


@pytest.fixture
def cached(data: str, cache: Path) -> list[str]:
    return [data, *TINY, *FROZEN, *SHORT, "--data.cached_views=3", f"--data.cache={cache}"]


def views_of(settings: list[str]) -> tuple[CachedViews, EmbeddingModel]:
    """The training images of a run and its network, as they start."""
    experiment = parse(settings).experiment
    torch.manual_seed(experiment.seed)
    model = build_model(experiment.model, experiment.data).eval()
    images = show_to(model.trunk, build_datasets(experiment.data), experiment.data).train
    return CachedViews(Accelerator(cpu=True), model, images, experiment), model


def weights(folder: Path) -> dict[str, Tensor]:
    """The network's weights in the last checkpoint."""
    found: dict[str, Tensor] = torch.load(saved_checkpoints(folder)[-1])["model"]
    return found


def test_a_cut_trunk_computes_the_same():
    for name, stages, behind in (
        ("test_resnet", 2, "layer2"),
        ("test_convnext", 1, "stages.0"),
        ("test_vit", 3, "blocks.2"),
        ("mobilenetv3_small_050", 3, "blocks.2"),  # its last layers stand behind its features
    ):
        fixed = {"dynamic_img_size": False} if name == "test_vit" else {}
        trunk = timm.create_model(name, num_classes=0, global_pool="", **fixed).eval()
        x = torch.randn(2, 3, *trunk.default_cfg["input_size"][1:])
        frozen = FrozenStages(trunk, stages, x)
        assert stage_names(trunk)[stages - 1] == behind
        maps = frozen.lower(x)
        torch.testing.assert_close(frozen.upper(maps), trunk(x))
        frozen.upper(maps).sum().backward()
        trained = {name for name, p in trunk.named_parameters() if p.requires_grad}
        assert trained and trained == {n for n, p in trunk.named_parameters() if p.grad is not None}
        assert not any(n == behind or n.startswith(f"{behind}.") for n in trained)
        assert not trained & set(frozen.frozen.state_dict())


class Twice(nn.Module):
    """A trunk whose features need two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": "^$", "blocks": [("^(first|second|third)$", None)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)) + x)


def test_what_cannot_be_frozen():
    with pytest.raises(ConfigError, match="Twice cannot be cut behind second: "):
        FrozenStages(Twice(), 2, torch.randn(1, 3, 4, 4))


def test_a_run_with_kept_outputs(cached, cache, tmp_path):
    """Frozen stages stay as they are; what is kept is their output of a view, and is tested as the images are."""
    found = finished([*cached, "--evaluation.every=2"], tmp_path / "kept")
    kept, model = views_of(cached)
    start, end = model.state_dict(), weights(tmp_path / "kept")
    moved = {name for name in end if not torch.equal(end[name], start[name])}
    frozen = ("trunk.conv1.", "trunk.bn1.", "trunk.layer1.", "trunk.layer2.")
    assert not [name for name in moved if name.startswith(frozen)]
    assert {"trunk.layer3.0.bn1.running_mean", "trunk.layer4.0.conv1.weight"} <= moved

    images = kept.open().images
    assert len(kept) == len(images) and len(set(kept.view_seeds)) == 3
    for index, draw in ((0, 0), (0, 4), (17, 2), (len(images) - 1, 3)):
        view, label, _ = images[index, kept.view_seeds[draw % 3]]
        output, *rest = kept[index, draw]
        assert rest == [label, index]
        torch.testing.assert_close(output, model.frozen_stages.lower(view[None])[0])
    assert not torch.equal(kept[0, 0][0], kept[0, 1][0])
    torch.testing.assert_close(kept[3][0], model.frozen_stages.lower(images[3][0][None])[0])

    run = [argument for argument in cached if "cached_views" not in argument]
    anew = finished([*run, "--evaluation.every=2"], tmp_path / "anew")
    assert found["before_training"] == pytest.approx(anew["before_training"])

    with mock.patch.object(CachedViews, "_compute", pytest.fail):  # other batches, the same outputs
        finished([*cached, "--data.batch_draw=1", "--optimization.steps=2"], tmp_path / "other")


def test_other_outputs_are_kept_elsewhere(cached):
    others = (
        *("--model.frozen_stages=1", "--model.trunk_args={output_stride: 16}", "--precision=bf16"),
        *("--data.cached_views=2", "--data={train_classes: 12, draw_classes: true}", "--seed=1"),
    )
    paths = {views_of([*cached, *more])[0].path for more in ([], *([other] for other in others))}
    assert len(paths) == 1 + len(others)


def test_kept_outputs_that_do_not_fit_or_are_damaged(cached, tmp_path, refused):
    run = [*cached, f"--data.cache={tmp_path / 'cache'}", "--optimization.steps=2"]
    elsewhere = [*run, "--report=false", f"--output={tmp_path / 'elsewhere'}"]
    assert "data.cached_views: 0.0" in refused(main, *elsewhere, "--data.cache_gib=1e-3")
    forget()
    line = refused(main, *elsewhere, "--data.cache=/dev/null/x")
    assert "data.cache: expected a folder to write to, got /dev/null/x" in line
    assert not list(tmp_path.iterdir())
    finished(run, tmp_path / "run")
    file = max((tmp_path / "cache").glob("*/outputs.bin"), key=lambda path: path.stat().st_size)
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    forget()
    assert f"data.cache: {file.parent} is damaged; delete it" in refused(main, *elsewhere)
    assert damaged == file.read_bytes()
    assert not (tmp_path / "elsewhere").exists()


def test_outputs_of_changed_photographs_are_others(tmp_path):
    """Also if names and sizes stay as they are; not if the same files were only written again."""
    photos = [f"{name}/{number}.jpg" for name in "abcd" for number in range(4)]
    write_pictures(tmp_path / "photos", photos, different=len(photos))
    settings = [
        *("--data.dataset=folder", f"--data.root={tmp_path / 'photos'}", "--data.image_size=32"),
        *("--data.train_classes=null", "--data.cached_views=1", f"--data.cache={tmp_path}"),
        *("--model.frozen_stages=2", "--model.trunk_args={}"),
    ]
    paths = []
    for changed in (0, 0, 1):
        for path in (tmp_path / "photos").rglob("*.jpg"):
            content = bytearray(path.read_bytes())
            content[25] ^= changed  # of the table of quantisation
            path.write_bytes(content)
        paths.append(views_of(settings)[0].path)
    assert paths[0] == paths[1] != paths[2]


def test_a_killed_run_ends_as_if_it_had_not_been(cached, cache, tmp_path):
    cached += ["--data={batch_draw: 2, train_classes: 20, draw_classes: true}"]
    finished(cached, tmp_path / "run")
    whole = weights(tmp_path / "run")
    saved_checkpoints(tmp_path / "run")[-1].unlink()
    mark_unfinished(tmp_path / "run")
    shutil.rmtree(cache)  # may be deleted at any time
    finished([*cached, "--resume"], tmp_path / "run")
    torch.testing.assert_close(weights(tmp_path / "run"), whole, rtol=0, atol=0)


@pytest.mark.slow
def test_several_processes_train_as_one(cached, tmp_path, pool):
    trunk = timm.create_model("test_convnext", in_chans=1, num_classes=0, global_pool="")
    save_file(trunk.state_dict(), tmp_path / "weights.safetensors")
    settings = [*cached, *NO_BATCH_STATISTICS, horde(), "--precision=float64"]
    settings += [f"--model.weights={tmp_path / 'weights.safetensors'}"]
    settings += ["--optimization.steps=2", "--data.cached_views=1", "--data.max_classes=5"]
    settings += ["--evaluation.descriptor=false", "--data.draw_classes=true", "--data.batch_draw=1"]
    one, _ = same_on_all(pool, settings, tmp_path, (1, 2))
    names = [name for name in one[0]["gradients"] if name.startswith("model.trunk")]
    assert names and not [name for name in names if "stages.1." in name or "stem" in name]
