"""Contract of the public modules that are no losses: networks, moments and kernels."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from tests.library.contract import MODULES
from tests.library.test_contract import HALF, ROWS, Measured, assert_agree, assert_same
from tests.support.tolerances import BOUNDS

each_module = pytest.mark.parametrize("name", MODULES)


def draw(name: str) -> Tensor:
    return torch.randn(6, *MODULES[name].shape)


def output(module: nn.Module, x: Tensor) -> Tensor:
    found = module(x)
    return torch.cat(found, dim=1) if isinstance(found, list) else found


def module_results(module: nn.Module, x: Tensor) -> Measured:
    module = copy.deepcopy(module)
    x = x.detach().clone().requires_grad_()
    found = output(module, x)
    inputs = {"x": x, **dict(module.named_parameters())}
    total = (found * torch.linspace(-1, 2, found.numel()).view_as(found)).sum()
    gradients = torch.autograd.grad(total, list(inputs.values()))
    return {"value": found.detach(), **dict(zip(inputs, gradients, strict=True))}


@each_module
def test_modules_in_any_precision(name: str) -> None:
    """Networks work in their own precision, moments and kernels in full; parameters keep theirs."""
    case = MODULES[name]
    for dtype in (*HALF, torch.float32, torch.float64):
        module, x = case.make().to(dtype), draw(name).to(dtype)
        dtypes = {key: value.dtype for key, value in module.state_dict().items()}
        found = output(module, x)
        expected = output(copy.deepcopy(module).double(), x.double())
        assert found.dtype == (torch.float32 if case.raised and dtype in HALF else dtype)
        bound = BOUNDS[dtype if not case.raised else found.dtype] * expected.abs().max().item()
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)
        with torch.autocast("cpu", torch.bfloat16):
            again = output(module, x)
        if case.raised:
            assert torch.equal(again, found)
        else:  # how close is torch's affair: it rounds every layer's input and weights
            assert again.shape == expected.shape and again.isfinite().all()
        assert {key: value.dtype for key, value in module.state_dict().items()} == dtypes


@each_module
def test_rows_of_modules_are_images(name: str) -> None:
    """The order of the batch is that of the results; a NaN stays in its own image, or, in pairs, shows."""
    case = MODULES[name]
    module, x = case.make().double(), draw(name).double()
    found, order = output(module, x), torch.randperm(len(x))
    again = output(module, x[order])
    right = found[order][:, order] if case.pairs else found[order]
    assert_agree({"value": again}, {"value": right})
    x.view(len(x), -1)[2, 1] = float("nan")
    odd = output(module, x)
    assert odd[2].isnan().any()
    if not case.pairs:
        others = torch.arange(len(x)) != 2
        assert_agree({"value": odd[others]}, {"value": found[others]})


@each_module
def test_modules_stay_finite(name: str) -> None:
    assert output(MODULES[name].make(), draw(name)[:0]).numel() == 0
    for rows, change in ROWS.items():
        for magnitude in (1e-6, 1, 1e4):
            found = module_results(MODULES[name].make(), magnitude * change(draw(name)))
            for part, result in found.items():
                assert result is not None and result.isfinite().all(), (part, rows, magnitude)


@each_module
def test_copies_and_states_of_modules(name: str) -> None:
    make, x = MODULES[name].make, draw(name)
    module, other = make(), make()
    other.load_state_dict(module.state_dict())
    expected = module_results(module, x)
    for again in (pickle.loads(pickle.dumps(module)), other):
        assert_same(module_results(again, x), expected)
