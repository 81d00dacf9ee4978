"""The products of HORDE's moments, in blocks: equal to the paper's, and no larger than they must be."""

import itertools
import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pml_regularizers import HighOrderMoments, _triton_products
from pml_regularizers._summed_products import summed_products
from tests.oracles import horde as oracle
from tests.support.counting import Peak
from tests.support.processes import ROOT
from tests.support.tolerances import assert_close

IMAGES, POSITIONS, CHANNELS, COLUMNS, ORDER = (
    2,
    3,
    4,
    300,
    4,
)  # 300 columns: blocks of 128, 128 and 44
needs_triton = pytest.mark.skipif(not _triton_products.available, reason="Triton is not installed")
every_kind = pytest.mark.parametrize("activations", ["store", "recompute", "autograd"])
blocked = pytest.mark.parametrize("activations", ["store", "recompute"])


@pytest.fixture(autouse=True)
def narrow_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pml_regularizers._summed_products.BLOCK", 1)
    monkeypatch.setattr("pml_regularizers._summed_products.CHUNK", 1)


def draw(columns: int = COLUMNS, order: int = ORDER, **options: Any) -> tuple[Tensor, list[Tensor]]:
    options = {"dtype": torch.float64, **options}
    matrices = [torch.randn(CHANNELS, columns, **options) for _ in range(order)]
    return torch.randn(IMAGES, POSITIONS, CHANNELS, **options), matrices


@every_kind
@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_oracle(activations: str, order: int, dtype: torch.dtype) -> None:
    x, matrices = draw(order=order, dtype=dtype)
    sums = summed_products(x, matrices, activations=activations)
    assert sums.dtype == dtype
    arrays = [matrix.double().numpy() for matrix in matrices]
    exact = np.array([oracle.cascaded(image, arrays) for image in x.double().numpy()])
    assert_close(sums, exact.swapaxes(0, 1) * POSITIONS * math.sqrt(COLUMNS))


@blocked
def test_gradients_by_finite_differences(activations: str) -> None:
    inputs = draw(columns=2, order=3, requires_grad=True)

    def sums(x: Tensor, *matrices: Tensor) -> Tensor:
        return summed_products(x, matrices, activations=activations)

    assert torch.autograd.gradcheck(sums, (inputs[0], *inputs[1]))
    assert torch.autograd.gradgradcheck(sums, (inputs[0], *inputs[1]))


@blocked
@pytest.mark.parametrize("trained", [[], [0], [2, 4], [0, 1, 2, 3, 4]], ids=str)
def test_only_what_is_asked_for_has_a_gradient(activations: str, trained: list[int]) -> None:
    x, matrices = draw()
    inputs = [x, *matrices]
    for index in trained:
        inputs[index].requires_grad_()
    sums = summed_products(x, matrices, activations=activations)
    assert sums.requires_grad == bool(trained)
    if trained:
        sums.square().sum().backward()
    reference = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    summed_products(reference[0], reference[1:], activations="autograd").square().sum().backward()
    for index, (tensor, exact) in enumerate(zip(inputs, reference, strict=True)):
        assert (tensor.grad is not None) == (index in trained)
        if tensor.grad is not None and exact.grad is not None:
            assert_close(tensor.grad, exact.grad)


@every_kind
def test_matrices_of_bytes(activations: str) -> None:
    x, matrices = draw()
    signs = [matrix.sign().to(torch.int8) for matrix in matrices]
    x.requires_grad_()
    sums = summed_products(x, signs, activations=activations)
    exact = summed_products(x, [sign.double() for sign in signs], activations="autograd")
    assert_close(sums, exact)
    weights = torch.randn_like(sums)
    assert_close(
        torch.autograd.grad(sums, x, weights)[0], torch.autograd.grad(exact, x, weights)[0]
    )


@blocked
def test_matrices_changed_before_the_backward_pass_are_an_error(activations: str) -> None:
    x, matrices = draw(requires_grad=True)
    value = summed_products(x, matrices, activations=activations).sum()
    with torch.no_grad():
        matrices[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@every_kind
def test_products_in_bfloat16_and_sums_in_float32(activations: str) -> None:
    x, matrices = draw(dtype=torch.float32, requires_grad=True)
    inputs = [x, *matrices]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    rough = summed_products(x, matrices, dtype=torch.bfloat16, activations=activations)
    right = summed_products(exact[0], exact[1:])
    assert rough.dtype == torch.float32
    weights = torch.randn_like(rough)
    found = [rough, *torch.autograd.grad(rough, inputs, weights)]
    expected = [right, *torch.autograd.grad(right, exact, weights.double())]
    for result, truth in zip(found, expected, strict=True):
        assert result.dtype == torch.float32
        error = (result - truth).abs().max() / truth.abs().max()
        assert 2**-12 < error < 2**-5  # 3 or 4 channels and positions: little averages out


@every_kind
def test_matrices_and_features_that_are_made_of_one_another(activations: str) -> None:
    """Their gradients, too, count every path once, also those that are differentiated again."""
    x, [matrix, *_] = draw(columns=CHANNELS, requires_grad=True)

    def value(matrix: Tensor) -> Tensor:
        features = x.detach() @ matrix
        return summed_products(features, [matrix, matrix * 2, matrix], activations=activations)

    assert torch.autograd.gradcheck(value, matrix)
    assert torch.autograd.gradgradcheck(value, matrix)


@every_kind
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # jacfwd
def test_transformations(activations: str) -> None:
    x, matrices = draw(columns=6)

    def value(x: Tensor) -> Tensor:
        return summed_products(x, matrices, activations=activations)

    exact = summed_products(x, matrices, activations="autograd")
    each = torch.func.vmap(lambda image: value(image.unsqueeze(0))[:, 0], out_dims=1)(x)
    assert_close(each, exact)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: summed_products(x, matrices, activations="autograd"), x
    )
    assert_close(torch.func.jacrev(value)(x), jacobian)
    assert_close(torch.func.jacfwd(value)(x), jacobian)


# Memory, counted


def peak(activations: str, **options: Any) -> int:
    x = torch.randn(8, 16, 32, requires_grad=True)
    matrices = [torch.randn(32, 2048, requires_grad=True) for _ in range(5)]

    with Peak() as peak:
        sums = summed_products(x, matrices, activations=activations, **options)
        results = [sums]
        if torch.is_grad_enabled():
            results = list(torch.autograd.grad(sums.sum(), [x, *matrices]))
    return peak.bytes(without=results)


def test_memory_of_a_forward_and_backward_pass() -> None:
    plain = peak("autograd")
    assert plain > 8 * (8 * 16 * 2048 * 4)  # A_2 .. A_5, phi_1 .. phi_4
    assert peak("store") < 2 / 3 * plain
    assert peak("recompute") < 1 / 8 * plain
    assert peak("store", dtype=torch.bfloat16) < 2 / 3 * peak("store")


@every_kind
@pytest.mark.parametrize(
    ("projections", "products"),
    [
        *itertools.product(["cascaded", "independent", "random"], ["full", "bfloat16"]),
        ("sketch", "full"),
    ],
)
def test_the_module_tells_what_it_keeps(activations: str, projections: str, products: str) -> None:
    module = HighOrderMoments(
        32,
        order=4,
        moment_dim=1024,
        activations=activations,
        projections=projections,
        products=products,
        scale=False,
    )
    features = torch.randn(4, 32, 4, 4, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        moments = module(features)
    for weight in module.weights():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    told = module.activation_bytes(4, 16)
    assert len(moments) == 3
    # Fixed projections have no gradient, so that autograd itself may keep fewer tensors; and signs as floats.
    if activations == "autograd" and (projections == "random" or products == "bfloat16"):
        return
    assert told == pytest.approx(sum(kept.values()), rel=0.02)


# Triton


@needs_triton
@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_triton_in_its_interpreter(count: int) -> None:
    """Runs in a separate process, since Triton reads the variable when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_products", str(count)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"{count} cases agree\n"


@needs_triton
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("kernel", ["_add_up", "_share_out"])
def test_triton_compiles_for_a_gpu_that_need_not_be_there(
    kernel: str, first: int, dtype: str
) -> None:
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    function = getattr(_triton_products, kernel)
    constants = {"ORDER": 5, "FIRST": first, **_triton_products.TILE}
    types = {"factors": f"*{dtype}", "out": f"*{dtype}", "sums": "*fp32", "gradient": "*fp32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in function.arg_names
    }
    source = compiler.ASTSource(function, signature=signature, constexprs=constants)
    compiled = compiler.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "st.global" in compiled.asm["ptx"]


def test_triton_must_be_there_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton_products, "available", False)
    assert HighOrderMoments(3, moment_dim=2)(torch.randn(1, 3, 2, 2))
    with pytest.raises(ValueError, match="kernels: Triton is not installed"):
        HighOrderMoments(3, kernels="triton")
