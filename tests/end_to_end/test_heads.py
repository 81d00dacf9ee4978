"""Where a run's head starts, what its test adds, and the untrained trunk beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from benchmarks import evaluate
from benchmarks.evaluation import tester
from benchmarks.evaluation.networks import load_export, load_network
from benchmarks.export.__main__ import main as export
from benchmarks.records.files import read_json
from pml_regularizers import whitening_init_
from tests.benchmarks.runs import ATTENTION, finished, mark_unfinished, same_on_all
from tests.end_to_end.test_protocols import last_network, rebuilt, stacked
from tests.support.processes import FROZEN_STATISTICS, NO_BATCH_STATISTICS, TINY

SIZE = 8


@pytest.fixture
def short(data: str) -> list[str]:
    settings = [data, *TINY, "--optimization.steps=4", "--data.batch_size=20"]
    return [*settings, f"--model.embedding_size={SIZE}", "--checkpoint_every=2"]


def pooled(model: Any, images: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.trunk(stacked(images)).mean(dim=(2, 3))


def attended(model: Any, images: Any) -> list[torch.Tensor]:
    """What the head's layer would get of the training and the test images."""
    parts = (pooled(model, part) for part in (images.train, images.test))
    return [model.head.attention(features).detach() for features in parts]


def assert_tested_again_and_exported(folder: Path, metrics: dict[str, float]) -> None:
    again = folder.with_name("again.json")
    assert evaluate.main([str(folder), f"--output={again}"]) == 0
    assert read_json(again)["metrics"] == metrics
    assert export([str(folder), f"--output={folder.with_name('exported')}"]) == 0


def measured(rows: Any, images: Any) -> Any:
    """Tolerant: a near tie may have another order."""
    found = tester.measure(torch.as_tensor(rows).float(), images.labels, [1, 2, 4, 8])
    return pytest.approx(found, abs=0.005)


def reduced(seen: torch.Tensor, new: torch.Tensor) -> np.ndarray:
    return PCA(SIZE, svd_solver="full").fit(seen.double()).transform(new.double())


def test_a_run_starts_from_the_untrained_trunk(short, tmp_path, monkeypatch):
    run = [*short, *FROZEN_STATISTICS, "--model.head=pca"]
    passes, embed = [], tester.Evaluator.embed

    def counted(evaluator: Any, images: Any, *more: Any) -> Any:
        passes.append(len(images))
        return embed(evaluator, images, *more)

    with monkeypatch.context() as patch:
        patch.setattr(tester.Evaluator, "embed", counted)
        record = finished(run, tmp_path / "run")
    sizes = [record["data"][f"{part}_images"] for part in ("train", "test", "test")]
    assert passes == sizes, "head and outputs share one pass over the training images"
    model, images = rebuilt(tmp_path / "run")
    seen, new = (pooled(model.eval(), part) for part in (images.train, images.test))
    outputs = record["outputs"]
    assert {*outputs} == {"untrained_features", "untrained_pca", "untrained_whitened"}
    assert outputs["untrained_features"] == measured(new, images.test)
    assert outputs["untrained_pca"] == measured(reduced(seen, new), images.test)
    layer = torch.nn.Linear(seen.shape[1], SIZE)
    whitened = whitening_init_(layer, seen, images.train.labels)(new).detach()
    assert outputs["untrained_whitened"] == measured(whitened, images.test)
    assert {*record["per_class_of_outputs"]} == {*outputs}
    assert record["before_training"] == pytest.approx(outputs["untrained_pca"], abs=0.005)
    _, _, checkpoint = last_network(tmp_path / "run")
    start = PCA(SIZE, svd_solver="full").fit(seen.double())
    weight = checkpoint["model"]["head.fc.weight"].double()
    cosines = torch.cosine_similarity(weight, torch.from_numpy(start.components_)).abs()
    assert cosines.min() > 0.9 and cosines.max() < 1 - 1e-9, "it has trained from there"
    # Before the first checkpoint, a run that goes on starts again: in the same place.
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.unlink()
    mark_unfinished(tmp_path / "run")
    again = finished([*run, "--resume"], tmp_path / "run")
    assert (again["metrics"], again["outputs"]) == (record["metrics"], outputs)


def test_a_run_without_a_head_gets_one_in_its_test(short, tmp_path, refused):
    folder, run = tmp_path / "run", [*short, *FROZEN_STATISTICS, "--model.head=none"]
    run += [ATTENTION, "--data.split=validation"]
    record = finished(run, folder)
    record["metrics"].pop("variance_correlation")
    model, images, checkpoint = last_network(folder)
    assert not [name for name in checkpoint["model"] if "fc" in name]
    expected = reduced(*attended(model, images))
    assert record["metrics"] == measured(expected, images.test)
    assert "outputs" in record and not record["outputs"], "validation classes: no untrained trunk"

    network = load_network(folder).network
    with torch.no_grad():
        found = network(stacked(images.test)).double()
    unit = torch.from_numpy(expected / np.linalg.norm(expected, axis=1, keepdims=True))
    torch.testing.assert_close(found @ found.T, unit @ unit.T, rtol=0, atol=1e-4)
    assert_tested_again_and_exported(folder, record["metrics"])
    mark_unfinished(folder)  # what is left of a layer may be of other weights
    line = refused(export, folder, f"--output={tmp_path / 'lost'}")
    assert "has no embedding layer yet" in line
    assert finished([*run, "--resume"], folder)["metrics"].items() > record["metrics"].items()


def test_all_trained_features_take_the_layers_place(short, tmp_path, refused):
    folder, settings = tmp_path / "run", [*short, *FROZEN_STATISTICS, "--model.head=pca"]
    record = finished([*settings, "--model.replace_layer=features", ATTENTION], folder)
    record["metrics"].pop("variance_correlation")
    model, images, checkpoint = last_network(folder)
    assert len(checkpoint["model"]["head.fc.weight"]) == SIZE, "the layer has trained"
    seen, new = attended(model, images)
    centred = new - seen.mean(dim=0)
    assert record["metrics"] == measured(centred, images.test)
    assert_tested_again_and_exported(folder, record["metrics"])
    network, _ = load_export(tmp_path / "exported")
    with torch.no_grad():
        torch.testing.assert_close(network(stacked(images.test)), centred, rtol=0, atol=1e-5)

    layer, again = folder / "head.npz", [folder, f"--output={tmp_path / 'lost.json'}"]
    layer.write_bytes(layer.read_bytes()[:100])
    assert "head.npz: is damaged" in refused(evaluate.main, *again)
    layer.unlink()  # nor is it the layer that was thrown away
    assert "head.npz: is missing" in refused(evaluate.main, *again)


def test_whitened_features_take_the_layers_place(short, tmp_path):
    settings = [*short, *FROZEN_STATISTICS, "--model.replace_layer=whitened"]
    record = finished([*settings, f"--evaluation.features={SIZE}"], tmp_path / "run")
    assert record["metrics"] == record["outputs"]["features_whitened"]
    assert record["metrics"] != record["outputs"]["features_pca"]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["pca", "none"])
def test_heads_on_several_processes(head, short, tmp_path, pool):
    settings = [*short, *NO_BATCH_STATISTICS, f"--model.head={head}", "--evaluation.features=6"]
    settings += ["--precision=float64", "--optimization.steps=2", "--data.max_classes=6"]
    same_on_all(pool, settings, tmp_path, (1, 2))
    one, two = (read_json(tmp_path / p / "run.json") for p in ("1", "2"))
    for kind in ("metrics", "outputs", "per_class_of_outputs"):
        assert one[kind] == two[kind]
    names = {"features", "features_centred", "features_pca", "features_whitened"}
    assert names < {*one["outputs"]}
