import math
import unittest

import torch

from pytorch_metric_learning.losses import DenseNPairsLoss

from .. import TEST_DEVICE, TEST_DTYPES


class TestDenseNPairsLoss(unittest.TestCase):
    def test_value(self):
        torch.manual_seed(2)
        labels = torch.tensor([0, 0, 1, 1, 2, 0])
        for dtype in TEST_DTYPES:
            rtol = 1e-9 if dtype == torch.float64 else 1e-4
            embeddings = torch.randn(
                6, 4, requires_grad=True, dtype=dtype, device=TEST_DEVICE
            )
            loss = DenseNPairsLoss()(embeddings, labels)
            loss.backward()
            x = embeddings.detach().double().cpu()
            correct = 0
            for i in range(6):
                for p in range(6):
                    if i != p and labels[i] == labels[p]:
                        negatives = [
                            math.exp(float(x[i] @ x[j] - x[i] @ x[p]))
                            for j in range(6)
                            if labels[i] != labels[j]
                        ]
                        correct += math.log(1 + sum(negatives))
            self.assertTrue(math.isclose(loss.item(), correct, rel_tol=rtol))

    def test_one_class(self):
        for dtype in TEST_DTYPES:
            embeddings = torch.eye(
                3, requires_grad=True, dtype=dtype, device=TEST_DEVICE
            )
            loss = DenseNPairsLoss()(embeddings, torch.zeros(3, dtype=torch.long))
            loss.backward()
            self.assertEqual(loss.item(), 0)
            self.assertTrue((embeddings.grad == 0).all())
