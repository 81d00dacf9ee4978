"""Variance attention against loops, finite differences, and the paper's promises."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from pytorch_metric_learning.reducers import SumReducer
from torch import Tensor, nn

from pml_regularizers import EmbeddingHead, VarianceRegularizer, VEMAttention
from pml_regularizers.features.feature_tap import FeatureTap
from pml_regularizers.heads.variance_attention import variance_gate
from pml_regularizers.regularizers.variance import variance_errors
from tests.oracles import variance_attention as oracle
from tests.support.counting import Count
from tests.support.tolerances import assert_close
from tests.support.toys import CHANNELS, WIDTH, Attended, images

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def features(count: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, CHANNELS, dtype=torch.float64).to(dtype)


def prediction(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(CHANNELS, dtype=torch.float64).to(dtype)


def exact_loss(x: Tensor, predicted: Tensor, **kwargs: Any) -> float:
    """Loss by the oracle."""
    a = x.detach().double().numpy()
    return oracle.variance_loss(a, predicted.detach().double().tolist(), **kwargs)


def value_of(x: Tensor, predicted: Tensor, **kwargs: Any) -> Tensor:
    value: Tensor = VarianceRegularizer(**kwargs)(torch.zeros(len(x), 2), features=(x, predicted))
    return value


def gradient(value: Tensor, *modules: nn.Module) -> Tensor:
    """Gradient of all parameters in one vector; 0 for parameters that the value does not depend on."""
    parameters = [p for module in modules for p in module.parameters()]
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    pairs = zip(parameters, found, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs])


# The loss


def test_a_loss_made_by_hand() -> None:
    """Variances 4 and 0 where 1 and 2 are predicted; unbiased, 8."""
    x = torch.tensor([[1.0, 3.0], [5.0, 3.0]])
    predicted = torch.tensor([1.0, 2.0])
    assert_close(variance_errors(x, predicted), [3**2, 2**2])
    assert_close(variance_errors(x, predicted, unbiased=True), [7**2, 2**2])
    assert_close(value_of(x, predicted), (3**2 + 2**2) / 2)
    assert_close(value_of(x, predicted, reducer=SumReducer()), 3**2 + 2**2)
    counting = VarianceRegularizer(collect_stats=True)
    counting(x, features=(x, predicted))
    assert (counting.batch_variance, counting.predicted_variance) == (2, 1.5)
    gates = torch.sigmoid(predicted)
    assert counting.gate_range == pytest.approx((gates[1] - gates[0]).item())


def test_one_sample_has_no_variance() -> None:
    x, predicted = features(1).requires_grad_(), prediction().requires_grad_()
    for unbiased in (False, True):
        value = value_of(x, predicted, unbiased=unbiased)
        assert_close(value, predicted.square().mean())
        to_x, to_prediction = torch.autograd.grad(value, (x, predicted))
        assert (to_x == 0).all()
        assert_close(to_prediction, 2 * predicted / CHANNELS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_variance_is_of_full_precision(dtype: torch.dtype) -> None:
    """Under autocast, and of features in float16, whose squares have a sum beyond it."""
    x, predicted = (100 * features(99)).to(dtype), prediction(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        value = value_of(x, predicted)
    assert_close(value, exact_loss(x, predicted))


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_a_common_offset_is_not_variance(offset: float) -> None:
    """The mean of the squares less the square of the mean would leave nothing of it in float32."""
    x = (features(64) + offset).float()
    assert_close(value_of(x, torch.zeros(CHANNELS)), exact_loss(x, torch.zeros(CHANNELS)))


# The attention


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_equals_the_oracle(dtype: torch.dtype) -> None:
    x, predicted = features(dtype=dtype), prediction(dtype)
    gated = variance_gate(x, predicted)
    assert gated.dtype == dtype
    assert_close(gated, oracle.attended(x.double().numpy(), predicted.tolist()))


@pytest.mark.parametrize("shape", [(3, CHANNELS), (2, 5, CHANNELS), (2, CHANNELS, 2, 3)], ids=str)
def test_gate_gradient_by_finite_differences(shape: tuple[int, ...]) -> None:
    inputs = (torch.randn(shape).double().requires_grad_(), prediction().requires_grad_())
    assert torch.autograd.gradcheck(variance_gate, inputs)


def test_channels_of_maps_and_tokens_are_weighed() -> None:
    attention = VEMAttention(CHANNELS).double()
    x = torch.randn(2, CHANNELS, 3, 4).double()
    at = oracle.attended(x[:, :, 1, 2].numpy(), attention.variance.tolist())
    assert_close(attention(x)[:, :, 1, 2], at)
    tokens = x.flatten(2).transpose(1, 2)
    assert_close(attention(tokens), attention(x).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("shape", [(4, CHANNELS), (4, 6, CHANNELS), (4, CHANNELS, 2, 3)], ids=str)
def test_what_a_tap_hears(shape: tuple[int, ...]) -> None:
    attention, x = VEMAttention(CHANNELS).double(), torch.randn(shape).double()
    tap = FeatureTap({"attention": attention.statistics}, embedder=attention)
    pooled, rows = tap.take(attention(x))["attention"]
    over = {2: (), 3: (1,), 4: (2, 3)}[x.ndim]
    assert_close(pooled, x.mean(dim=over) if over else x)
    assert_close(rows, attention.variance.expand(4, CHANNELS))
    rows.sum().backward()
    assert_close(attention.variance.grad, torch.full((CHANNELS,), 4.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_loses_no_gradient(dtype: torch.dtype) -> None:
    """A sum of 65552 overflows float16, and bfloat16 has no such number."""
    attention, x = VEMAttention(1, init="zeros"), torch.full((4097, 1), 64, dtype=dtype)
    attention(x).sum().backward()
    assert attention.variance.dtype == attention.variance.grad.dtype == torch.float32
    assert_close(attention.variance.grad, [64 * 4097 / 4])


def test_start() -> None:
    assert (VEMAttention(5, init="zeros").variance == 0).all()
    start = VEMAttention(20_000).variance.detach()
    assert abs(start.mean()) < 0.03 and abs(start.std() - 1) < 0.03


@pytest.mark.parametrize("bias", [False, True])
def test_fold(bias: bool) -> None:
    attention, linear = VEMAttention(CHANNELS).double(), nn.Linear(CHANNELS, 3, bias).double()
    linear.requires_grad_(False).eval()
    x, before, state = features(), linear.weight.clone(), torch.get_rng_state()
    folded = attention.fold(linear)
    torch.testing.assert_close(folded(x), linear(attention(x)), rtol=0, atol=1e-12)
    assert not torch.equal(folded.weight, before) and torch.equal(linear.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not folded.weight.requires_grad and not folded.training
    assert (folded.in_features, folded.out_features) == (CHANNELS, 3)


COMPUTED = {
    "parametrised": nn.utils.parametrizations.spectral_norm,
    "by a hook in the next call": nn.utils.weight_norm,
}


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_fold_of_a_weight_that_is_computed(name: str) -> None:
    attention = VEMAttention(CHANNELS).double()
    linear = COMPUTED[name](nn.Linear(CHANNELS, 3)).double().eval()
    linear(features())
    if hasattr(linear, "weight_g"):
        with torch.no_grad():
            linear.weight_g.mul_(2)
    x, before = features(), copy.deepcopy(linear.state_dict())
    with torch.no_grad():
        folded = attention.fold(linear)
    torch.testing.assert_close(folded(x), linear(attention(x)), rtol=0, atol=1e-12)
    assert type(folded) is nn.Linear and set(folded.state_dict()) == {"weight", "bias"}
    assert folded.weight.is_leaf and folded.weight.requires_grad
    assert folded.training == linear.training
    assert folded.bias.data_ptr() != linear.bias.data_ptr()
    for key, value in linear.state_dict().items():
        assert torch.equal(value, before[key])


def test_what_a_gate_costs_in_inference() -> None:
    """A sigmoid of A and one multiplication, and nothing after folding."""
    plain = EmbeddingHead(CHANNELS, WIDTH).eval()
    gated = EmbeddingHead(CHANNELS, WIDTH, attention=VEMAttention).eval()

    def operations(head: EmbeddingHead) -> Counter[str]:
        with torch.no_grad(), Count() as count:
            head(torch.randn(3, CHANNELS, 4, 4))
        return count.operations

    assert dict(operations(gated) - operations(plain)) == {"aten.sigmoid": 1, "aten.mul": 1}
    assert operations(gated.fold()) == operations(plain)


def test_detached_features_teach_the_prediction_only() -> None:
    network, (x, _) = Attended(), images()
    literal = VarianceRegularizer().attach(network.head)
    safer = VarianceRegularizer(detach_features=True).attach(network.head)
    embeddings = network(x)
    first, second = literal(embeddings), safer(embeddings)
    assert torch.equal(first, second)
    assert (gradient(second, network.trunk, network.head.fc) == 0).all()
    assert (gradient(first, network.trunk) != 0).any()
    attention = network.head.attention
    assert torch.equal(gradient(second, attention), gradient(first, attention))
