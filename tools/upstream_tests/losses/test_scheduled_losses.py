import unittest

import torch

from pytorch_metric_learning.losses import (
    ContrastiveLoss,
    ScheduledLosses,
    TripletMarginLoss,
)
from pytorch_metric_learning.losses.scheduled_losses import LinearRamp

from .. import TEST_DEVICE, TEST_DTYPES


class TestScheduledLosses(unittest.TestCase):
    def test_weights(self):
        labels = torch.tensor([0, 0, 1, 1])
        for dtype in TEST_DTYPES:
            if dtype == torch.float16:
                continue
            embeddings = torch.eye(4, dtype=dtype, device=TEST_DEVICE)
            parts = [TripletMarginLoss(), ContrastiveLoss()]
            loss_fn = ScheduledLosses(parts, weights=[1, LinearRamp(0, 0.5, steps=4)])
            triplet, contrastive = (part(embeddings, labels).item() for part in parts)
            for weight in (0, 0.125, 0.25, 0.375, 0.5, 0.5):
                loss = loss_fn(embeddings, labels)
                self.assertAlmostEqual(loss.item(), triplet + weight * contrastive, 5)

    def test_step_is_saved(self):
        parts = {"a": ContrastiveLoss()}
        old, new = ScheduledLosses(parts), ScheduledLosses(parts)
        old.set_step(7)
        new.load_state_dict(old.state_dict())
        self.assertEqual(int(new.step), 7)
