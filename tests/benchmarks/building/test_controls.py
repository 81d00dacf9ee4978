"""The control of HORDE's order 1."""

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses

from benchmarks.building.controls import PooledFeaturesLoss
from pml_regularizers import EmbeddingHead


def test_the_loss_of_a_fixed_projection_of_the_pooled_features() -> None:
    control = PooledFeaturesLoss(losses.ContrastiveLoss(), in_channels=5, width=16)
    labels = torch.tensor([0, 0, 1, 1])
    pooled = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    value = control(torch.randn(4, 3), labels, features=pooled)
    assert set(control.projection.unique().tolist()) == {-1, 1}
    assert not list(control.parameters())
    x = pooled.detach().numpy() @ control.projection.double().numpy()
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    distance = np.linalg.norm(x[:, None] - x[None], axis=2)
    negative = 1 - distance[:2, 2:]
    expected = (distance[0, 1] + distance[2, 3]) / 2
    expected += negative[negative > 0].mean() if (negative > 0).any() else 0
    assert value.item() == pytest.approx(expected, rel=1e-6)
    value.backward()
    assert pooled.grad is not None and pooled.grad.abs().sum() > 0


def test_it_reads_the_head_as_it_pools() -> None:
    head = EmbeddingHead(5, 3)
    control = PooledFeaturesLoss(losses.ContrastiveLoss(), in_channels=5, width=16).attach(head)
    maps, labels = torch.randn(4, 5, 2, 2, requires_grad=True), torch.tensor([0, 0, 1, 1])
    expected = control(head(maps), labels, features=maps.mean(dim=(2, 3)))
    embeddings = head(maps)
    torch.testing.assert_close(control(embeddings, labels), expected)
