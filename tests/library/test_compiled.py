"""Every public loss and module, compiled by the real backend, against float64.

The backends "eager" and "aot_eager" reuse no memory: they cannot show what inductor overwrites too early.
"""

import copy
import shutil
from collections.abc import Iterator

import pytest
import torch

from tests.library.contract import LOSSES, MODULES, Batch, call
from tests.library.test_contract import assert_agree, exact, one_per_class
from tests.library.test_contract_of_modules import module_results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None, reason="inductor compiles C++"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of inductor's own
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:powers. .* even and cannot tell opposite features apart"),
]
LABELS = torch.arange(64) % 5 % 4  # as many images as inductor computes in vectors
VARIANTS = [
    name for name in LOSSES if name.startswith(("HORDE, ", "JRD, ")) and "proxies" not in name
]  # the same class, another calculation
ONE_GRAPH = {"EC", "JRS", "JRD", "intra-class", "variance"}


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", dict.fromkeys([*one_per_class(), *VARIANTS]))
def test_compiled_losses(name: str) -> None:
    case = LOSSES[name]
    loss, batch = case.make(), Batch.draw(case, LABELS)
    expected = exact(loss, batch)
    leaves = batch.map(lambda x: x.requires_grad_())
    value = call(torch.compile(loss, fullgraph=name in ONE_GRAPH), leaves)
    inputs = dict(leaves.tensors()) | dict(loss.named_parameters())
    gradients = torch.autograd.grad(value, list(inputs.values()), allow_unused=True)
    assert_agree({"value": value.detach(), **dict(zip(inputs, gradients, strict=True))}, expected)


@pytest.mark.parametrize("name", MODULES)
def test_compiled_modules(name: str) -> None:
    module, x = MODULES[name].make(), torch.randn(64, *MODULES[name].shape)
    expected = module_results(copy.deepcopy(module).double(), x.double())
    compiled = module_results(torch.compile(module, fullgraph=True), x)
    assert_agree({key.removeprefix("_orig_mod."): part for key, part in compiled.items()}, expected)
