"""An Apple GPU in pretence: tensors whose device is "mps", computed on the CPU, and what that device refuses.

It has no float64, lacks the operators that torch's own table (native_functions.yaml) has for the CPU and not for
MPS, and takes no tensor of the CPU beside its own.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchgen
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

APPLE = torch.device("mps", 0)
aten = torch.ops.aten
_MOVES = {aten._to_copy.default, aten.copy_.default}
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


@cache
def _lacking() -> set[str]:
    """Operators with an implementation for the CPU, but none for MPS."""
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    keys, delegates = {}, {}
    for row in yaml.load(table.read_text(), Loader=yaml.CSafeLoader):
        name = row["func"].split("(")[0]
        keys[name] = {k.strip() for group in row.get("dispatch", {}) for k in group.split(",")}
        delegates[name] = row.get("structured_delegate", name)
    assert len(keys) > 2000
    backends = {name: keys[name] | keys.get(delegates[name], set()) for name in keys}
    return {
        name
        for name, found in backends.items()
        if "CPU" in found and not found & {"MPS", "CompositeExplicitAutograd"}
    }


class AppleTensor(Tensor):
    """A tensor of the device, around one of the CPU. C++ sees the meta device, so that no move is left out."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "AppleTensor":
        if inner.dtype in (torch.float64, torch.complex128):
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't"
            )
        made: AppleTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        made.inner = inner
        return made

    device = property(lambda self: APPLE)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"AppleTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Apple(TorchDispatchMode):
    """Inside, `torch.zeros(3, device="mps")` and `x.to("mps")` make such tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    own = [x for x in leaves if isinstance(x, AppleTensor)]
    device = kwargs.get("device")
    there = device.type in ("mps", "meta") if device is not None else bool(own)
    if there and not own and kwargs.get("dtype") == torch.float64 and device.type == "meta":
        return func(*args, **kwargs)  # as of `skip_init`: C++ makes none of these
    if own and func not in _MOVES:
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if name in _lacking():
            raise NotImplementedError(
                f"The operator '{func}' is not implemented for the MPS device"
            )
        others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, AppleTensor)]
        if func not in _INDEXED and any(x.ndim for x in others):
            raise RuntimeError(f"{func}: expected all tensors on one device, got mps:0 and cpu")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    wrappers = {id(x.inner): x for x in own}
    args, kwargs = tree_map(lambda x: x.inner if isinstance(x, AppleTensor) else x, (args, kwargs))
    result = func(*args, **kwargs)
    if func is aten.copy_.default:
        return wrappers.get(id(result), result)
    return tree_map(lambda x: _wrapped(x, wrappers), result) if there else result


def _wrapped(x: Any, wrappers: dict[int, AppleTensor]) -> Any:
    if not isinstance(x, Tensor):
        return x
    return wrappers[id(x)] if id(x) in wrappers else AppleTensor(x)
