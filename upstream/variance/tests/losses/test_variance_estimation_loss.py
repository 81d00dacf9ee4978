import unittest

import torch

from pytorch_metric_learning.losses import VarianceEstimationLoss
from pytorch_metric_learning.reducers import SumReducer
from pytorch_metric_learning.utils.variance_attention import VarianceAttention

from .. import TEST_DEVICE, TEST_DTYPES


class TestVarianceEstimationLoss(unittest.TestCase):
    def test_variance_estimation_loss(self):
        torch.manual_seed(3459)
        for dtype in TEST_DTYPES:
            rtol = 1e-2 if dtype == torch.float16 else 1e-5
            for unbiased in [False, True]:
                features = torch.randn(
                    16, 8, requires_grad=True, dtype=dtype, device=TEST_DEVICE
                )
                attention = VarianceAttention(8).to(TEST_DEVICE).type(dtype)
                variance = torch.var(features, dim=0, unbiased=unbiased)
                correct = (variance - attention.variance) ** 2

                for reducer, correct_loss in [
                    (None, torch.mean(correct)),
                    (SumReducer(), torch.sum(correct)),
                ]:
                    loss_func = VarianceEstimationLoss(
                        unbiased=unbiased, reducer=reducer
                    )
                    loss = loss_func(features, ref_emb=attention.variance.unsqueeze(0))
                    self.assertTrue(torch.isclose(loss, correct_loss, rtol=rtol))

                    inputs = [features, attention.variance]
                    grads = torch.autograd.grad(loss, inputs)
                    correct_grads = torch.autograd.grad(
                        correct_loss, inputs, retain_graph=True
                    )
                    for x, y in zip(grads, correct_grads):
                        self.assertTrue(torch.allclose(x, y, rtol=rtol, atol=rtol))

    def test_equal_rows_of_prediction(self):
        features = torch.randn(4, 8)
        attention = VarianceAttention(8)
        loss_func = VarianceEstimationLoss()
        loss = loss_func(features, ref_emb=attention.variance.unsqueeze(0))
        (grad,) = torch.autograd.grad(loss, attention.variance)
        repeated = attention.variance.repeat(3, 1)
        repeated_loss = loss_func(features, ref_emb=repeated)
        (repeated_grad,) = torch.autograd.grad(repeated_loss, attention.variance)
        self.assertTrue(torch.isclose(loss, repeated_loss))
        self.assertTrue(torch.allclose(grad, repeated_grad))

    def test_attention_learns_the_variance(self):
        torch.manual_seed(591)
        std = torch.tensor([0.5, 1.0, 1.5])
        features = torch.randn(64, 3) * std
        attention = VarianceAttention(3)
        optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
        loss_func = VarianceEstimationLoss()
        for _ in range(200):
            optimizer.zero_grad()
            loss_func(features, ref_emb=attention.variance.unsqueeze(0)).backward()
            optimizer.step()
        variance = torch.var(features, dim=0, unbiased=False)
        self.assertTrue(torch.allclose(attention.variance, variance, rtol=1e-3))
        correct_output = features * torch.sigmoid(variance)
        self.assertTrue(torch.allclose(attention(features), correct_output, rtol=1e-3))

    def test_no_samples(self):
        features = torch.randn(0, 3, requires_grad=True)
        loss = VarianceEstimationLoss()(features, ref_emb=torch.ones(1, 3))
        loss.backward()
        self.assertEqual(loss, 0)

    def test_one_sample(self):
        features = torch.randn(1, 3)
        for unbiased in [False, True]:
            loss_func = VarianceEstimationLoss(unbiased=unbiased)
            loss = loss_func(features, ref_emb=torch.full((1, 3), 2.0))
            self.assertEqual(loss, 4)

    def test_init_and_stats(self):
        attention = VarianceAttention(3, init="zeros")
        self.assertTrue(torch.all(attention(torch.ones(2, 3)) == 0.5))
        loss_func = VarianceEstimationLoss(collect_stats=True)
        loss_func(torch.tensor([[0.0], [2.0]]), ref_emb=torch.tensor([[3.0]]))
        self.assertEqual(loss_func.batch_variance, 1)
        self.assertEqual(loss_func.predicted_variance, 3)

    def test_unsupported(self):
        features, labels = torch.randn(4, 3), torch.arange(4)
        loss_func = VarianceEstimationLoss()
        for ref_emb in [None, torch.ones(3), torch.ones(1, 2)]:
            with self.assertRaises(ValueError):
                loss_func(features, ref_emb=ref_emb)
        with self.assertRaises(ValueError):
            loss_func(features, labels, ref_emb=torch.ones(1, 3))
        with self.assertRaises(ValueError):
            VarianceEstimationLoss(distance=None)
        with self.assertRaises(ValueError):
            VarianceAttention(3)(torch.randn(4, 2))
        with self.assertRaises(ValueError):
            VarianceAttention(3, init="ones")

    def test_channels_of_feature_maps(self):
        attention = VarianceAttention(3)
        features = torch.randn(2, 3, 4, 5)
        correct_output = attention(features.permute(0, 2, 3, 1).reshape(-1, 3))
        output = attention(features).permute(0, 2, 3, 1).reshape(-1, 3)
        self.assertTrue(torch.allclose(output, correct_output))
