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
        storages: Bytes of each storage that they allocated; views have none of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.storages: list[int] = []
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._history: list[dict[int, tuple[StorageWeakRef, int]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = _storages(result)
        if made:
            self.operations[str(func.overloadpacket)] += 1
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        for key in made.keys() - _storages((args, kwargs)).keys() - self._live.keys():
            self._live[key] = StorageWeakRef(made[key]), made[key].nbytes()
            self.storages.append(made[key].nbytes())
        self._history.append(dict(self._live))
        return result


class Peak(Count):
    """The bytes that the tensors made inside the `with` block hold, backward passes included.

    Counted after every operation; what one allocates inside and frees again does not show.
    """

    def bytes(self, without: Sequence[Tensor]) -> int:
        """The most at once, some tensors that are still there left out."""
        left_out = {id(self._live[key]) for key in _storages(without).keys() & self._live.keys()}
        return max(
            sum(held[1] for held in now.values() if id(held) not in left_out)
            for now in self._history
        )


def _storages(values: Any) -> dict[int, Any]:
    """The storages of the tensors in these values, by their places in memory."""
    storages = [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor)]
    return {storage._cdata: storage for storage in storages}
