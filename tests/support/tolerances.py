"""Tolerances of results against the exact ones.

One bound per dtype of the *result*, relative to the largest expected entry. Half-precision inputs have no
bound of their own: they are exact as float32 numbers, and everything is computed in at least float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BOUNDS = {
    # Rounding (1e-16) grows with the number of terms and factors: order 5 of 100 terms stays below this.
    torch.float64: 1e-11,
    # The same in float32 (6e-8), and steep losses multiply it: binomial deviance by alpha * C = 50.
    torch.float32: 3e-5,
    # Only gradients that autograd rounds back to the dtype of their input: a few half-units in the last place.
    torch.float16: 2**-9,
    torch.bfloat16: 2**-6,
}


def assert_close(actual: Tensor, expected: Tensor | Sequence[float] | float) -> None:
    """Same shape, and no entry further away than the bound of `actual`'s dtype allows.

    An expectation of nothing but zeros proves nothing: it is refused.
    """
    expected = torch.as_tensor(expected, dtype=torch.float64)
    largest = expected.abs().max().item()
    assert largest > 0, "an all-zero expectation would be met by code that does nothing"
    bound = BOUNDS[actual.dtype] * largest
    torch.testing.assert_close(actual.detach().double(), expected.detach(), rtol=0, atol=bound)
