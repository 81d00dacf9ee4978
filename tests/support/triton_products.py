"""The Triton kernels against torch, under Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.support.triton_products CASES
"""

import sys
from itertools import product

import torch

from pml_regularizers._summed_products import summed_products
from tests.support.tolerances import assert_close

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def main(count: int) -> None:
    cases = list(product(DTYPES, (2, 4), ("store", "recompute")))[:count]
    for products, first, activations in cases:
        dtype = torch.float64 if products == torch.float64 else torch.float32
        x = torch.randn(3, 19, 5, dtype=dtype, requires_grad=True)  # tiles are 16 x 64
        matrices = [torch.randn(5, 70, dtype=dtype, requires_grad=True) for _ in range(4)]
        results = []
        for kernels in ("triton", "torch"):
            sums = summed_products(
                x, matrices, first=first, dtype=products, activations=activations, kernels=kernels
            )
            weights = torch.linspace(-1, 1, sums.numel(), dtype=dtype).view_as(sums)
            results.append([sums, *torch.autograd.grad(sums, [x, *matrices], weights)])
        for fused, plain in zip(*results, strict=True):
            if products == torch.bfloat16:  # which the interpreter cuts instead of rounding
                assert (fused - plain).abs().max() < 2**-6 * plain.abs().max()
            else:
                assert_close(fused, plain)
    print(len(cases), "cases agree")


if __name__ == "__main__":
    torch.manual_seed(0)
    main(int(sys.argv[1]))
