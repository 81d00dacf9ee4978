import unittest

import torch

from pytorch_metric_learning.losses import ContrastiveLoss, DistributedLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner

from .. import TEST_DEVICE, TEST_DTYPES


class TestDistributedLoss(unittest.TestCase):
    def test_one_process(self):
        torch.manual_seed(5)
        labels = torch.tensor([0, 0, 1, 1])
        for dtype in TEST_DTYPES:
            if dtype == torch.float16:
                continue
            embeddings = torch.randn(4, 3, dtype=dtype, device=TEST_DEVICE)
            metric, miner = ContrastiveLoss(), MultiSimilarityMiner(epsilon=1)
            loss = DistributedLoss(metric, miner=miner)(embeddings, labels)
            correct = metric(embeddings, labels, miner(embeddings, labels))
            self.assertEqual(loss.item(), correct.item())

    def test_features_for_a_loss_that_takes_none(self):
        x = torch.eye(4, device=TEST_DEVICE)
        with self.assertRaises(ValueError):
            DistributedLoss(ContrastiveLoss())(x, torch.arange(4), features=x)
