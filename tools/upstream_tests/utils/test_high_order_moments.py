import unittest

import torch

from pytorch_metric_learning.utils.high_order_moments import HighOrderMoments

from .. import TEST_DEVICE, TEST_DTYPES


class TestHighOrderMoments(unittest.TestCase):
    def test_value(self):
        torch.manual_seed(11)
        for dtype in TEST_DTYPES:
            rtol = 1e-9 if dtype == torch.float64 else 1e-3
            x = torch.randn(2, 4, 3, dtype=dtype, device=TEST_DEVICE)
            for projections in ("cascaded", "independent", "random"):
                moments = HighOrderMoments(
                    3, order=3, moment_dim=5, projections=projections
                ).to(TEST_DEVICE)
                W = [weight.double() for weight in moments.weights()]
                sets = {
                    "cascaded": [W[:2], W[:3]],
                    "independent": [W[:2], W[2:]],
                    "random": [W[:2], W[:3]],
                }[projections]
                for z, matrices in zip(moments(x), sets):
                    phi = 5**-0.5
                    for matrix in matrices:
                        phi = phi * (x.double() @ matrix)
                    correct = phi.mean(dim=1)
                    atol = rtol * correct.abs().max().item()
                    self.assertTrue(torch.allclose(z.double(), correct, atol=atol))

    def test_estimates_powers_of_inner_products(self):
        torch.manual_seed(12)
        sketches = ("sketch",) if hasattr(torch.fft, "rfft") else ()
        for projections in ("random", *sketches):
            moments = HighOrderMoments(
                4, order=3, moment_dim=2**15, projections=projections
            ).to(TEST_DEVICE)
            x = torch.randn(2, 1, 4, device=TEST_DEVICE)
            x = x / x.norm(dim=2, keepdim=True)
            inner = (x[0, 0] @ x[1, 0]).item()
            for k, z in enumerate(moments(x), start=2):
                self.assertAlmostEqual((z[0] @ z[1]).item(), inner**k, delta=0.1)
