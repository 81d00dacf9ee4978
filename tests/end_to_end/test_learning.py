"""A short training makes a network better at classes that it has not seen, which is what all of this is for."""

import torch
from pytorch_metric_learning import losses
from torch import nn
from torch.nn import functional as F

from benchmarks.datasets.glyphs import Glyphs
from pml_regularizers import EmbeddingHead, PooledFeaturesLoss, RankAccuracyCalculator

SEEN = 200  # classes, and 100 others, of 12 images each


def test_recall_of_unseen_characters_rises(glyphs_root):
    """By the loss on pooled features alone."""
    glyphs = Glyphs(glyphs_root, stage="pretraining", max_classes=SEEN + 100, draw_seed=0)
    shifted = torch.stack([glyphs[index, 1][0] for index in range(len(glyphs))])
    images, labels = F.avg_pool2d(shifted, 2), glyphs.labels
    unseen = labels >= SEEN

    def noisy(images):
        return images + 0.3 * torch.randn_like(images)

    layers: list[nn.Module] = []
    for narrow, wide in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(narrow, wide, 3, stride=2, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
    trunk, head = nn.Sequential(*layers), EmbeddingHead(64, 32)
    loss = PooledFeaturesLoss(losses.MultiSimilarityLoss()).attach(head)
    optimizer = torch.optim.Adam([*trunk.parameters(), *head.parameters()], lr=1e-2)
    queries = noisy(images[unseen])
    calculator = RankAccuracyCalculator(include=("precision_at_1",), device=torch.device("cpu"))

    def recall():
        with torch.no_grad():
            pooled = trunk(queries).mean((2, 3))
        return calculator.get_accuracy(pooled, labels[unseen])["precision_at_1"]

    before = recall()
    for _ in range(120):
        classes = torch.randperm(SEEN)[:16]
        batch = torch.cat([12 * each + torch.randperm(12)[:4] for each in classes])
        value = loss(head(trunk(noisy(images[batch]))), labels[batch])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert recall() > before + 0.15, before
