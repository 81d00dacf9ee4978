import unittest

import torch

from pytorch_metric_learning.distances import CosineSimilarity, LpDistance
from pytorch_metric_learning.losses import (
    ContrastiveLoss,
    EnergyConfusionLoss,
    MultipleLosses,
)
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.reducers import ClassWeightedReducer, SumReducer

from .. import TEST_DEVICE, TEST_DTYPES


def energy_of_class_pairs(x, labels):
    output = {}
    for a in set(labels.tolist()):
        for b in set(labels.tolist()) - {a}:
            diffs = [p - q for p in x[labels == a] for q in x[labels == b]]
            squares = [torch.sum(d**2) for d in diffs]
            output[(a, b)] = sum(squares) / len(squares)
    return output


class TestEnergyConfusionLoss(unittest.TestCase):
    def test_energy_confusion_loss(self):
        torch.manual_seed(3459)
        labels = torch.tensor([5, 5, 1, 1, 2, 5], device=TEST_DEVICE)
        for dtype in TEST_DTYPES:
            rtol = 1e-2 if dtype == torch.float16 else 1e-5
            embeddings = torch.randn(
                6, 8, requires_grad=True, dtype=dtype, device=TEST_DEVICE
            )
            normalized = torch.nn.functional.normalize(embeddings)
            for normalize, x in [(True, normalized), (False, embeddings)]:
                energies = energy_of_class_pairs(x, labels).values()
                for log in [True, False]:
                    correct = [torch.log(1 + e) if log else e for e in energies]
                    self.assertEqual(len(correct), 6)
                    for reducer, correct_loss in [
                        (None, sum(correct) / 6),
                        (SumReducer(), sum(correct)),
                    ]:
                        distance = LpDistance(power=2, normalize_embeddings=normalize)
                        loss_func = EnergyConfusionLoss(
                            log=log, distance=distance, reducer=reducer
                        )
                        loss = loss_func(embeddings, labels)
                        self.assertTrue(torch.isclose(loss, correct_loss, rtol=rtol))

                        (grad,) = torch.autograd.grad(loss, embeddings)
                        (correct_grad,) = torch.autograd.grad(
                            correct_loss, embeddings, retain_graph=True
                        )
                        atol = 1e-2 if dtype == torch.float16 else 1e-5
                        self.assertTrue(
                            torch.allclose(grad, correct_grad, rtol=rtol, atol=atol)
                        )

    def test_indices_are_members_of_the_classes(self):
        weights = torch.tensor([1.0, 10.0, 100.0])
        labels = torch.tensor([2, 0, 1, 1])
        embeddings = torch.randn(4, 8)
        distance = LpDistance(power=2, normalize_embeddings=False)
        loss_func = EnergyConfusionLoss(
            log=False, distance=distance, reducer=ClassWeightedReducer(weights)
        )
        energies = energy_of_class_pairs(embeddings, labels)
        correct_loss = sum(weights[a] * e for (a, b), e in energies.items()) / 6
        self.assertTrue(torch.isclose(loss_func(embeddings, labels), correct_loss))

    def test_with_one_class(self):
        for dtype in TEST_DTYPES:
            embeddings = torch.randn(
                3, 4, requires_grad=True, dtype=dtype, device=TEST_DEVICE
            )
            loss = EnergyConfusionLoss()(embeddings, torch.ones(3, dtype=torch.long))
            loss.backward()
            self.assertEqual(loss, 0)
            self.assertTrue(torch.all(embeddings.grad == 0))

    def test_other_distance_and_close_classes(self):
        torch.manual_seed(1122)
        labels = torch.tensor([0, 0, 1, 2, 2])
        loss_func = EnergyConfusionLoss(log=False, distance=LpDistance(power=1))
        embeddings = torch.nn.functional.normalize(torch.randn(5, 3))
        mat = torch.cdist(embeddings, embeddings)
        correct_loss = (mat[:2, 2].mean() + mat[:2, 3:].mean() + mat[2, 3:].mean()) / 3
        self.assertTrue(torch.isclose(loss_func(embeddings, labels), correct_loss))

        distance = LpDistance(power=2, normalize_embeddings=False)
        loss_func = EnergyConfusionLoss(
            log=False, distance=distance, reducer=SumReducer()
        )
        # 2 classes that are close to each other, and far from the mean of the batch
        embeddings = torch.tensor([[100.0], [100.0], [100.001], [100.0], [100.0]])
        gap = (embeddings[2] - embeddings[0]).item() ** 2
        labels = torch.tensor([0, 0, 1, 0, 0])
        self.assertAlmostEqual(loss_func(embeddings, labels).item() / gap, 2, places=4)

    def test_gradient_of_last_layer_only(self):
        trunk, embedder = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        features = trunk(torch.randn(4, 3))
        labels = torch.tensor([0, 0, 1, 1])
        EnergyConfusionLoss()(embedder(features.detach()), labels).backward()
        self.assertTrue(trunk.weight.grad is None)
        self.assertTrue(torch.any(embedder.weight.grad != 0))

    def test_combined_with_another_loss(self):
        embeddings = torch.randn(6, 4, device=TEST_DEVICE)
        labels = torch.tensor([0, 0, 1, 1, 2, 2], device=TEST_DEVICE)
        metric_loss, energy_loss = ContrastiveLoss(), EnergyConfusionLoss()
        miner = MultiSimilarityMiner()
        loss_func = MultipleLosses(
            {"metric": metric_loss, "energy": energy_loss},
            miners={"metric": miner},
            weights={"metric": 1, "energy": 0.5},
        )
        correct_loss = metric_loss(embeddings, labels, miner(embeddings, labels))
        correct_loss += 0.5 * energy_loss(embeddings, labels)
        self.assertTrue(torch.isclose(loss_func(embeddings, labels), correct_loss))

    def test_unsupported(self):
        embeddings = torch.randn(4, 2)
        labels = torch.tensor([0, 0, 1, 1])
        loss_func = EnergyConfusionLoss()
        with self.assertRaises(ValueError):
            loss_func(embeddings)
        with self.assertRaises(ValueError):
            loss_func(embeddings, labels, ref_emb=torch.randn(4, 2), ref_labels=labels)
        with self.assertRaises(ValueError):
            loss_func(embeddings, labels, MultiSimilarityMiner()(embeddings, labels))
        with self.assertRaises(ValueError):
            EnergyConfusionLoss(distance=CosineSimilarity())
