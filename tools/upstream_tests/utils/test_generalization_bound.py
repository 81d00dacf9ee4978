import unittest

import torch

from pytorch_metric_learning.utils.generalization_bound import (
    h_divergence,
    ideal_joint_error,
)

from .. import TEST_DEVICE, TEST_DTYPES


class TestGeneralizationBound(unittest.TestCase):
    def test_classes_apart_and_alike(self):
        for dtype in TEST_DTYPES:
            if dtype == torch.float16:
                continue
            y = torch.arange(4, device=TEST_DEVICE).repeat(2)
            x = torch.eye(4, dtype=dtype, device=TEST_DEVICE).repeat(2, 1)
            seen, unseen = y < 2, y >= 2
            domains = x[seen], y[seen], x[unseen], y[unseen]
            self.assertEqual(ideal_joint_error(*domains), 0)
            self.assertEqual(h_divergence(*domains), 1)

    def test_class_seen_and_unseen(self):
        x, y = torch.eye(4), torch.tensor([0, 0, 1, 1])
        with self.assertRaises(ValueError):
            ideal_joint_error(x, y, x, y)
