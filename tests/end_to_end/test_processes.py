"""The runner on several processes: as on one, in batches, losses, gradients and metrics."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.records.run_folder import load_checkpoint, saved_checkpoints
from benchmarks.records.steps import read_table
from tests.benchmarks.runs import (
    ATTENTION,
    REGULARIZERS,
    assert_same_trace,
    finished,
    mark_unfinished,
    run_traced,
    same_on_all,
)
from tests.support.fake_trees import inshop, write_pictures
from tests.support.pool import Pool, Processes
from tests.support.processes import FROZEN_STATISTICS, NO_BATCH_STATISTICS, TINY, horde

PML = "pytorch_metric_learning.losses."
ALL_LOSSES = ", ".join(
    [
        horde(f"{PML}ArcFaceLoss").removeprefix("--losses=[").removesuffix("]"),
        *(
            f"{{weight: 0.5, loss: {{class_path: {PML}{name}}}}}"
            for name in ("ContrastiveLoss", "TripletMarginLoss", "ProxyAnchorLoss", "ArcFaceLoss")
        ),
        REGULARIZERS,
    ]
)


def test_several_processes_train_as_one(data: str, tmp_path: Path, pool: Pool) -> None:
    settings = [data, *TINY, *NO_BATCH_STATISTICS, f"--losses=[{ALL_LOSSES}]", ATTENTION]
    settings += ["--diagnose_every=2", "--optimization.steps=2", "--precision=float64"]
    settings += ["--data.batch_size=15", "--data.max_classes=5", "--evaluation.descriptor=false"]
    one, _ = same_on_all(pool, settings, tmp_path, (1, 3))
    assert len(one) == 2
    logged = read_table(tmp_path / "3" / "records", "training")["loss"]
    assert logged == pytest.approx([row["loss"].item() for row in one])
    own = [name for name in one[0]["gradients"] if name.startswith("loss.")]
    # HORDE's projections, embeddings and class weights; proxies, class weights; JRD's class weights
    assert len(own) == 3 + 2 + 3 + 1 + 1 + 1
    assert "model.head.attention.variance" in one[0]["gradients"]
    ratios = read_table(tmp_path / "1" / "records", "gradient_ratios")
    assert ratios["step"] == [2]
    assert ratios["EnergyConfusionRegularizer at head"][0] > 0
    assert ratios["EnergyConfusionRegularizer at trunk"] == [0]
    found = read_table(tmp_path / "3" / "records", "gradient_ratios")
    assert found == {name: pytest.approx(values, rel=1e-6) for name, values in ratios.items()}


@pytest.mark.parametrize(
    "batch_norm", ["frozen_statistics", pytest.param("frozen", marks=pytest.mark.slow)]
)
def test_frozen_batch_norm_trains_as_one(
    batch_norm: str, data: str, tmp_path: Path, pool: Pool
) -> None:
    settings = [data, *TINY, *FROZEN_STATISTICS, f"--model.batch_norm={batch_norm}"]
    settings += ["--optimization.steps=2", "--data.batch_size=20"]
    one, _ = same_on_all(pool, [*settings, "--precision=float64"], tmp_path, (1, 2))
    trained = "model.trunk.bn1.weight" in one[0]["gradients"]
    assert trained == (batch_norm == "frozen_statistics")


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_chunks_train_as_the_whole_batch(
    processes: int, data: str, tmp_path: Path, pool: Pool
) -> None:
    settings = [data, *TINY, *FROZEN_STATISTICS, ATTENTION, "--precision=float64"]
    settings += [horde()[:-1] + f", {REGULARIZERS}]", "--optimization.steps=2"]
    settings += ["--evaluation.descriptor=false", "--data.batch_size=20"]
    traces = []
    for name, chunks in (("whole", []), ("chunks", ["--optimization.chunk_size=7"])):
        arguments = [*settings, *chunks, f"--output={tmp_path / name}"]
        traces.append(pool.run(run_traced, arguments, processes=processes)[0][1])
    whole, chunked = traces
    assert "model.head.attention.variance" in whole[0]["gradients"]
    assert_same_trace(chunked, whole)


def test_a_run_in_chunks_continues_to_the_bit(data: str, tmp_path: Path) -> None:
    settings = [data, *TINY, "--model.trunk=test_convnext", "--evaluation.descriptor=false"]
    settings += ["--model.trunk_args={drop_path_rate: 0.5}", horde(), "--data.batch_size=20"]
    settings += ["--optimization.steps=4", "--checkpoint_every=2", "--optimization.chunk_size=6"]
    finished(settings, tmp_path / "run")
    expected = load_checkpoint(tmp_path / "run")
    saved_checkpoints(tmp_path / "run")[-1].unlink()
    mark_unfinished(tmp_path / "run")
    finished([*settings, "--resume"], tmp_path / "run")
    found = load_checkpoint(tmp_path / "run")
    assert expected is not None and found is not None and found["step"] == 4
    for part in ("model", "loss"):
        for name, tensor in expected[part].items():
            assert torch.equal(found[part][name], tensor), name


def test_one_checkpoint_has_one_result(
    data: str, tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [data, *TINY, *NO_BATCH_STATISTICS, horde(), "--evaluation.orders=true"]
    settings += ["--optimization.steps=2", "--evaluation.parts=2", "--evaluation.clustering=true"]
    first, folder = tmp_path / "1", tmp_path / "3"
    one = finished(settings, first)
    shutil.copytree(first, folder)
    mark_unfinished(folder)
    pool.run(run_traced, [*settings, f"--output={folder}", "--resume"], processes=3)
    three = json.loads((folder / "run.json").read_text())
    assert three["sessions"][-1]["world_size"] == 3
    assert one["metrics"]["recall_at_1"] > 0
    for kind in ("metrics", "outputs"):
        assert three[kind] == one[kind]
    # A finished run is shown, and no process waits for the others.
    shown = pool.run(run_traced, [*settings, f"--output={first}", "--resume"], processes=2)
    assert [status for status, _ in shown] == [0, 0]


def test_a_gallery_on_several_processes(tmp_path: Path, pool: Pool) -> None:
    """In-Shop trains and tests as on one process, although its last batches are not full."""
    photos = inshop.few_photos(12, 9)
    root = inshop.write(tmp_path / "data", photos, pictures=False)
    # No two are equal: they would be equally near, and rounding would decide, which depends on the processor.
    write_pictures(root / "Img" / "img", [photo.path for photo in photos], different=len(photos))
    counts = {"inshop": {"train": (36, 12), "query": (18, 9), "gallery": (9, 9)}}
    settings = ["--data.dataset=inshop", f"--data.root={root}", *NO_BATCH_STATISTICS, horde()]
    settings += ["--data.image_size=32", "--data.batch_size=24", "--data.samples_per_class=3"]
    settings += ["--data.num_workers=0", "--optimization.steps=2", "--precision=float64"]
    settings += ["--evaluation.every=1", "--evaluation.batch_size=5", "--model.embedding_size=8"]
    settings += ["--evaluation.curve_classes=5"]
    same_on_all(pool, settings, tmp_path, (1, 3), counts=counts)
    one, three = (json.loads((tmp_path / p / "run.json").read_text()) for p in ("1", "3"))
    assert one["data"]["test_images"] == 27
    for kind in ("metrics", "outputs", "per_class"):
        assert three[kind] == one[kind]
    first, third = (read_table(tmp_path / p / "records", "evaluation") for p in ("1", "3"))
    assert third == first


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], "model: has batch norm"),
        (
            [*NO_BATCH_STATISTICS, "--data.batch_size=55"],
            "data.batch_size: 55 images do not divide by 2",
        ),
        (
            [*NO_BATCH_STATISTICS, "--data.max_classes=2"],
            "data.batch_size: 60 images, 5 per class, need 12 classes",
        ),
    ],
)
def test_refused_on_several_processes(
    settings: list[str], line: str, data: str, tmp_path: Path, pool: Pool
) -> None:
    arguments = [data, *TINY, *settings, f"--output={tmp_path / 'run'}"]
    lines = pool.run(refusal, arguments, processes=2)
    assert lines[0].startswith(f"error: {line}")
    assert lines[1] == ""  # one process speaks
    assert not (tmp_path / "run").exists()


def refusal(processes: Processes, arguments: list[str]) -> str:
    """The only line of a run that is refused."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status, _ = run_traced(processes, arguments)
    assert status == 2
    return said.getvalue()
