"""Retrieval metrics: their values, and the same ones from one process and from several."""

import copy
import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import Subset

from benchmarks import evaluation
from benchmarks.evaluation import (
    RetrievalAccuracy,
    ShardedTester,
    cluster_metrics,
    embed,
    evaluate,
    measure,
    neighbours,
    pairwise_f1,
)
from tests.workers.evaluate_sharded import CASES, Images, build_model

ROOT = Path(__file__).parents[1]
ROUNDING = 1e-12  # float64 means of at most a hundred queries


def oracle(embeddings: np.ndarray, labels: np.ndarray, recall_at: tuple[int, ...]) -> dict:
    """Recall@K, MAP@R and R-precision by their definitions, in float64 loops."""
    recalls = {k: [] for k in recall_at}
    average_precisions, r_precisions = [], []
    for q in range(len(labels)):
        others = [i for i in range(len(labels)) if i != q]
        others.sort(key=lambda i: sum((embeddings[q] - embeddings[i]) ** 2))
        right = [labels[i] == labels[q] for i in others]
        R = sum(right)
        if R == 0:
            continue
        for k in recall_at:
            recalls[k].append(any(right[:k]))
        r_precisions.append(sum(right[:R]) / R)
        average_precisions.append(
            sum(sum(right[: i + 1]) / (i + 1) for i in range(R) if right[i]) / R
        )
    return {
        **{f"recall_at_{k}": np.mean(hits) for k, hits in recalls.items()},
        "mean_average_precision_at_r": np.mean(average_precisions),
        "r_precision": np.mean(r_precisions),
    }


def clusters(seed: int, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlapping clouds in shuffled order, one class for each size."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    centres = rng.normal(size=(len(sizes), 5))
    points = centres[labels] + rng.normal(size=(len(labels), 5))
    return torch.from_numpy(points).float(), torch.from_numpy(labels)


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


# ---------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(2, 2, 2), (9, 1, 5, 1, 2), (30, 3, 3), (4,) * 15])
def test_metrics_equal_the_oracle(seed, sizes):
    """Also with lone classes, classes larger than every K and a K beyond all the images."""
    recall_at = (1, 2, 5, 100)
    embeddings, labels = clusters(seed, sizes)
    expected = oracle(embeddings.double().numpy(), labels.numpy(), recall_at)
    found = RetrievalAccuracy(recall_at).get_accuracy(embeddings, labels)
    assert found == pytest.approx(expected, rel=0, abs=ROUNDING)
    assert found["recall_at_100"] == 1


@pytest.mark.parametrize("gallery", [False, True])
def test_recall_at_a_thousand_equals_the_rank_of_the_nearest_positive(gallery):
    """1,400 images of 500 classes, some of one image; of a gallery, half of them are queries."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 500, 1400)
    points = rng.normal(size=(500, 8))[labels] + 3 * rng.normal(size=(1400, 8))
    is_query = np.arange(1400) % 2 == 0 if gallery else np.ones(1400, dtype=bool)
    ranked = ~is_query if gallery else is_query
    distances = ((points[is_query, None] - points[None, ranked]) ** 2).sum(axis=2)
    right = labels[is_query, None] == labels[None, ranked]
    if not gallery:
        np.fill_diagonal(distances, np.inf)
        np.fill_diagonal(right, False)
    right = np.take_along_axis(right, distances.argsort(axis=1), axis=1)
    ranks = right[right.any(axis=1)].argmax(axis=1) + 1
    recall_at = (1, 10, 100, 500, 1000)
    vectors, classes = torch.from_numpy(points).float(), torch.from_numpy(labels)
    found = measure(
        vectors,
        classes,
        recall_at=recall_at,
        is_query=torch.from_numpy(is_query) if gallery else None,
    )
    for k in recall_at:
        assert found[f"recall_at_{k}"] == pytest.approx((ranks <= k).mean(), abs=ROUNDING)
    assert len(ranks) < is_query.sum()
    assert 0.1 < found["recall_at_100"] < found["recall_at_500"] < 1


def test_the_depth_serves_every_metric():
    """PML only warns where a ranking is too shallow for MAP@R."""
    embeddings, labels = clusters(0, (30, 3, 3))
    deep = RetrievalAccuracy((1, 35)).get_accuracy(embeddings, labels)
    del deep["recall_at_35"]
    assert RetrievalAccuracy((1,)).get_accuracy(embeddings, labels) == deep
    counts = torch.tensor([5, 3])
    assert RetrievalAccuracy((1,)).determine_k(counts, 8, ref_includes_query=True) == 4
    assert RetrievalAccuracy((6,)).determine_k(counts, 8, ref_includes_query=True) == 6
    assert RetrievalAccuracy((9,)).determine_k(counts, 8, ref_includes_query=True) == 7
    assert RetrievalAccuracy((9,)).determine_k(counts, 8, ref_includes_query=False) == 8


def test_a_hand_made_ranking():
    """Class 0 at 0, 1 and 5.25, class 1 at 3 and 7: R = 2, 2, 2, 1, 1."""
    points = torch.tensor([[0.0], [1.0], [5.25], [3.0], [7.0]])
    found = RetrievalAccuracy((1, 3, 4)).get_accuracy(points, torch.tensor([0, 0, 0, 1, 1]))
    assert found == {
        "recall_at_1": 2 / 5,  # 0 and 1 find each other; 5.25 finds 7; 3 finds 1; 7 finds 5.25
        "recall_at_3": 4 / 5,  # 5.25: 7, 3, then 1; 7: 5.25, then 3; but 3: 1, 5.25, 0
        "recall_at_4": 1.0,
        "mean_average_precision_at_r": pytest.approx((1 / 2 + 1 / 2) / 5),
        "r_precision": pytest.approx((1 / 2 + 1 / 2) / 5),
    }


def test_a_duplicate_of_another_class_is_the_nearest_other():
    """The query leaves its ranking by its index; dropping the first would drop the duplicate."""
    points = torch.tensor([0, 0, 100, 100.125, 100.1875, 200, 200.125, 200.1875])[:, None]
    labels = torch.tensor([0, 1, 0, 2, 2, 1, 3, 3])
    assert RetrievalAccuracy((1,)).get_accuracy(points, labels)["recall_at_1"] == 4 / 8


def test_lone_images_are_ranked_but_are_no_queries():
    points = torch.tensor([[0.0], [1.0], [10.0], [10.5]])
    found = RetrievalAccuracy((1, 2)).get_accuracy(points, torch.tensor([0, 0, 0, 1]))
    assert (found["recall_at_1"], found["recall_at_2"]) == (2 / 3, 1)


def test_no_query_at_all_is_nan(caplog):
    found = RetrievalAccuracy().get_accuracy(torch.eye(4), torch.arange(4))
    assert len(found) == 6 and all(math.isnan(value) for value in found.values())
    assert "None of the query labels are in the reference set" in caplog.text


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    points=st.lists(
        st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(0, 3)),
        min_size=5,
        max_size=30,
    )
)
def test_metrics_keep_their_order(points):
    """Recall@K never falls with K, and MAP@R <= R-precision; many points are duplicates."""
    table = torch.tensor(points)
    found = RetrievalAccuracy((1, 2, 3, 5, 40)).get_accuracy(table[:, :2].float(), table[:, 2])
    recalls = [found[f"recall_at_{k}"] for k in (1, 2, 3, 5, 40)]
    assert recalls == sorted(recalls)
    assert recalls[-1] == 1
    assert 0 <= found["mean_average_precision_at_r"] <= found["r_precision"] <= 1


@pytest.mark.parametrize("seed", range(5))
def test_pairwise_f1_equals_a_count_of_all_pairs(seed):
    rng = np.random.default_rng(seed)
    labels, clusters = rng.integers(0, 4, 30), rng.integers(0, 6, 30)
    pairs = [(i, j) for i in range(30) for j in range(i)]
    same = [(labels[i] == labels[j], clusters[i] == clusters[j]) for i, j in pairs]
    both, in_class, in_cluster = (
        sum(map(all, same)),
        sum(s for s, _ in same),
        sum(c for _, c in same),
    )
    precision, recall = both / in_cluster, both / in_class
    expected = 2 * precision * recall / (precision + recall)
    found = pairwise_f1(torch.tensor(labels), torch.tensor(clusters))
    assert found == pytest.approx(expected, rel=1e-12)


def test_cluster_metrics_of_clear_clusters_are_one():
    labels = torch.arange(6).repeat_interleave(5) * 3 + 1  # any integers
    vectors = torch.eye(6)[labels // 3] + 0.01 * torch.randn(30, 6)
    assert cluster_metrics(vectors, labels) == pytest.approx({"NMI": 1, "AMI": 1, "F1": 1})


def test_cluster_metrics_equal_their_definitions(monkeypatch):
    """2 I / (H + H) and F1 of a given clustering, counted by hand."""
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    clusters = torch.tensor([0, 0, 1, 1, 1, 1])
    monkeypatch.setattr(evaluation, "FaissKMeans", lambda **_: lambda vectors, k: clusters)
    log = np.log
    mutual = 2 / 6 * log(2 / 6 / (3 / 6 * 2 / 6)) + 1 / 6 * log(1 / 6 / (3 / 6 * 4 / 6))
    mutual += 3 / 6 * log(3 / 6 / (3 / 6 * 4 / 6))
    entropies = log(2) - (2 / 6 * log(2 / 6) + 4 / 6 * log(4 / 6))
    found = cluster_metrics(torch.randn(6, 3), labels)
    assert found["NMI"] == pytest.approx(2 * mutual / entropies, rel=1e-12)
    assert found["F1"] == pytest.approx(2 * 4 / (2 * 4 + 3 + 2))  # 4 pairs right, 3 wrong, 2 missed
    assert found["AMI"] < found["NMI"]


def test_one_recall_alone():
    embeddings, labels = clusters(0, (4, 4))
    calculator = copy.deepcopy(RetrievalAccuracy((1, 2)))
    found = calculator.get_accuracy(embeddings, labels, include=("recall_at_2",))
    assert found == {"recall_at_2": calculator.get_accuracy(embeddings, labels)["recall_at_2"]}


@pytest.mark.parametrize("recall_at", [(), (0, 1), (1.0,), ("1",)])
def test_recall_at_is_checked(recall_at):
    with pytest.raises(ValueError, match="recall_at: expected integers >= 1, got"):
        RetrievalAccuracy(recall_at)


# ------------------------------------------------------------------------------- one process


def test_evaluate_equals_the_calculator(accelerator):
    model, dataset = build_model(), Images(41)
    found = evaluate(accelerator, model, dataset, batch_size=8, recall_at=(1, 3), progress=False)
    images, labels, _ = zip(*(dataset[i] for i in range(41)), strict=True)
    with torch.no_grad():
        expected = model.eval()(torch.stack(images))
    torch.testing.assert_close(found.embeddings, expected)
    assert found.labels.tolist() == list(labels)
    assert found.descriptors is None
    direct = RetrievalAccuracy((1, 3)).get_accuracy(normalize(found.embeddings), found.labels)
    assert found.metrics == direct
    assert list(found.metrics)[:3] == ["recall_at_1", "recall_at_3", "mean_average_precision_at_r"]
    assert 0 < found.metrics["recall_at_1"] < 1


def test_a_subset_is_read_in_its_own_order(accelerator):
    rows = [30, 2, 17, 3, 31]
    options = {"batch_size": 5, "progress": False}
    embeddings, labels = embed(
        accelerator, build_model(), Images(32), **options | {"batch_size": 32}
    )
    of_subset, labels_of_subset = embed(
        accelerator, build_model(), Subset(Images(32), rows), **options
    )
    torch.testing.assert_close(of_subset, embeddings[rows])
    assert labels_of_subset.tolist() == labels[rows].tolist() == [15, 1, 8, 1, 15]


def test_workers_change_nothing(accelerator):
    found = [
        embed(accelerator, build_model(), Images(10), batch_size=4, num_workers=n, progress=False)
        for n in (0, 1)
    ]
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there)


class Interrupted(Images):
    """Whoever reads an image gets the signals of a Ctrl-C and of a scheduler first."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int, int]:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return super().__getitem__(i)


def test_workers_outlive_a_signal_to_the_whole_group(accelerator):
    """The main process decides when to stop, after it has saved."""
    options = {"batch_size": 4, "progress": False}
    found, _ = embed(accelerator, build_model(), Interrupted(10), num_workers=1, **options)
    expected, _ = embed(accelerator, build_model(), Images(10), **options)
    assert torch.equal(found, expected)


def test_extract_follows_each_forward(accelerator):
    model, seen = build_model(), []
    model[3].register_forward_hook(lambda module, args, flat: seen.append(flat))
    found = evaluate(
        accelerator,
        model,
        Images(10),
        batch_size=4,
        extract=lambda embeddings: torch.cat([seen.pop()[:, :2], embeddings], dim=1),
        progress=False,
    )
    assert found.descriptors.shape == (10, 8)
    assert torch.equal(found.descriptors[:, 2:], found.embeddings)
    assert not found.embeddings.requires_grad and not found.descriptors.requires_grad
    assert not seen


def test_modes_come_back_also_after_an_error(accelerator):
    model = build_model().train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    during = []
    model.register_forward_hook(lambda m, *_: during.append(any(c.training for c in m.modules())))
    evaluate(accelerator, model, Images(4), batch_size=2, progress=False)
    assert [module.training for module in model.modules()] == modes
    assert during == [False, False]

    def fail(embeddings):
        raise RuntimeError("stop")

    for function in (embed, evaluate):
        with pytest.raises(RuntimeError, match="stop"):
            function(accelerator, model, Images(4), batch_size=2, extract=fail, progress=False)
        assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_global_random_state_is_left_alone(accelerator, num_workers):
    model = build_model()
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    options = {"batch_size": 4, "num_workers": num_workers, "progress": False}
    evaluate(accelerator, model, Images(10), **options)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("progress", [True, False])
def test_nothing_is_written_but_the_bar(accelerator, capfd, caplog, progress):
    caplog.set_level(logging.WARNING)
    evaluate(accelerator, build_model(), Images(10), batch_size=4, progress=progress)
    out, err = capfd.readouterr()
    assert (out, caplog.text) == ("", "")
    assert ("embedding" in err) if progress else (err == "")


class Broken(nn.Module):
    """Every second image fails."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1)[:, :3].clone()
        rows[1::2] = math.inf
        return rows


def test_embeddings_that_are_not_finite_are_named(accelerator):
    options = {"batch_size": 4, "progress": False}
    expected = r"model: NaN or inf for 6 of 12 images, at dataset positions 1, 3, 5, 7, 9, \.\.\."
    with pytest.raises(ValueError, match=expected):
        evaluate(accelerator, Broken(), Images(12), **options)
    with pytest.raises(ValueError, match="extract: NaN or inf for 4 of 4 images"):
        nan = torch.full((4, 2), math.nan)
        embed(accelerator, build_model(), Images(4), extract=lambda _: nan, **options)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 3, 1)])
def test_one_vector_per_image(accelerator, shape):
    with pytest.raises(ValueError, match="extract: expected one vector for each of 4 images, got"):
        embed(
            accelerator,
            build_model(),
            Images(4),
            batch_size=4,
            extract=lambda _: torch.zeros(shape),
            progress=False,
        )


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_images(accelerator, n):
    with pytest.raises(ValueError, match=f"dataset: retrieval needs at least two images, got {n}"):
        evaluate(accelerator, build_model(), Images(n), batch_size=4)
    with pytest.raises(ValueError, match="dataset: expected at least one image"):
        embed(accelerator, build_model(), Images(0), batch_size=4)


def test_missing_and_doubled_images_are_counted(accelerator, monkeypatch):
    """What a process with another dataset or batch size would do."""
    monkeypatch.setattr(evaluation, "gather_object", lambda batches: batches[:2] + batches[:1])
    with pytest.raises(ValueError, match="of 10 images 2 are missing and 4 occur more than once"):
        embed(accelerator, build_model(), Images(10), batch_size=4, progress=False)


def test_queries_against_a_gallery(accelerator):
    """PML's `splits_to_eval` and its trunk with an embedder; splits in one order everywhere."""
    model, options = build_model(), {"batch_size": 8, "progress": False}
    splits = {"query": Subset(Images(40), range(0, 40, 2)), "gallery": Images(40)}
    tester = ShardedTester(accelerator, **options)
    found = tester.test(splits, 0, model[:4], model[4], splits_to_eval=[("query", ["gallery"])])
    (q, q_labels), (g, g_labels) = (
        embed(accelerator, model, splits[name], **options) for name in ("query", "gallery")
    )
    direct = RetrievalAccuracy().get_accuracy(normalize(q), q_labels, normalize(g), g_labels)
    assert {name: found["query"][f"{name}_level0"] for name in direct} == direct
    queries = torch.arange(40) % 3 == 1
    whole = evaluate(accelerator, model, Images(40), is_query=queries, **options)
    assert not torch.equal(whole.labels, whole.labels.flip(0))
    q, g = normalize(whole.embeddings[queries]), normalize(whole.embeddings[~queries])
    assert whole.metrics == RetrievalAccuracy().get_accuracy(
        q, whole.labels[queries], g, whole.labels[~queries]
    )
    names = [f"split{i}" for i in range(9)]
    assert tester.get_splits_to_compute_embeddings(dict.fromkeys(names), None)[1] == names


def test_rows_of_queries_and_gallery_come_in_dataset_order(accelerator):
    model, options = build_model(), {"batch_size": 8, "progress": False}
    embeddings, labels = embed(accelerator, model, Images(21), **options)
    queries = torch.rand(21, generator=torch.Generator().manual_seed(0)) < 0.5
    found = evaluate(
        accelerator, model, Images(21), is_query=queries, extract=lambda rows: 2 * rows, **options
    )
    assert torch.equal(found.labels, labels)
    torch.testing.assert_close(found.embeddings, embeddings)
    torch.testing.assert_close(found.descriptors, 2 * embeddings)
    assert found.metrics == measure(normalize(found.embeddings), labels, is_query=queries)


def test_a_hand_made_gallery():
    """Queries 0 and 2.1 of class 0 and 9 of class 1; gallery 1, 3 (class 0), 2, 8 (class 1)."""
    points = torch.tensor([0.0, 2.1, 9.0, 1.0, 3.0, 2.0, 8.0])[:, None]
    labels = torch.tensor([0, 0, 1, 0, 0, 1, 1])
    found = measure(points, labels, recall_at=(1, 2), is_query=torch.arange(7) < 3)
    # 0: 1+, 2-; 2.1: 2-, 3+; 9: 8+, 3-. R = 2 for each.
    assert found == pytest.approx(
        {
            "recall_at_1": 2 / 3,
            "recall_at_2": 1,
            "mean_average_precision_at_r": (1 / 2 + 1 / 4 + 1 / 2) / 3,
            "r_precision": 1 / 2,
        }
    )


@pytest.mark.parametrize(
    "queries",
    [
        torch.ones(8, dtype=torch.bool),
        torch.zeros(8, dtype=torch.bool),
        torch.arange(8),
        torch.arange(7) < 3,
    ],
)
def test_queries_and_gallery_must_both_be_there(accelerator, queries):
    with pytest.raises(ValueError, match="is_query: expected 8 booleans, some true and some false"):
        evaluate(accelerator, build_model(), Images(8), is_query=queries, batch_size=4)


# ------------------------------------------------------------------------------------- neighbours


def test_neighbours_in_a_gallery():
    embeddings = clusters(0, (12, 12))[0]
    rows, gallery = torch.tensor([20, 3]), torch.tensor([1, 7, 19, 4, 0])
    cosines = normalize(embeddings)[rows] @ normalize(embeddings)[gallery].T
    expected = gallery[cosines.argsort(dim=1, descending=True)]
    assert torch.equal(neighbours(embeddings, 5, rows, gallery), expected)
    with pytest.raises(ValueError, match=r"k: expected 1 to 5, .* got 6"):
        neighbours(embeddings, 6, rows, gallery)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighbours_are_ranked_by_angle_without_the_query(dtype):
    embeddings = clusters(0, (12, 12))[0].to(dtype)
    cosines = normalize(embeddings) @ normalize(embeddings).T
    cosines.fill_diagonal_(-2)
    expected = cosines.argsort(dim=1, descending=True)
    assert torch.equal(neighbours(embeddings, 23), expected[:, :23])
    rows = torch.tensor([20, 3, 3])
    assert torch.equal(neighbours(embeddings, 4, rows), expected[rows, :4])


@pytest.mark.parametrize("k", [1, 3, 6])
def test_neighbours_among_duplicates(k):
    """More duplicates than k: the query may be missing from its own ranking."""
    embeddings = torch.tensor([[1.0, 0.0]]).repeat(7, 1)
    found = neighbours(embeddings, k)
    assert found.shape == (7, k)
    for query, row in enumerate(found.tolist()):
        assert query not in row and len(set(row)) == k


@pytest.mark.parametrize("k", [0, 4])
def test_neighbours_need_as_many_others(k):
    with pytest.raises(ValueError, match=f"k: expected 1 to 3, .* got {k}"):
        neighbours(torch.eye(4), k)


# ------------------------------------------------------------------------------- many processes


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """The folder with what each process saved, by the number of processes."""
    folders = {n: tmp_path_factory.mktemp(f"world{n}") for n in (1, 2, 3)}
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    worker = str(ROOT / "tests" / "workers" / "evaluate_sharded.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    started = {
        n: subprocess.Popen(
            [sys.executable, *([] if n == 1 else [*torchrun, str(n)]), worker, str(n), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n, folder in folders.items()
    }
    try:
        for n, process in started.items():
            output, _ = process.communicate(timeout=180)
            assert process.returncode == 0, f"{n} processes: {output}"
    finally:
        for process in started.values():
            process.terminate()  # torchrun ends its workers then
            process.wait()
    return folders


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_process_finds_what_one_finds(runs, case, world_size):
    one = torch.load(runs[1] / f"{case}.0.pt")
    dataset, _, dtype = CASES[case]
    assert len(one["embeddings"]) == len(dataset)
    assert one["embeddings"].dtype == one["descriptors"].dtype == dtype
    assert one["labels"].tolist() == [dataset[i][1] for i in range(len(dataset))]
    assert all(math.isfinite(value) for value in one["metrics"].values())
    saved = sorted(runs[world_size].glob(f"{case}.*.pt"))
    assert len(saved) == world_size
    for file in saved:
        found = torch.load(file)
        assert found["metrics"] == one["metrics"]
        for name in ("embeddings", "labels", "descriptors"):
            assert torch.equal(found[name], one[name]), name


def test_the_cases_are_worth_comparing(runs):
    recalls = {
        name: torch.load(runs[1] / f"{name}.0.pt")["metrics"]["recall_at_1"] for name in CASES
    }
    assert 0 < recalls["float64"] < 1 and 0 < recalls["subset"] < 1
