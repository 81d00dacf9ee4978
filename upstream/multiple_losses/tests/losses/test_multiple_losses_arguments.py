import unittest

import torch

from pytorch_metric_learning.losses import (
    ArcFaceLoss,
    BaseMetricLossFunction,
    ContrastiveLoss,
    MultipleLosses,
)

from .. import TEST_DEVICE, TEST_DTYPES


class ScaledLoss(BaseMetricLossFunction):
    def forward(self, embeddings, labels, indices_tuple=None, scale=1):
        return torch.sum(embeddings) * scale


class TestMultipleLossesArguments(unittest.TestCase):
    def test_only_losses_that_take_it(self):
        labels = torch.tensor([0, 0, 1, 1], device=TEST_DEVICE)
        metric_loss, scaled_loss = ContrastiveLoss(), ScaledLoss()
        for dtype in TEST_DTYPES:
            embeddings = torch.randn(4, 3, dtype=dtype, device=TEST_DEVICE)
            correct_loss = metric_loss(embeddings, labels)
            correct_loss += torch.sum(embeddings) * 3 * 0.5
            for loss_func in [
                MultipleLosses([metric_loss, scaled_loss], weights=[1, 0.5]),
                MultipleLosses(
                    {"a": metric_loss, "b": scaled_loss}, weights={"a": 1, "b": 0.5}
                ),
                MultipleLosses(
                    [MultipleLosses([metric_loss]), MultipleLosses([scaled_loss])],
                    weights=[1, 0.5],
                ),
            ]:
                loss = loss_func(embeddings, labels, scale=3)
                self.assertTrue(torch.isclose(loss, correct_loss, rtol=1e-2))

    def test_reference_set(self):
        embeddings, ref_emb = torch.randn(4, 3), torch.randn(6, 3)
        labels, ref_labels = torch.arange(4) % 2, torch.arange(6) % 2
        kwargs = {"ref_emb": ref_emb, "ref_labels": ref_labels}
        metric_loss = ContrastiveLoss()
        loss = MultipleLosses([metric_loss, metric_loss])(embeddings, labels, **kwargs)
        correct_loss = metric_loss(embeddings, labels, **kwargs)
        self.assertTrue(torch.isclose(loss, 2 * correct_loss))

    def test_argument_of_none(self):
        embeddings, labels = torch.randn(4, 3), torch.arange(4)
        for loss_func in [
            MultipleLosses([ContrastiveLoss(), ArcFaceLoss(4, 3)]),
            MultipleLosses({"a": MultipleLosses([ContrastiveLoss()])}),
        ]:
            with self.assertRaises(TypeError):
                loss_func(embeddings, labels, scale=3)
