"""What `python -m benchmarks.speed` compares, at the papers' sizes or at tiny ones."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring import Comparison, Target
from pml_regularizers import HighOrderMoments

Device = torch.device


def horde_moments(tiny: bool, device: Device) -> Comparison:
    """HORDE's moments against nothing but their matrix products."""
    N, P, C, d, K = (3, 4, 16, 300, 3) if tiny else (40, 64, 1024, 8192, 5)
    side = int(P**0.5)
    feature_map = torch.randn(N, C, side, side, device=device, requires_grad=True)
    x = feature_map.detach().flatten(2).transpose(1, 2).reshape(N * P, C)
    gradients = [torch.randn(N, d, device=device) for _ in range(K - 1)]
    modules = {
        activations: HighOrderMoments(
            C, order=K, moment_dim=d, activations=activations, scale=False
        ).to(device)
        for activations in ("autograd", "store", "recompute")
    }
    weights = [weight.detach() for weight in modules["store"].weights()]
    out, gradient = torch.randn(2, N * P, d, device=device)
    dx, dw = torch.empty_like(x), torch.empty_like(weights[0])

    def products() -> None:
        for weight in weights:
            torch.mm(x, weight, out=out)
        for weight in weights:
            torch.mm(gradient, weight.T, out=dx)
            torch.mm(x.T, gradient, out=dw)

    def moments(module: HighOrderMoments) -> tuple[Tensor, ...]:
        inputs = [feature_map, *module.parameters()]
        return torch.autograd.grad(module(feature_map), inputs, gradients)

    on_gpu = device.type == "cuda"
    return Comparison(
        "HORDE's moments, forward and backward",
        f"{N} maps of {side} x {side} x {C}, {K} orders of {d}, float32",
        {
            "matrix products alone": products,
            **{name: partial(moments, module) for name, module in modules.items()},
        },
        time_against="matrix products alone",
        memory_against="autograd",
        targets={
            "store": Target(1.15 if on_gpu else 1.10, 2 / 3),
            "recompute": Target(1.45 if on_gpu else 1.35, 1 / 16 if on_gpu else 1 / 8),
        },
    )


CASES: dict[str, Callable[[bool, Device], Comparison]] = {
    "horde_moments": horde_moments,
}
