"""Costs that are counted: what a piece of code runs, and how large its tensors are."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Count(TorchDispatchMode):
    """Inside the `with` block, backward passes included.

    Attributes:
        operations: How often each that makes tensors ran, by the name of its overload packet, such as "aten.mm".
        storages: Numbers of elements of the storages that they allocated; views have none of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.storages: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs)), _tensors(result)
        if made:
            self.operations[str(func.overloadpacket)] += 1
        addresses = {_address(x) for x in given}
        self.storages += [
            x.untyped_storage().nbytes() // x.element_size()
            for x in made
            if _address(x) not in addresses
        ]
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
