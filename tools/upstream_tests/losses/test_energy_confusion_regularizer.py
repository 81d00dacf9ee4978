import math
import unittest

import torch

from pytorch_metric_learning.losses import (
    ContrastiveLoss,
    EnergyConfusionRegularizer,
    MultipleLosses,
)
from pytorch_metric_learning.utils.embedding_head import EmbeddingHead

from .. import TEST_DEVICE, TEST_DTYPES


def by_loops(embeddings, labels):
    """log(1 + mean squared distance) of every ordered pair of classes."""
    x = torch.nn.functional.normalize(embeddings.detach().double().cpu())
    terms = []
    for a in set(labels.tolist()):
        for b in set(labels.tolist()) - {a}:
            distances = [
                float(((x[i] - x[j]) ** 2).sum())
                for i in range(len(x))
                for j in range(len(x))
                if labels[i] == a and labels[j] == b
            ]
            terms.append(math.log(1 + sum(distances) / len(distances)))
    return terms


class TestEnergyConfusionRegularizer(unittest.TestCase):
    def test_value(self):
        torch.manual_seed(3)
        labels = torch.tensor([5, 5, 1, 1, 2, 5])
        for dtype in TEST_DTYPES:
            rtol = 1e-9 if dtype == torch.float64 else 1e-4
            embeddings = torch.randn(
                6, 4, requires_grad=True, dtype=dtype, device=TEST_DEVICE
            )
            terms = by_loops(embeddings, labels)
            for reduction, correct in [
                ("mean", sum(terms) / len(terms)),
                ("ordered_sum", sum(terms)),
            ]:
                loss_fn = EnergyConfusionRegularizer(
                    gradient="all", reduction=reduction
                )
                loss = loss_fn(embeddings, labels)
                loss.backward()
                self.assertTrue(math.isclose(loss.item(), correct, rel_tol=rtol))

    def test_gradient_to_the_linear_layer_only(self):
        for dtype in TEST_DTYPES:
            if dtype == torch.float16:
                continue
            head = EmbeddingHead(3, 4).to(TEST_DEVICE, dtype)
            x = torch.randn(
                4, 3, 2, 2, requires_grad=True, dtype=dtype, device=TEST_DEVICE
            )
            loss_fn = EnergyConfusionRegularizer().attach(head)
            loss_fn(head(x), torch.tensor([0, 0, 1, 1])).backward()
            self.assertIsNone(x.grad)
            self.assertTrue((head.fc.weight.grad != 0).any())

    def test_one_class_and_no_labels(self):
        embeddings = torch.eye(3, requires_grad=True, device=TEST_DEVICE)
        loss_fn = EnergyConfusionRegularizer(gradient="all")
        loss = loss_fn(embeddings, torch.zeros(3, dtype=torch.long))
        loss.backward()
        self.assertEqual(loss.item(), 0)
        self.assertTrue((embeddings.grad == 0).all())
        with self.assertRaises(ValueError):
            ContrastiveLoss(embedding_regularizer=loss_fn)(embeddings, torch.arange(3))

    def test_beside_a_loss(self):
        embeddings = torch.eye(4, device=TEST_DEVICE)
        labels = torch.tensor([0, 0, 1, 1])
        metric, energy = ContrastiveLoss(), EnergyConfusionRegularizer(gradient="all")
        loss = MultipleLosses([metric, energy], weights=[1, 0.5])(embeddings, labels)
        correct = metric(embeddings, labels) + 0.5 * math.log(3)
        self.assertAlmostEqual(loss.item(), correct.item(), places=5)
