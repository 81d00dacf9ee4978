"""The moments against the paper in loops, finite differences and the mathematics they stand for."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pml_regularizers import HighOrderMoments
from pml_regularizers.functional.sketches import fast_width
from tests.library.expected import moments as expected_moments
from tests.library.expected import numbers
from tests.support.tolerances import assert_close

CHANNELS, DIM, ORDER = 5, 7, 5
VARIANTS = {
    "cascaded": {"projections": "cascaded"},
    "cascaded_signs": {"projections": "cascaded", "init": "rademacher"},
    "independent": {"projections": "independent"},
    "independent_signs": {"projections": "independent", "init": "rademacher"},
    "random": {"projections": "random"},
    "sketch": {"projections": "sketch"},
    "narrow_sketch": {"projections": "sketch", "moment_dim": 2},
}
LAYOUTS = ["map", "tokens", "masked_tokens", "one_position"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def build(variant: str, **kwargs: Any) -> HighOrderMoments:
    sizes = {"in_channels": CHANNELS, "order": ORDER, "moment_dim": DIM}
    return HighOrderMoments(**{**sizes, **VARIANTS[variant], **kwargs})


def sample(
    layout: str, images: int = 3, channels: int = CHANNELS
) -> Tensor | tuple[Tensor, Tensor]:
    """Features in float64."""
    if layout == "map":
        return torch.randn(images, channels, 2, 3, dtype=torch.float64)
    if layout == "one_position":
        return torch.randn(images, channels, 1, 1, dtype=torch.float64)
    tokens = torch.randn(images, 4, channels, dtype=torch.float64)
    if layout == "tokens":
        return tokens
    kept = torch.arange(4) < torch.arange(1, images + 1).unsqueeze(1)  # 1, 2, 3 ... tokens
    return tokens, kept


@every_variant
@every_layout
def test_equals_the_oracle(variant: str, layout: str) -> None:
    module, features = build(variant).double(), sample(layout)
    moments = module(features)
    expected = expected_moments(module, features)
    assert len(moments) == len(expected) == ORDER - 1
    for z, exact in zip(moments, expected, strict=True):
        assert_close(z, exact)


def test_a_value_made_by_hand() -> None:
    """One channel, d = 1, W = 1: order k is the mean of x^k."""
    module = HighOrderMoments(1, order=4, moment_dim=1)
    for weight in module.weights():
        nn.init.ones_(weight)
    moments = module(torch.tensor([[[[1.0, -2.0, 3.0]]]]))
    assert_close(torch.cat(moments, dim=1), [[14 / 3, 20 / 3, 98 / 3]])


@pytest.mark.parametrize("exponent", [-40, -25, -15])
@pytest.mark.parametrize("scale", [True, False])
def test_the_faintest_maps_are_finite(exponent: int, scale: bool) -> None:
    module = build("cascaded", scale=scale)
    features = (sample("map") * 10.0**exponent).float().requires_grad_()
    moments = module(features)
    sum(z.sum() for z in moments).backward()
    assert all(z.isfinite().all() for z in moments)
    assert features.grad is not None and features.grad.isfinite().all()


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e13, 1e30])
def test_features_whose_squares_are_infinite(
    variant: str, dtype: torch.dtype, magnitude: float
) -> None:
    """Right values and gradients; only s^k cannot be larger than float32."""
    module = build(variant, scale=False)
    exact = copy.deepcopy(module).double()
    features = (magnitude * sample("map")).to(dtype).requires_grad_()
    doubled = features.detach().double().requires_grad_()
    results = []
    for one, x in ((module, features), (exact, doubled)):
        moments = one(x)
        [gradient] = torch.autograd.grad(sum(z.sum() for z in moments), x)
        results.append([*moments, magnitude * gradient.double()])
    size = doubled.detach().square().mean(dim=(1, 2, 3)).sqrt()
    for k, (z, truth) in enumerate(
        zip(results[1], expected_moments(exact, doubled), strict=False), start=2
    ):
        assert_close(z, truth / numbers(size)[:, None] ** k)
    *moments, gradient = results[0]
    for z, truth in zip(moments, results[1], strict=False):
        assert_close(z, truth)
    if dtype == torch.float32:  # bfloat16 rounds the gradient
        assert_close(gradient.float(), results[1][-1])
    assert all(z.isinf().all() for z in build("cascaded")(1e30 * sample("map").float()))


def test_without_scale_every_order_keeps_its_direction_only() -> None:
    features = sample("map")
    module, unscaled = build("cascaded"), build("cascaded", scale=False)
    unscaled.load_state_dict(module.state_dict())
    for z, direction in zip(module(features), unscaled(1000 * features), strict=True):
        assert_close(nn.functional.normalize(direction), nn.functional.normalize(z))
        assert not torch.allclose(direction, z)


@every_variant
@pytest.mark.parametrize("garbage", [0.0, 1e30, float("inf"), float("nan")])
def test_a_mask_drops_tokens_whatever_they_hold(variant: str, garbage: float) -> None:
    module = build(variant)
    tokens, kept = sample("masked_tokens")
    expected = [module(t[k].unsqueeze(0)) for t, k in zip(tokens, kept, strict=True)]
    padded = tokens.masked_fill(~kept.unsqueeze(2), garbage).requires_grad_()
    moments = module((padded, kept))
    for z, *alone in zip(moments, *expected, strict=True):
        assert_close(z, torch.cat(alone))
    sum(z.sum() for z in moments).backward()
    assert padded.grad is not None and padded.grad.isfinite().all()
    assert torch.equal(padded.grad[~kept], torch.zeros_like(padded.grad[~kept]))


def test_tokens_without_a_mask_all_count() -> None:
    module, tokens = build("sketch"), sample("tokens")
    for z, expected in zip(module((tokens, None)), module(tokens), strict=True):
        assert torch.equal(z, expected)


def test_random_matrices_are_signs_kept_in_a_byte_and_never_trained() -> None:
    module = build("random", moment_dim=1000)
    assert list(module.parameters()) == []
    assert set(module.state_dict()) == {f"weight_{index}" for index in range(ORDER)}
    for weight in module.double().weights():
        assert weight.dtype == torch.int8
        assert set(weight.unique().tolist()) == {-1, 1}
        assert abs(weight.double().mean()) < 5 / math.sqrt(weight.numel())
    assert len({tuple(weight.flatten().tolist()) for weight in module.weights()}) == ORDER


@pytest.mark.parametrize(("dim", "rows", "other"), [(2, 3, 6), (5, 1, 6), (8, 1, 16)])
def test_sketches_have_one_sign_and_one_place_per_channel(dim: int, rows: int, other: int) -> None:
    module = build("sketch", moment_dim=dim)
    assert set(module.state_dict()) == {f"weight_{index}" for index in range(ORDER)}
    for table in module.double().weights():
        assert (table.dtype, table.shape) == (torch.int32, (dim, rows))
        assert sorted(table[table != 0].abs().tolist()) == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="size mismatch for weight_0"):
        build("sketch", moment_dim=other).load_state_dict(module.state_dict())


def cast(dtype: torch.dtype) -> dict[str, Tensor]:
    """Tables of 300 channels: half precision rounds numbers from 257 or 2,049 on."""
    tables = build("sketch", in_channels=300, moment_dim=300).state_dict()
    return {name: table.to(dtype) for name, table in tables.items()}


@pytest.mark.parametrize(
    ("variant", "channels", "given", "message"),
    [
        # Of the same shape, but they leave channels out or look for some that are not there.
        *(
            ("sketch", 5, lambda C=C: build("sketch", moment_dim=8, in_channels=C).state_dict(),
             f"expected .* channels 1 to 5 once, .* got {C} .* in_channels must match")
            for C in (3, 8)
        ),
        *(
            ("sketch", 300, lambda dtype=dtype: cast(dtype),
             f"expected integers, .* of {dtype}; .* only floating tensors may be cast")
            for dtype in (torch.bfloat16, torch.float32, torch.uint8)
        ),
        # Trained matrices would be rounded to 0.
        ("random", 5, lambda: build("cascaded").state_dict(), 'expected signs .* "independent"'),
    ],
)  # fmt: skip
def test_states_that_are_no_projections_are_refused(
    variant: str, channels: int, given: Any, message: str
) -> None:
    """Nothing is loaded, whatever the options."""
    width = {5: 8, 300: 300}[channels] if variant == "sketch" else DIM
    module = build(variant, in_channels=channels, moment_dim=width)
    before = copy.deepcopy(list(module.buffers()))
    state = {f"0.{name}": value for name, value in given().items()}
    for options in ({}, {"assign": True}, {"strict": False}):
        with pytest.raises(RuntimeError, match=f"0.weight_0: {message}"):
            nn.Sequential(module).load_state_dict(state, **options)
    assert all(map(torch.equal, module.buffers(), before))


def test_slow_widths_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="moment_dim: .* slow at 1009, .* take 1024"):
        build("sketch", moment_dim=1009)
    assert [fast_width(d) for d in (1, 7, 11, 8192, 8193)] == [1, 7, 12, 8192, 8232]


def test_trained_matrices_start_glorot_uniform_or_as_signs() -> None:
    bound = math.sqrt(6 / (50 + 60))
    for weight in build("cascaded", in_channels=50, moment_dim=60).weights():
        assert 0.95 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    for weight in build("independent_signs").weights():
        assert set(weight.unique().tolist()) == {-1, 1}


@pytest.mark.parametrize(("matmul_dtype", "largest"), [(None, 3e-6), ("bfloat16", 2**-6)])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_errors_under_autocast_at_the_channels_of_googlenet(
    checkpoint: bool, matmul_dtype: Any, largest: float
) -> None:
    """Moments and gradients, relative to their largest entries."""
    options = {"checkpoint": checkpoint, "matmul_dtype": matmul_dtype}
    module = HighOrderMoments(1024, moment_dim=64, **options)
    exact = HighOrderMoments(1024, moment_dim=64).double()
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
