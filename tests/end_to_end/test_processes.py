"""The runner on several processes: as on one, in batches, losses, gradients and metrics."""

import contextlib
import io

import pytest

from benchmarks.records.steps import read_table
from tests.benchmarks import runs
from tests.benchmarks.runs import ATTENTION, PML, REGULARIZERS, added, run_traced, same_on_all
from tests.support.pool import Processes
from tests.support.processes import FROZEN_STATISTICS, NO_BATCH_STATISTICS, TINY, horde

LOSSES = ("ContrastiveLoss", "TripletMarginLoss", "ProxyAnchorLoss", "ArcFaceLoss")
ALL_LOSSES = [horde(f"{PML}.ArcFaceLoss"), *(added(f"{PML}.{name}", 0.5) for name in LOSSES)]
ALL_LOSSES += REGULARIZERS


def test_several_processes_train_as_one(data, tmp_path, pool):
    settings = [data, *TINY, *NO_BATCH_STATISTICS, *ALL_LOSSES, ATTENTION]
    settings += ["--diagnose_every=2", "--optimization.steps=2", "--precision=float64"]
    settings += ["--data.batch_size=20", "--data.max_classes=5", "--evaluation.descriptor=false"]
    settings += ["--evaluation.orders=true", "--evaluation.parts=2", "--evaluation.clustering=true"]
    settings += ["--evaluation.every=1", "--evaluation.curve_classes=5"]
    one, _ = same_on_all(pool, settings, tmp_path, (1, 2))
    assert len(one) == 2
    logged = read_table(tmp_path / "2" / "records", "training")["loss"]
    assert logged == pytest.approx([row["loss"].item() for row in one])
    own = [name for name in one[0]["gradients"] if name.startswith("loss.")]
    # HORDE's projections, embeddings and class weights; proxies, class weights; JRD's class weights
    assert len(own) == 3 + 2 + 3 + 1 + 1 + 1
    assert "model.head.attention.variance" in one[0]["gradients"]
    ratios = read_table(tmp_path / "1" / "records", "gradient_ratios")
    assert ratios["step"] == [2]
    assert ratios["EnergyConfusionRegularizer at head"][0] > 0
    assert ratios["EnergyConfusionRegularizer at trunk"] == [0]
    found = read_table(tmp_path / "2" / "records", "gradient_ratios")
    assert found == {name: pytest.approx(values, rel=1e-6) for name, values in ratios.items()}
    first, second = (runs.record_of(tmp_path / p) for p in ("1", "2"))
    for kind in ("metrics", "outputs", "per_class"):
        assert second[kind] == first[kind]
    curve, other = (read_table(tmp_path / p / "records", "evaluation") for p in ("1", "2"))
    assert curve == other and curve["step"] == [0, 1, 2]
    # A finished run is shown, and no process waits for the others.
    again = [*settings, f"--output={tmp_path / '1'}", "--resume"]
    assert [status for status, _ in pool.run(run_traced, again, processes=2)] == [0, 0]


@pytest.mark.slow
def test_chunks_on_two_processes_train_as_the_whole_batch_on_one(data, tmp_path, pool):
    """With batch norm of frozen statistics, whose weights train."""
    settings = [data, *TINY, *FROZEN_STATISTICS, ATTENTION, "--precision=float64"]
    settings += [horde(), *REGULARIZERS, "--optimization.steps=2"]
    settings += ["--evaluation.descriptor=false", "--data.batch_size=20"]
    traces = []
    for processes, chunks in ((1, []), (2, ["--optimization.chunk_size=7"])):
        arguments = [*settings, *chunks, f"--output={tmp_path / str(processes)}"]
        traces.append(pool.run(run_traced, arguments, processes=processes)[0][1])
    whole, chunked = traces
    assert {"model.head.attention.variance", "model.trunk.bn1.weight"} <= {*whole[0]["gradients"]}
    runs.assert_same_trace(chunked, whole)


def test_refused_on_several_processes(data, tmp_path, pool):
    odd = [*NO_BATCH_STATISTICS, "--data.batch_size=55"]
    for settings, line in (
        ([], "model: has batch norm"),
        (odd, "data.batch_size: 55 images do not divide"),
    ):
        arguments = [data, *TINY, *settings, f"--output={tmp_path / 'run'}"]
        first, second = pool.run(refusal, arguments, processes=2)
        assert first.startswith(f"error: {line}")
        assert second == ""  # one process speaks
        assert not (tmp_path / "run").exists()


def refusal(processes: Processes, arguments: list[str]) -> str:
    """The only line of a run that is refused."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status, _ = run_traced(processes, arguments)
    assert status == 2
    return said.getvalue()
