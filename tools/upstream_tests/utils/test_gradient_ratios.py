import unittest

import torch

from pytorch_metric_learning.losses import ContrastiveLoss, MultipleLosses
from pytorch_metric_learning.utils.gradient_ratios import (
    gradient_norm_ratios,
    record_terms,
)

from .. import TEST_DEVICE, TEST_DTYPES


class TestGradientRatios(unittest.TestCase):
    def test_ratio(self):
        for dtype in TEST_DTYPES:
            if dtype == torch.float16:
                continue
            x = torch.tensor([3.0, 4.0], dtype=dtype, device=TEST_DEVICE)
            x.requires_grad_()
            terms = {"metric": x.sum(), "other": (x**2).sum()}
            found = gradient_norm_ratios(terms, base="metric", at={"x": x})
            self.assertAlmostEqual(found["other"]["x"], 10 / 2**0.5, places=5)
            self.assertIsNone(x.grad)

    def test_terms(self):
        embeddings = torch.eye(4, requires_grad=True, device=TEST_DEVICE)
        parts = {"a": ContrastiveLoss(), "b": ContrastiveLoss()}
        loss_fn = MultipleLosses(parts, weights={"a": 1, "b": 0.5})
        with record_terms(loss_fn) as terms:
            total = loss_fn(embeddings, torch.tensor([0, 0, 1, 1]))
        self.assertEqual(total.item(), sum(terms.values()).item())
        found = gradient_norm_ratios(terms, base="a", at={"x": embeddings})
        self.assertAlmostEqual(found["b"]["x"], 0.5, places=6)
        with self.assertRaises(ValueError):
            with record_terms(ContrastiveLoss()):
                pass
