"""Retrieval metrics: their values, and the same ones from one process and from several."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import Dataset, Subset

from benchmarks.datasets.queries import Ranking
from benchmarks.evaluation import outputs, tester
from benchmarks.evaluation.extract import class_cosines
from benchmarks.evaluation.tester import Evaluator, Measured, cluster_metrics
from pml_regularizers import VEMAttention
from tests.benchmarks.runs import as_accelerator
from tests.oracles.closed_form import whitened
from tests.support.pool import Processes


def evaluate(accelerator, model, dataset, batch_size, recall_at=(1, 3), **options) -> Measured:
    return Evaluator(accelerator, model, batch_size).evaluate(dataset, recall_at, **options)


class Images(Dataset):
    """`n` images of noise around a pattern of their class; image i has class i // 2."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int, int]:
        draws = (torch.Generator().manual_seed(seed) for seed in (i, 1000 + i // 2))
        noise, pattern = (torch.randn(3, 8, 8, generator=draw) for draw in draws)
        return noise + 0.5 * pattern, i // 2, i


def build_model() -> nn.Module:
    """A small network with buffers, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten(), nn.Linear(288, 6)
        )
        model[1].running_mean.normal_()
    return model


# Name: dataset, batch size, type, ranking. Uneven shares, a last partial batch, processes without a batch.
CASES = {
    "two": (Images(2), 4, torch.float32, None),
    "subset": (Subset(Images(90), list(range(70, 20, -1))), 4, torch.float32, None),
    "float64": (Images(23), 2, torch.float64, None),
    "gallery": (Images(60), 7, torch.float32, Ranking.apart(torch.arange(60) % 2 == 0)),
}


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_cluster_metrics_equal_their_definitions(monkeypatch):
    """2 I / (H + H) and F1 of a given clustering, counted by hand."""
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    clusters = torch.tensor([0, 0, 1, 1, 1, 1])
    monkeypatch.setattr(tester, "FaissKMeans", lambda **_: lambda vectors, k: clusters)
    log = np.log
    mutual = 2 / 6 * log(2 / 6 / (3 / 6 * 2 / 6)) + 1 / 6 * log(1 / 6 / (3 / 6 * 4 / 6))
    mutual += 3 / 6 * log(3 / 6 / (3 / 6 * 4 / 6))
    entropies = log(2) - (2 / 6 * log(2 / 6) + 4 / 6 * log(4 / 6))
    found = cluster_metrics(torch.randn(6, 3), labels)
    assert found["NMI"] == pytest.approx(2 * mutual / entropies, rel=1e-12)
    assert found["F1"] == pytest.approx(2 * 4 / (2 * 4 + 3 + 2))  # 4 pairs right, 3 wrong, 2 missed
    assert found["AMI"] < found["NMI"]


def test_the_predicted_variance_is_compared_with_that_of_all_images(accelerator):
    dataset = Images(41)
    images = torch.stack([dataset[i][0] for i in range(41)]).flatten(1)
    attention = VEMAttention(images.shape[1])
    model = nn.Sequential(nn.Flatten(), attention, nn.Linear(images.shape[1], 3))
    found = outputs.variance_correlation(Evaluator(accelerator, model, 8), attention, dataset)
    expected = np.corrcoef(images.var(dim=0).numpy(), attention.variance.detach().numpy())[0, 1]
    assert found == pytest.approx(expected, rel=1e-4)
    assert abs(found) < 1
    assert not attention.statistics._forward_hooks


@pytest.mark.parametrize("gallery", [False, True])
def test_evaluate_measures_unit_vectors(accelerator, gallery, monkeypatch):
    """Without faiss, in evaluation mode, and in the order of the dataset."""
    monkeypatch.delattr("pytorch_metric_learning.utils.inference.faiss", raising=False)
    model, dataset, during = build_model().train(), Images(41), set()
    model.register_forward_hook(lambda m, *_: during.update(c.training for c in m.modules()))
    ranking = Ranking.apart(torch.rand(41) < 0.5) if gallery else None
    found = evaluate(accelerator, model, dataset, batch_size=8, ranking=ranking)
    assert during == {False}
    images, labels, _ = zip(*(dataset[i] for i in range(41)), strict=True)
    with torch.no_grad():
        expected = model.eval()(torch.stack(images))
    torch.testing.assert_close(found.embeddings, expected)
    assert found.labels.tolist() == list(labels)
    assert found.descriptors is None
    longer = normalize(expected) * torch.arange(1, 42)[:, None]
    assert found.metrics == tester.measure(longer, found.labels, (1, 3), ranking)
    assert list(found.metrics)[:3] == ["recall_at_1", "recall_at_3", "mean_average_precision_at_r"]
    assert 0 < found.metrics["recall_at_1"] < 1


@pytest.mark.parametrize("images", [50, 9])  # more or fewer than the 16 dimensions
def test_features_are_centred_and_reduced_by_the_training_images(accelerator, images):
    trained, features = (torch.randn(n, 16) @ torch.randn(16, 16) + 3 for n in (images, 40))
    labels = torch.arange(images) % 3
    found = outputs.feature_outputs(accelerator, trained, labels, features, 4)
    rows, mean = trained.double().numpy(), trained.double().numpy().mean(axis=0)
    values, vectors = np.linalg.eigh((rows - mean).T @ (rows - mean))
    assert values[-5] < 0.99 * values[-4]
    centred = torch.from_numpy(features.double().numpy() - mean)
    torch.testing.assert_close(found["features_centred"].double(), centred, rtol=0, atol=1e-5)
    # An eigenvector has no sign of its own, which no inner product sees.
    both = found["features_pca"].double(), centred @ torch.from_numpy(vectors[:, -4:])
    products, exact = (rows @ rows.T for rows in both)
    torch.testing.assert_close(products, exact, rtol=1e-5, atol=1e-4)
    white = whitened(rows, labels.tolist(), features.double().numpy(), 4)
    both = found["features_whitened"].double(), torch.from_numpy(white)
    products, exact = (x @ x.T for x in both)
    torch.testing.assert_close(products, exact, rtol=1e-4, atol=1e-4)


def test_mean_cosines_of_one_class_and_of_two():
    features, labels = torch.rand(9, 4), torch.tensor([3, 5, 3, 3, 5, 0, 0, 5, 7])
    cosines = normalize(features.double()) @ normalize(features.double()).T
    same = labels[:, None] == labels
    expected = [cosines[same & ~torch.eye(9).bool()].mean(), cosines[~same].mean()]
    assert class_cosines(features, labels) == pytest.approx([float(x) for x in expected], rel=1e-9)
    alone, _ = class_cosines(features, torch.arange(9))
    _, other = class_cosines(features, torch.zeros(9))
    assert np.isnan([alone, other]).all(), "there are no such pairs"


def test_workers_leave_the_global_random_state_alone(accelerator):
    model, state = build_model(), torch.get_rng_state()
    expected, _ = Evaluator(accelerator, model, 4).embed(Images(10))
    found, _ = Evaluator(accelerator, model, 4, num_workers=1).embed(Images(10))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(found, expected)


def test_embeddings_that_are_not_finite_are_named(accelerator):
    broken, odd = build_model(), torch.tensor([1, 3])  # of each batch
    broken.register_forward_hook(lambda *found: found[-1].index_fill(0, odd, math.inf))
    expected = r"model: NaN or inf for 6 of 12 images, at dataset positions 1, 3, 5, 7, 9, \.\.\."
    with pytest.raises(ValueError, match=expected):
        evaluate(accelerator, broken, Images(12), 4)
    with pytest.raises(ValueError, match="extract: NaN or inf for 4 of 4 images"):
        evaluate(accelerator, build_model(), Images(4), 4, extract=lambda x: x * math.nan)


@pytest.mark.parametrize("gallery", [False, True])
def test_the_mean_over_the_queries_of_all_classes_is_the_metric(gallery):
    labels = torch.arange(60) // 6
    labels[50:] = 12  # nothing has 9 to 11
    labels[7] = 10  # alone
    vectors = torch.randn(60, 4) + torch.randn(13, 4)[labels]
    is_query = torch.rand(60) < 0.5 if gallery else None
    ranking = Ranking.apart(is_query) if gallery else None
    metrics, ranks = tester.rank(vectors, labels, (1,), ranking)
    classes = tester.per_class(ranks, 14)
    queries = torch.tensor(classes.pop("queries"))
    own = torch.bincount(labels[is_query] if gallery else labels, minlength=14)
    own[torch.bincount(labels[~is_query] if gallery else labels, minlength=14) < 2 - gallery] = 0
    assert queries.tolist() == own.tolist() and queries.sum() > 20
    assert classes.keys() == {"recall_at_1", "mean_average_precision_at_r"}
    for name, values in classes.items():
        assert all(type(value) is int for value in values)
        assert [values[label] for label in (9, 10, 11, 13)] == [0, 0, 0, 0]
        mean = (queries * torch.tensor(values)).sum() / queries.sum() / 1e4
        assert mean.item() == pytest.approx(metrics[name], abs=5e-5)
    hits = (ranks.nearest == 1)[ranks.labels == 3]
    assert classes["recall_at_1"][3] == round(1e4 * hits.float().mean().item())


def evaluated(processes: Processes) -> dict[str, dict[str, Any]]:
    """The results of every case, on a process of a pool."""
    accelerator = as_accelerator(processes)
    options = {"extract": lambda embeddings: embeddings.pow(2)[:, :4]}
    found = {}
    for name, (dataset, batch_size, dtype, ranking) in CASES.items():
        model = accelerator.prepare(build_model().to(dtype))
        options |= {"batch_size": batch_size, "ranking": ranking}
        found[name] = asdict(evaluate(accelerator, model, dataset, **options))
    return found


def test_every_process_finds_what_one_finds(pool):
    [alone] = pool.run(evaluated, processes=1)
    for name, one in alone.items():
        dataset, _, dtype, _ = CASES[name]
        assert one["embeddings"].dtype == one["descriptors"].dtype == dtype
        assert one["labels"].tolist() == [dataset[i][1] for i in range(len(dataset))]
    recalls = [alone[name]["metrics"]["recall_at_1"] for name in ("subset", "float64", "gallery")]
    assert all(0 < recall < 1 for recall in recalls), "worth comparing"
    for together in pool.run(evaluated, processes=3):
        for name, one in alone.items():
            assert together[name]["metrics"] == one["metrics"], name
            by_class = [tester.per_class(of["ranks"], 50) for of in (together[name], one)]
            assert by_class[0] == by_class[1], name
            for part in ("embeddings", "labels", "descriptors"):
                assert torch.equal(together[name][part], one[part]), (name, part)
