import math
import unittest

import torch

from pytorch_metric_learning.losses import CosineContrastiveLoss

from .. import TEST_DEVICE, TEST_DTYPES


def by_loops(embeddings, labels, pos_margin, neg_margin):
    x = torch.nn.functional.normalize(embeddings.detach().double().cpu())
    positives, active = [], []
    for i in range(len(x)):
        for j in range(len(x)):
            s = float(x[i] @ x[j])
            if i != j and labels[i] == labels[j]:
                positives.append(max(pos_margin - s, 0) ** 2 / 2)
            elif labels[i] != labels[j] and s > neg_margin:
                active.append((s - neg_margin) / 2)
    return sum(sum(part) / len(part) for part in (positives, active) if part)


class TestCosineContrastiveLoss(unittest.TestCase):
    def test_value(self):
        torch.manual_seed(1)
        labels = torch.tensor([0, 0, 1, 1, 2, 0])
        for dtype in TEST_DTYPES:
            rtol = 1e-9 if dtype == torch.float64 else 1e-4
            for pos_margin, neg_margin in [(1, 0.5), (0.8, -0.2)]:
                embeddings = torch.randn(
                    6, 3, requires_grad=True, dtype=dtype, device=TEST_DEVICE
                )
                loss = CosineContrastiveLoss(pos_margin, neg_margin)(embeddings, labels)
                loss.backward()
                correct = by_loops(embeddings, labels, pos_margin, neg_margin)
                self.assertTrue(math.isclose(loss.item(), correct, rel_tol=rtol))

    def test_nothing_to_compare(self):
        for dtype in TEST_DTYPES:
            embeddings = torch.ones(
                1, 3, requires_grad=True, dtype=dtype, device=TEST_DEVICE
            )
            loss = CosineContrastiveLoss()(embeddings, torch.tensor([0]))
            loss.backward()
            self.assertEqual(loss.item(), 0)
            self.assertTrue((embeddings.grad == 0).all())
