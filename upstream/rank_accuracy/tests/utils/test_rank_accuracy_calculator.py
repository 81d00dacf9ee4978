import math
import unittest
from unittest.mock import patch

import torch

from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils import rank_accuracy_calculator
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from pytorch_metric_learning.utils.rank_accuracy_calculator import (
    RankAccuracyCalculator,
)

from .. import TEST_DEVICE

METRICS = (
    "precision_at_1",
    "mean_reciprocal_rank",
    "mean_average_precision_at_r",
    "r_precision",
)


def no_kmeans(x, num_clusters):
    raise NotImplementedError


class TestRankAccuracyCalculator(unittest.TestCase):
    def get_calculator(self, **kwargs):
        return RankAccuracyCalculator(
            device=TEST_DEVICE, exclude=("NMI", "AMI"), kmeans_func=no_kmeans, **kwargs
        )

    def get_correct_calculator(self, **kwargs):
        return AccuracyCalculator(
            include=METRICS,
            device=TEST_DEVICE,
            knn_func=CustomKNN(LpDistance(normalize_embeddings=False)),
            kmeans_func=no_kmeans,
            **kwargs,
        )

    def test_equal_to_accuracy_calculator(self):
        torch.manual_seed(3459)
        x, y = torch.randn(60, 4), torch.randn(90, 4)
        # labels of 1 or more elements, some of them without any reference
        x_labels, y_labels = torch.randint(12, (60,)), torch.randint(2, 20, (90,))
        both, both_labels = torch.cat([x, y]), torch.cat([x_labels, y_labels])
        for data in [
            (x, x_labels),
            (x, x_labels, y, y_labels),
            (x, x_labels, both, both_labels, True),
        ]:
            for kwargs in [{}, {"avg_of_avgs": True}, {"return_per_class": True}]:
                correct = self.get_correct_calculator(**kwargs).get_accuracy(*data)
                for block_size in [2**24, 700, 1]:
                    with patch.object(
                        rank_accuracy_calculator, "BLOCK_SIZE", block_size
                    ):
                        acc = self.get_calculator(**kwargs).get_accuracy(*data)
                    for name in METRICS:
                        result = torch.tensor(acc[name]).double()
                        correct_result = torch.tensor(correct[name]).double()
                        self.assertTrue(torch.allclose(result, correct_result))

    def test_recall(self):
        points = torch.tensor([[0.0], [1.0], [5.0], [3.0], [3.5], [9.0]])
        labels = torch.tensor([0, 0, 1, 1, 0, 2])
        # ranks of the nearest right reference: 1, 1, 2, 3, 3, and none for the last
        calculator = self.get_calculator(recall_at=(1, 2, 3, 100))
        acc = calculator.get_accuracy(points, labels)
        for k, correct in [(1, 0.4), (2, 0.6), (3, 1), (100, 1)]:
            self.assertAlmostEqual(acc["recall_at_{}".format(k)], correct)
        correct_mrr = (1 + 1 + 1 / 2 + 1 / 3 + 1 / 3) / 5
        self.assertAlmostEqual(acc["mean_reciprocal_rank"], correct_mrr)
        acc = calculator.get_accuracy(points, labels, include=("recall_at_2",))
        self.assertEqual(list(acc.keys()), ["recall_at_2"])

    def test_ties(self):
        labels = torch.arange(40) % 4
        acc = self.get_calculator().get_accuracy(torch.ones(40, 3), labels)
        for name in METRICS[:1] + METRICS[2:] + ("recall_at_8",):
            self.assertEqual(acc[name], 0)
        self.assertAlmostEqual(acc["mean_reciprocal_rank"], 1 / 31)

    def test_no_right_references(self):
        x, labels = torch.randn(4, 3), torch.arange(4)
        acc = self.get_calculator().get_accuracy(x, labels)
        self.assertTrue(all(math.isnan(v) for v in acc.values()))
        acc = self.get_calculator(return_per_class=True).get_accuracy(x, labels)
        self.assertEqual(len(acc["recall_at_1"]), 4)
        self.assertTrue(all(math.isnan(v) for v in acc["recall_at_1"]))

    def test_metrics(self):
        names = set(RankAccuracyCalculator(kmeans_func=no_kmeans).get_curr_metrics())
        recalls = {"recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8"}
        self.assertEqual(names, {"NMI", "AMI", *METRICS, *recalls})
        with self.assertRaises(ValueError):
            RankAccuracyCalculator(include=("mean_average_precision",))

    def test_clustering(self):
        calculator = RankAccuracyCalculator(
            include=("NMI", "recall_at_1"),
            device=TEST_DEVICE,
            kmeans_func=lambda x, num_clusters: (x[:, 0] > 1).long(),
        )
        x = torch.tensor([[0.0], [0.1], [2.0], [2.1]])
        acc = calculator.get_accuracy(x, torch.tensor([0, 0, 1, 1]))
        self.assertAlmostEqual(acc["NMI"], 1)
        self.assertEqual(acc["recall_at_1"], 1)
