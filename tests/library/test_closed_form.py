"""Layers in closed form, and the features that they are made from, on one process and on several."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from pml_regularizers import EmbeddingHead, VEMAttention, pca_init_, whitening_init_
from pml_regularizers.heads import closed_form
from tests.oracles.closed_form import whitened
from tests.support.pool import Pool, Processes
from tests.support.tolerances import assert_close

C, E = 12, 4


def features(rows: int) -> Tensor:
    """Of unequal variances and another mean than zero, in float64."""
    generator = torch.Generator().manual_seed(rows)
    draw = [torch.randn(n, C, dtype=torch.float64, generator=generator) for n in (rows, C, 1)]
    return draw[0] @ draw[1] + 3 * draw[2]


def layer(**kwargs: Any) -> nn.Linear:
    return nn.Linear(C, E, dtype=torch.float64, **kwargs)


@pytest.mark.parametrize("rows", [40, 7])
def test_components_are_those_of_scikit_learn(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "BLOCK", 6)
    x, made = features(rows), layer()
    parameters = [*made.parameters()]
    assert pca_init_(made, x) is made
    assert [*made.parameters()] == parameters  # an optimizer may hold them
    expected = PCA(E, svd_solver="full").fit(x.numpy())
    signs = np.sign(
        np.take_along_axis(
            expected.components_, np.abs(expected.components_).argmax(axis=1)[:, None], axis=1
        )
    )
    assert_close(made.weight, torch.from_numpy(signs * expected.components_))
    assert_close(made(x), torch.from_numpy(expected.transform(x.numpy()) * signs[:, 0]))


@pytest.mark.parametrize(("rows", "shrinkage"), [(40, 0.5), (40, 0.9), (8, 0.2)])
def test_whitening_is_that_of_the_sums(
    rows: int, shrinkage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_form, "BLOCK", 6)
    x, y, labels = features(rows), features(9), torch.arange(rows) % 7 * 3
    made = whitening_init_(layer(bias=False), x, labels, shrinkage=shrinkage)
    expected = torch.from_numpy(whitened(x.numpy(), labels.tolist(), y.numpy(), E, shrinkage))
    signs = (made(y) * expected).sum(dim=0).sign()
    assert_close(made(y), expected * signs)
    assert made.bias.requires_grad


def test_a_layer_made_in_inference_mode_trains() -> None:
    with torch.inference_mode():
        made = pca_init_(plain := layer(bias=False), features(40))
    assert made is plain and not made.bias.is_inference()


def test_a_head_in_lower_precision_takes_them() -> None:
    head = EmbeddingHead(C, E).bfloat16()
    assert pca_init_(head, features(40).float()) is head
    weight = pca_init_(layer(), features(40).float()).weight
    assert_close(head.fc.weight, weight)
    assert head.fc.bias.dtype == torch.bfloat16
    head(torch.ones(2, C, 3, 3, dtype=torch.bfloat16)).sum().backward()
    assert head.fc.bias.grad is not None


X, LABELS = features(40), torch.arange(40) % 5
NORMED = torch.nn.utils.parametrizations.weight_norm


def test_what_cannot_be_is_refused() -> None:
    for make, line in (
        (lambda: pca_init_(layer(), X[:3]), r"features: 4 components .* got shape \(3, 12\)"),
        (lambda: pca_init_(nn.Linear(3, E), X[:, :3]), r"features: 4 components .* \(40, 3\)"),
        (lambda: pca_init_(layer(), X[:, :5]), r"features: .* tensor \(N, 12\), .* \(40, 5\)"),
        (lambda: pca_init_(layer(), X[0]), r"features: expected a tensor \(N, 12\)"),
        (lambda: pca_init_(layer(), X.numpy()), "features: expected a tensor .* got ndarray"),
        (lambda: pca_init_(layer(), X.to(torch.complex64)), "features: .* got torch.complex64"),
        (lambda: pca_init_(layer(), X * 1e200), "features: their squares leave the range"),
        (lambda: pca_init_(layer().half(), X * 1e6), "layer: its bias leaves the range"),
        (lambda: pca_init_(layer(), X.index_fill(0, torch.tensor(7), torch.nan)), "NaN"),
        (lambda: pca_init_(EmbeddingHead(C, None), X), "layer: expected a plain .* got Identity"),
        (lambda: pca_init_(NORMED(layer()), X), "layer: expected a plain torch.nn.Linear"),
        (lambda: pca_init_(layer(device="meta"), X), "layer: on the meta device"),
        (lambda: pca_init_(layer(), X.to("meta")), "features: on the meta device"),
        (lambda: whitening_init_(layer(), X, LABELS[:7]), r"labels: .* 40 features, .* \(7,\)"),
        (lambda: whitening_init_(layer(), X, LABELS.tolist()), "labels: .* tensor .* got list"),
        (lambda: whitening_init_(layer(), X, torch.arange(40)), "labels: no two features"),
        (lambda: whitening_init_(layer(), X, LABELS, shrinkage=1), "shrinkage: .* got 1;"),
    ):
        with pytest.raises(ValueError, match=line):
            make()


def test_a_head_without_a_layer() -> None:
    head, x = EmbeddingHead(C, None).double(), torch.randn(5, C, 2, 3, dtype=torch.float64)
    pooled = x.mean(dim=(2, 3))
    assert head.embedding_size == C and not [*head.parameters()]
    assert_close(head(x), nn.functional.normalize(pooled))
    head.fc = pca_init_(layer(), X)
    assert head.embedding_size == E
    assert_close(head(x), nn.functional.normalize(head.fc(pooled)))
    bare = EmbeddingHead(C, None, attention=VEMAttention)
    with pytest.raises(ValueError, match="fc: there is no linear layer to merge"):
        bare.fold()


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, C, 1)
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.conv(x))


IMAGES = 10


def extracted(processes: Processes | None, kind: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(IMAGES, 3, 2, 2), torch.arange(IMAGES))
    trunk, head = Trunk().train(), EmbeddingHead(C, E, attention=VEMAttention).train()
    sampler = None
    if kind == "sampler" and processes is not None:
        sampler = DistributedSampler(data, shuffle=False)
    loader: Any = DataLoader(data, batch_size=3, sampler=sampler)
    if kind.startswith("accelerate") and processes is not None:
        from accelerate.data_loader import prepare_data_loader

        place = {"num_processes": processes.num_processes, "process_index": processes.process_index}
        loader = prepare_data_loader(loader, **place, split_batches=kind.endswith("split"))
    x, labels = head.extract_features(trunk, loader, progress=False)
    assert trunk.training and head.training and trunk.drop.training
    assert not head.fc._forward_pre_hooks
    with torch.no_grad():
        pooled = trunk.conv(data.tensors[0]).mean(dim=(2, 3))
        assert_close(x[labels.argsort()], head.attention(pooled))
    return x, labels


@pytest.mark.parametrize(
    ("kind", "processes"),
    [("plain", 2), ("plain", 3), ("sampler", 3), ("accelerate", 2), ("accelerate, split", 3)],
)
def test_several_processes_extract_what_one_does(kind: str, processes: int, pool: Pool) -> None:
    if kind.startswith("accelerate"):
        pytest.importorskip("accelerate")  # the library does without
    x, labels = extracted(None, kind)
    assert labels.tolist() == [*range(IMAGES)]
    for found, found_labels in pool.run(extracted, kind, processes=processes):
        assert found_labels.tolist() == labels.tolist()
        assert torch.equal(found, x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_token_numbers_stay_integers(dtype: torch.dtype) -> None:
    trunk, texts = nn.Embedding(20, C), torch.arange(30, dtype=dtype).view(6, 5) % 20
    head = EmbeddingHead.for_trunk(trunk, E, image=texts[:1])
    assert head.num_prefix_tokens == 0
    x, _ = head.extract_features(trunk, [(texts, LABELS[:6])], progress=False)
    assert_close(x, trunk(texts).mean(dim=1))


@pytest.mark.parametrize("batches", [[], [torch.ones(2, 3, 2, 2)], [(torch.ones(2, 3), [1, 2])]])
def test_a_loader_without_labels(batches: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"loader: .*\(images, labels"):
        EmbeddingHead(C, E).extract_features(Trunk(), batches, progress=False)
