"""The moments against the paper in loops, and at the limits of numbers."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pml_regularizers import HighOrderMoments
from pml_regularizers.functional.sketches import fast_width
from tests.library.expected import moments as expected_moments
from tests.library.expected import numbers
from tests.support.tolerances import assert_close

CHANNELS, DIM, ORDER = 5, 7, 5
VARIANTS = {
    "cascaded": {"projections": "cascaded"},
    "independent": {"projections": "independent"},
    "random": {"projections": "random"},
    "sketch": {"projections": "sketch"},
    "narrow_sketch": {"projections": "sketch", "moment_dim": 2},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str, **kwargs: Any) -> HighOrderMoments:
    sizes = {"in_channels": CHANNELS, "order": ORDER, "moment_dim": DIM}
    return HighOrderMoments(**{**sizes, **VARIANTS[variant], **kwargs})


def maps(images: int = 3) -> Tensor:
    return torch.randn(images, CHANNELS, 2, 3, dtype=torch.float64)


def masked_tokens() -> tuple[Tensor, Tensor]:
    """Three images, of one, two and three tokens."""
    tokens = torch.randn(3, 4, CHANNELS, dtype=torch.float64)
    return tokens, torch.arange(4) < torch.arange(1, 4).unsqueeze(1)


@every_variant
@pytest.mark.parametrize("draw", [maps, lambda: masked_tokens()[0], masked_tokens])
def test_equals_the_oracle(variant: str, draw: Any) -> None:
    module, features = build(variant).double(), draw()
    moments = module(features)
    expected = expected_moments(module, features)
    assert len(moments) == len(expected) == ORDER - 1
    for z, exact in zip(moments, expected, strict=True):
        assert_close(z, exact)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_whose_squares_are_infinite(variant: str, dtype: torch.dtype) -> None:
    """Values and gradients are right; only the factor s^k can be larger than float32."""
    module = build(variant, scale=False)
    exact = copy.deepcopy(module).double()
    features = (1e30 * maps()).to(dtype).requires_grad_()
    doubled = features.detach().double().requires_grad_()
    found, right = module(features), exact(doubled)
    for z, truth in zip(found, right, strict=True):
        assert_close(z, truth)
    gradients = [
        1e30 * torch.autograd.grad(sum(z.sum() for z in moments), x)[0]
        for moments, x in ((found, features), (right, doubled))
    ]
    assert_close(*gradients)
    assert all(z.isinf().all() for z in build(variant)(features))


def test_without_scale_the_features_of_each_image_have_size_one() -> None:
    module, features = build("cascaded", scale=False).double(), maps()
    size = features.square().mean(dim=(1, 2, 3)).sqrt()
    for k, (z, exact) in enumerate(
        zip(module(features), expected_moments(module, features), strict=True), start=2
    ):
        assert_close(z, exact / numbers(size)[:, None] ** k)
    assert module(features.float())[0].dtype == torch.float64  # that of the matrices


@every_variant
@pytest.mark.parametrize("garbage", [1e30, float("nan")])
def test_a_mask_drops_tokens_whatever_they_hold(variant: str, garbage: float) -> None:
    module, (tokens, kept) = build(variant).double(), masked_tokens()
    padded = tokens.masked_fill(~kept.unsqueeze(2), garbage).requires_grad_()
    moments = module((padded, kept))
    for z, exact in zip(moments, expected_moments(module, (tokens, kept)), strict=True):
        assert_close(z, exact)
    sum(z.sum() for z in moments).backward()
    assert padded.grad is not None and padded.grad.isfinite().all()
    assert not padded.grad[~kept].any()


@every_variant
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # jacfwd
def test_transformations(variant: str) -> None:
    module, x = build(variant, order=3).double(), maps(2)

    def value(x: Tensor) -> Tensor:
        return torch.cat(module(x), dim=1)

    assert_close(torch.func.vmap(lambda image: value(image.unsqueeze(0))[0])(x), value(x))
    jacobian = torch.autograd.functional.jacobian(value, x)
    assert_close(torch.func.jacrev(value)(x), jacobian)
    assert_close(torch.func.jacfwd(value)(x), jacobian)


def test_random_matrices_are_signs_kept_in_a_byte_and_never_trained() -> None:
    module = build("random", moment_dim=1000)
    assert list(module.parameters()) == []
    assert set(module.state_dict()) == {f"weight_{index}" for index in range(ORDER)}
    for weight in module.double().weights():
        assert weight.dtype == torch.int8
        assert set(weight.unique().tolist()) == {-1, 1}
        assert abs(weight.double().mean()) < 5 / math.sqrt(weight.numel())
    assert len({tuple(weight.flatten().tolist()) for weight in module.weights()}) == ORDER


def test_slow_widths_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="moment_dim: .* slow at 1009, .* take 1024"):
        build("sketch", moment_dim=1009)
    assert [fast_width(d) for d in (1, 7, 11, 8192, 8193)] == [1, 7, 12, 8192, 8232]


def test_trained_matrices_start_glorot_uniform_or_as_signs() -> None:
    bound = math.sqrt(6 / (50 + 60))
    for weight in build("cascaded", in_channels=50, moment_dim=60).weights():
        assert 0.95 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    for weight in build("independent", init="rademacher").weights():
        assert set(weight.unique().tolist()) == {-1, 1}


@pytest.mark.parametrize(
    ("matmul_dtype", "checkpoint", "largest"),
    [(None, False, 3e-6), ("bfloat16", False, 2**-6), ("bfloat16", True, 2**-6)],
)
def test_errors_under_autocast_at_the_channels_of_googlenet(
    matmul_dtype: Any, checkpoint: bool, largest: float
) -> None:
    """Moments and gradients, relative to their largest entries."""
    options = {"checkpoint": checkpoint, "matmul_dtype": matmul_dtype}
    module = build("cascaded", in_channels=1024, moment_dim=64, **options)
    exact = build("cascaded", in_channels=1024, moment_dim=64).double()
    exact.load_state_dict(module.state_dict())
    half = torch.randn(4, 1024, 8, 8).relu().bfloat16()
    weights = [torch.randn(4, 64) for _ in range(ORDER - 1)]

    def run(module: HighOrderMoments, features: Tensor) -> list[Tensor]:
        features.requires_grad_()
        moments = module(features)
        inputs = [features, *module.parameters()]
        factors = [weight.to(moments[0].dtype) for weight in weights]
        return [*moments, *torch.autograd.grad(moments, inputs, factors)]

    with torch.autocast("cpu", torch.bfloat16):
        found = run(module, half.float())
    for result, truth in zip(found, run(exact, half.double()), strict=True):
        assert result.dtype == torch.float32
        error = ((result - truth).abs().max() / truth.abs().max()).item()
        assert largest / 100 < error < largest
