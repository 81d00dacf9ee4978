import unittest

import torch

from pytorch_metric_learning.losses import (
    ContrastiveLoss,
    CrossBatchMemory,
    SelfSupervisedLoss,
)

from .. import TEST_DEVICE


class UnknownLoss(ContrastiveLoss):
    pass


class KnownLoss(ContrastiveLoss):
    supported_wrappers = ["CrossBatchMemory", "SelfSupervisedLoss"]


class MemoryLoss(ContrastiveLoss):
    supported_wrappers = ["CrossBatchMemory"]


class CustomMemory(CrossBatchMemory):
    pass


class TestSupportedWrappers(unittest.TestCase):
    def test_values(self):
        torch.manual_seed(3459)
        embeddings = torch.randn(8, 4, device=TEST_DEVICE)
        labels = torch.arange(8, device=TEST_DEVICE) // 2
        correct = CrossBatchMemory(ContrastiveLoss(), 4, memory_size=16)
        for loss in [KnownLoss(), MemoryLoss()]:
            for wrapper in [CrossBatchMemory, CustomMemory]:
                correct.reset_queue()
                memory = wrapper(loss, 4, memory_size=16)
                for _ in range(3):
                    self.assertEqual(
                        memory(embeddings, labels), correct(embeddings, labels)
                    )
        self.assertEqual(
            SelfSupervisedLoss(KnownLoss())(embeddings, -embeddings),
            SelfSupervisedLoss(ContrastiveLoss())(embeddings, -embeddings),
        )

    def test_unsupported(self):
        for loss in [UnknownLoss(), torch.nn.Identity()]:
            for wrapper in [CrossBatchMemory, CustomMemory]:
                with self.assertRaises(Exception):
                    wrapper(loss, 4)
        for loss in [UnknownLoss(), MemoryLoss()]:
            with self.assertRaises(Exception):
                SelfSupervisedLoss(loss)
