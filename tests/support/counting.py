"""Costs that are counted: the operations that make tensors, and how large these are."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
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


class Peak(TorchDispatchMode):
    """The bytes that the tensors made inside the `with` block hold, backward passes included.

    Counted after every operation; what one allocates inside and frees again does not show.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: list[tuple[int, StorageWeakRef, int]] = []
        self._history: list[list[tuple[int, StorageWeakRef, int]]] = []

    def bytes(self, without: Sequence[Tensor]) -> int:
        """The most at once, some tensors that are still there left out."""
        given = {x.untyped_storage()._cdata for x in without}
        left_out = {id(held) for held in self._live if held[0] in given}
        return max(
            sum(held[2] for held in now if id(held) not in left_out) for now in self._history
        )

    def largest(self) -> int:
        """The bytes of the largest tensor."""
        return max(size for now in self._history for *_, size in now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._live = [held for held in self._live if not held[1].expired()]
        known |= {address for address, *_ in self._live}
        for x in _tensors(result):
            storage = x.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._live.append((storage._cdata, StorageWeakRef(storage), storage.nbytes()))
        self._history.append(list(self._live))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
