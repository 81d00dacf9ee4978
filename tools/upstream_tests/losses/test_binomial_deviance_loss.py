import math
import unittest

import torch

from pytorch_metric_learning.losses import BinomialDevianceLoss
from pytorch_metric_learning.reducers import MeanReducer

from .. import TEST_DEVICE, TEST_DTYPES


def by_loops(embeddings, labels, alpha, beta, C):
    x = torch.nn.functional.normalize(embeddings.detach().double().cpu())
    anchors = []
    for i in range(len(x)):
        positives, negatives = [], []
        for j in range(len(x)):
            s = float(x[i] @ x[j])
            if i != j and labels[i] == labels[j]:
                positives.append(math.log(1 + math.exp(-alpha * (s - beta))))
            elif labels[i] != labels[j]:
                negatives.append(math.log(1 + math.exp(alpha * C * (s - beta))))
        parts = [part for part in (positives, negatives) if part]
        anchors.append(sum(sum(part) / len(part) for part in parts))
    return anchors


class TestBinomialDevianceLoss(unittest.TestCase):
    def test_value(self):
        torch.manual_seed(0)
        labels = torch.tensor([0, 0, 1, 1, 2, 0])
        for dtype in TEST_DTYPES:
            rtol = 1e-9 if dtype == torch.float64 else 1e-4
            for alpha, beta, C in [(2, 0.5, 25), (1, 0.2, 3)]:
                embeddings = torch.randn(
                    6, 8, requires_grad=True, dtype=dtype, device=TEST_DEVICE
                )
                loss_fn = BinomialDevianceLoss(alpha, beta, C)
                loss = loss_fn(embeddings, labels)
                loss.backward()
                correct = by_loops(embeddings, labels, alpha, beta, C)
                self.assertTrue(math.isclose(loss.item(), sum(correct), rel_tol=rtol))
                self.assertTrue(torch.isfinite(embeddings.grad).all())
                mean = BinomialDevianceLoss(alpha, beta, C, reducer=MeanReducer())
                self.assertTrue(
                    math.isclose(
                        mean(embeddings, labels).item(), sum(correct) / 6, rel_tol=rtol
                    )
                )

    def test_singletons_only(self):
        for dtype in TEST_DTYPES:
            embeddings = torch.eye(
                3, requires_grad=True, dtype=dtype, device=TEST_DEVICE
            )
            loss = BinomialDevianceLoss()(embeddings, torch.arange(3))
            loss.backward()
            correct = 3 * math.log(1 + math.exp(-25))
            self.assertAlmostEqual(loss.item(), correct, places=9)
