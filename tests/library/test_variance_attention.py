"""Variance attention: its loss at the limits, its gate against loops, and what folding saves."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pml_regularizers import EmbeddingHead, VarianceRegularizer, VEMAttention
from pml_regularizers.features.feature_tap import FeatureTap
from tests.oracles import variance_attention as oracle
from tests.support.counting import Count
from tests.support.tolerances import assert_close
from tests.support.toys import CHANNELS, WIDTH, Attended, images


def features(count: int = 7) -> Tensor:
    return torch.randn(count, CHANNELS, dtype=torch.float64)


def gradient(value: Tensor, *modules: nn.Module) -> Tensor:
    """Gradient of all parameters in one vector; 0 for parameters that the value does not depend on."""
    parameters = [p for module in modules for p in module.parameters()]
    found = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in found])


def test_statistics_made_by_hand() -> None:
    """Variances 4 and 0 where 1 and 2 are predicted."""
    x, predicted = torch.tensor([[1.0, 3.0], [5.0, 3.0]]), torch.tensor([1.0, 2.0])
    counting = VarianceRegularizer(collect_stats=True)
    assert_close(counting(x, features=(x, predicted)), (3**2 + 2**2) / 2)
    assert (counting.batch_variance, counting.predicted_variance) == (2, 1.5)
    gates = torch.sigmoid(predicted)
    assert counting.gate_range == pytest.approx((gates[1] - gates[0]).item())


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_a_common_offset_is_not_variance(offset: float) -> None:
    """The mean of the squares less the square of the mean would leave nothing of it in float32."""
    x, predicted = (features(64) + offset).float(), torch.zeros(CHANNELS)
    exact = oracle.variance_loss(x.double().numpy(), predicted.tolist())
    assert_close(VarianceRegularizer()(torch.zeros(64, 2), features=(x, predicted)), exact)


def test_channels_are_weighed_by_the_gate_of_the_oracle() -> None:
    """Those of pooled features, maps and tokens."""
    attention = VEMAttention(CHANNELS).double()
    maps = torch.randn(2, CHANNELS, 3, 4).double()
    rows = maps.flatten(2).transpose(1, 2)  # tokens
    pooled = rows.flatten(0, 1)
    right = oracle.attended(pooled.numpy(), attention.variance.tolist())
    assert_close(attention(pooled), right)
    assert_close(attention(rows).flatten(0, 1), right)
    assert torch.equal(attention(maps).flatten(2).transpose(1, 2), attention(rows))


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


@pytest.mark.parametrize(
    ("bias", "computed"),
    [
        (False, lambda linear: linear),
        (True, nn.utils.parametrizations.spectral_norm),
        (True, nn.utils.weight_norm),  # by a hook in the next call
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_fold(bias: bool, computed: Any) -> None:
    """Into a plain layer, also if the weight is computed; the given one stays as it is."""
    attention = VEMAttention(CHANNELS).double()
    linear = computed(nn.Linear(CHANNELS, 3, bias)).double().eval()
    linear(features())
    if hasattr(linear, "weight_g"):
        with torch.no_grad():
            linear.weight_g.mul_(2)
    x, state = features(), torch.get_rng_state()
    before = {name: value.clone() for name, value in linear.state_dict().items()}
    folded = attention.fold(linear)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(folded(x), linear(attention(x)), rtol=0, atol=1e-12)
    assert type(folded) is nn.Linear and not folded.training
    assert set(folded.state_dict()) == ({"weight", "bias"} if bias else {"weight"})
    assert folded.weight.is_leaf and folded.weight.requires_grad
    assert not attention.fold(linear.requires_grad_(False)).weight.requires_grad
    for name, value in linear.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_a_gate_costs_in_inference() -> None:
    """A sigmoid of A and one multiplication, and nothing after folding, which changes no embedding."""
    plain = EmbeddingHead(CHANNELS, WIDTH, bias=True).eval()
    gated = EmbeddingHead(CHANNELS, WIDTH, bias=True, attention=VEMAttention).eval()
    x = torch.randn(3, CHANNELS, 4, 4)

    def operations(head: EmbeddingHead) -> Counter[str]:
        with torch.no_grad(), Count() as count:
            head(x)
        return count.operations

    assert dict(operations(gated) - operations(plain)) == {"aten.sigmoid": 1, "aten.mul": 1}
    embeddings = gated(x)
    assert gated.fold() is gated and operations(gated) == operations(plain)
    assert_close(gated(x), embeddings)


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
