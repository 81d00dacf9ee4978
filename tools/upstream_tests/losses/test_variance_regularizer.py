import math
import unittest

import torch

from pytorch_metric_learning.losses import VarianceRegularizer
from pytorch_metric_learning.losses.variance_regularizer import VEMAttention
from pytorch_metric_learning.utils.embedding_head import EmbeddingHead

from .. import TEST_DEVICE, TEST_DTYPES


class TestVarianceRegularizer(unittest.TestCase):
    def test_value(self):
        torch.manual_seed(9)
        for dtype in TEST_DTYPES:
            rtol = 1e-9 if dtype == torch.float64 else 1e-4
            pooled = torch.randn(6, 3, dtype=dtype, device=TEST_DEVICE)
            predicted = torch.rand(3, dtype=dtype, device=TEST_DEVICE)
            loss = VarianceRegularizer()(pooled, features=(pooled, predicted))
            x, A = pooled.double().cpu(), predicted.double().cpu()
            correct = 0
            for i in range(3):
                mean = float(x[:, i].sum()) / 6
                variance = sum((float(x[n, i]) - mean) ** 2 for n in range(6)) / 6
                correct += (variance - float(A[i])) ** 2 / 3
            self.assertTrue(math.isclose(loss.item(), correct, rel_tol=rtol))

    def test_attention(self):
        for dtype in TEST_DTYPES:
            if dtype == torch.float16:
                continue
            head = EmbeddingHead(3, 4, attention=VEMAttention).to(TEST_DEVICE, dtype)
            loss_fn = VarianceRegularizer().attach(head)
            x = torch.randn(6, 3, 2, 2, dtype=dtype, device=TEST_DEVICE)
            embeddings = head(x)
            loss_fn(embeddings).backward()
            self.assertTrue((head.attention.variance.grad != 0).any())
            gated = x.mean(dim=(2, 3)) * torch.sigmoid(head.attention.variance)
            correct = torch.nn.functional.normalize(head.fc(gated))
            self.assertTrue(torch.allclose(embeddings, correct, atol=1e-5))
            self.assertTrue(torch.allclose(head.fold()(x), correct, atol=1e-5))

    def test_one_sample(self):
        pooled = torch.ones(1, 3, requires_grad=True, device=TEST_DEVICE)
        predicted = torch.zeros(3, device=TEST_DEVICE)
        for unbiased in (False, True):
            loss_fn = VarianceRegularizer(unbiased=unbiased)
            loss = loss_fn(pooled, features=(pooled, predicted))
            loss.backward()
            self.assertEqual(loss.item(), 0)
            self.assertTrue((pooled.grad == 0).all())
