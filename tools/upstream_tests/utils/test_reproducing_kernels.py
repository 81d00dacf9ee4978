import math
import unittest

import torch

from pytorch_metric_learning.utils.reproducing_kernels import (
    ExponentialKernel,
    GaussianKernel,
    GaussianMixtureKernel,
    LaplaceKernel,
    LinearKernel,
    PolynomialKernel,
)

from .. import TEST_DEVICE, TEST_DTYPES


class TestReproducingKernels(unittest.TestCase):
    def test_values(self):
        torch.manual_seed(13)
        for dtype in TEST_DTYPES:
            rtol = 1e-9 if dtype == torch.float64 else 1e-3
            x = torch.randn(5, 3, dtype=dtype, device=TEST_DEVICE)
            rows = x.double().cpu()

            def square(i, j):
                return float(((rows[i] - rows[j]) ** 2).sum())

            def manhattan(i, j):
                return float((rows[i] - rows[j]).abs().sum())

            def inner(i, j):
                return float(rows[i] @ rows[j])

            tau = sum(square(i, j) for i in range(5) for j in range(5)) / 20
            for kernel, value in [
                (GaussianKernel(3.0), lambda i, j: math.exp(-square(i, j) / 3)),
                (
                    GaussianMixtureKernel(),
                    lambda i, j: sum(
                        math.exp(-square(i, j) / (tau * s)) / 3 for s in (0.5, 1, 2)
                    ),
                ),
                (LaplaceKernel(3.0), lambda i, j: math.exp(-manhattan(i, j) / 3)),
                (PolynomialKernel(2), lambda i, j: (inner(i, j) + 1) ** 2),
                (ExponentialKernel(), lambda i, j: math.exp(inner(i, j))),
                (LinearKernel(), inner),
            ]:
                K = kernel(x)
                correct = [[value(i, j) for j in range(5)] for i in range(5)]
                correct = torch.tensor(correct, dtype=torch.float64)
                atol = rtol * correct.abs().max().item()
                self.assertTrue(torch.allclose(K.double().cpu(), correct, atol=atol))

    def test_equal_rows(self):
        x = torch.ones(3, 2, requires_grad=True, device=TEST_DEVICE)
        K = GaussianMixtureKernel()(x)
        K.sum().backward()
        self.assertTrue((K == 1).all())
        self.assertTrue((x.grad == 0).all())
