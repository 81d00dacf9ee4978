"""The same loss and the same gradients on one process and on many.

Every process computes its own rows of the batch and of all that a loss derives from features (phase 1), gathers the
rows of all processes in rank order, and evaluates the loss of the whole batch (phase 2). The gradient of its own
rows is multiplied by the number of processes, by which DistributedDataParallel divides the sum over the processes.
The result is the gradient of one process with the whole batch, for the network and the loss's own parameters.
"""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from pytorch_metric_learning.utils import distributed as pml_distributed
from torch import Tensor, nn

from .functional.checks import Around, check_batch, check_module
from .functional.precision import full_precision, without_autocast
from .unoptimized import watch

_REMEDY = (
    "wrap the loss before its optimizer is made: criterion = prepare_loss(DistributedLoss(loss))"
)
_own: ContextVar[Tensor | None] = ContextVar("own", default=None)
"""The embeddings of this process, inside `DistributedLoss`."""


def world_size() -> int:
    """Number of processes that share the batch; 1 outside torch.distributed."""
    return dist.get_world_size() if pml_distributed.is_distributed() else 1


def all_gather(*tensors: Tensor, group: Any = None) -> list[Tensor]:
    """Concatenate each tensor (n, ...) of all processes in rank order, in one exchange.

    Every process must pass the same shapes. Own rows have the gradient of the joint batch, if all processes compute
    the same value of it and DistributedDataParallel averages the gradients.
    """
    processes = dist.get_world_size()
    parts = [x.detach().contiguous().view(-1).view(torch.uint8) for x in tensors]
    received = parts[0].new_empty(processes, sum(map(len, parts)))
    dist.all_gather(list(received), torch.cat(parts), group=group)
    gathered = []
    for x, raw in zip(tensors, torch.split(received, [*map(len, parts)], dim=1), strict=True):
        # torch refuses to see no bytes as numbers.
        numbers = raw.contiguous().view(x.dtype) if x.numel() else x.detach()
        rows = list(numbers.reshape(processes, *x.shape))
        own = x.view_as(x)
        if own.grad_fn is not None:
            own.register_hook(lambda gradient: gradient * processes)
            rows[dist.get_rank()] = own
        gathered.append(torch.cat(rows))
    return gathered


def _gathering() -> bool:
    return world_size() > 1 and _own.get() is not None


def own_embeddings(embeddings: Tensor) -> Tensor:
    """This process's embeddings, as they came to `DistributedLoss`; elsewhere those of the call."""
    own = _own.get()
    return embeddings if own is None or not matches_batch(len(own), len(embeddings)) else own


def matches_batch(rows: int, batch_size: int) -> bool:
    """True if a loss was called with the batch of all processes, of which this one computed `rows` rows."""
    if rows * world_size() == batch_size and world_size() > 1:
        return True  # gathered by DistributedLoss, or by PML's DistributedLossWrapper
    return rows == batch_size and not _gathering()


def gather_features(parts: Sequence[Tensor], embeddings: Tensor) -> list[Tensor]:
    """Rows of the whole batch: matrices (N, D) from those of this process (n, D), in one exchange.

    Inside `DistributedLoss` in rank order; inside PML's `DistributedLossWrapper` in the order of the `embeddings`
    (N, E) that the loss was called with, own rows first; without a copy if there is nothing to exchange.

    Raises:
        ValueError: if there are more embeddings than rows, but not those of all processes.
    """
    if _gathering():
        return all_gather(*parts)
    if all(len(part) == len(embeddings) for part in parts):
        return list(parts)
    x = torch.cat(list(parts), dim=1)
    own = embeddings[: len(x)].detach().to(x.dtype)
    gathered, _, _ = pml_distributed.gather(torch.cat([own, x], dim=1), None)
    expected, *whole = torch.split(gathered, [rows.shape[1] for rows in (own, *parts)], dim=1)
    if not torch.equal(expected, embeddings.to(x.dtype)):
        raise ValueError(
            f"features: got {len(own)} samples, and the {len(embeddings)} embeddings are not those of all "
            "processes, own rows first; wrap the loss in DistributedLoss, or pass features of the same samples"
        )
    return whole


class DistributedLoss(Around):
    """Evaluate a loss on the batch of all processes, exactly as one process would.

    Under DistributedDataParallel's averaging, the value, the network's gradients and those of the loss's own
    parameters equal those of one process on the concatenated batch. PML's `DistributedLossWrapper` multiplies the
    value and the gradients of proxies and class weights by the number of processes.

    Call it like the loss inside, with this process's rows of everything.

    **If the loss has parameters, something must average their gradients**: `prepare_loss`, or any
    DistributedDataParallel around the loss. Without it, the first backward pass warns. If you average the gradients
    yourself, silence the warning: `warnings.filterwarnings("ignore", "DistributedLoss: ")`.

    Args:
        loss: Any PML loss: `MultipleLosses`, `CrossBatchMemory` and `SelfSupervisedLoss` included.
        miner: A PML miner; it sees the whole batch, in the loss's order. A miner that draws random numbers needs
            the same seed in every process.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> loss = DistributedLoss(losses.ContrastiveLoss())
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.4142)
    """

    _warned = False
    _agreed: tuple[int | None, int] = (None, 0)
    """Code of the batch that all processes held last, and the bytes of its rows on the CPU."""

    def __init__(self, loss: nn.Module, miner: nn.Module | None = None) -> None:
        super().__init__()
        check_module("loss", loss)
        self.miner = miner  # first, since the loss may have one itself
        self.loss = loss

    def _inner(self) -> nn.Module | None:
        inner: nn.Module | None = self.__dict__.get("_modules", {}).get("loss")
        return inner

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        enqueue_mask: Tensor | None = None,
        features: Any = None,
    ) -> Tensor:
        """The loss of the whole batch.

        Args:
            embeddings: (n, E), this process's rows; n is the same on all processes.
            labels: (n,), of the same dtype on all processes, as the embeddings. `SelfSupervisedLoss` takes its
                second set of embeddings here.
            indices_tuple: Mined tuples; with several processes pass `miner=` to the constructor instead.
            ref_emb, ref_labels: This process's rows of the reference set, where the loss takes one.
            enqueue_mask: (n,) booleans, for `CrossBatchMemory`.
            features: This process's features, for losses that read features.

        Raises:
            ValueError: on every process, if they hold different numbers of rows or labels or different dtypes; with
                several processes, if `indices_tuple` is given; or for an argument that the loss does not take.
            RuntimeError: in the first call, if the processes hold different parameters or buffers of the loss.
        """
        rows: dict[str, Any] = {"embeddings": embeddings, "labels": labels, "ref_emb": ref_emb}
        rows |= {"ref_labels": ref_labels, "enqueue_mask": enqueue_mask}
        rows = {name: x for name, x in rows.items() if x is not None}
        if several := world_size() > 1:
            rows = self._gather(rows, indices_tuple, features)
        else:
            check_batch(embeddings, labels)
        watch(self.loss, embeddings)
        token = _own.set(embeddings)
        try:
            with without_autocast(embeddings):
                loss = self._loss(rows, None if several else indices_tuple, features)
        finally:
            _own.reset(token)
        if not several:
            return loss
        trained = any(parameter.requires_grad for parameter in self.loss.parameters())
        # The name is private to torch: without it there is no warning.
        ddp = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", "gone")
        if trained and ddp is None and isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(self._warn)
        return loss

    def _gather(self, rows: Mapping[str, Any], tuples: Any, features: Any) -> dict[str, Tensor]:
        """Rows of all processes, after a check that all hold the same: else gathering would hang.

        No check that one process alone may fail comes before it.
        In a steady state a code of what is held travels with the rows, in a message of the size that all agreed on
        last; on a GPU by itself, through the CPU, so that the device does not wait.
        """
        text = _described({"labels": None, **rows, "features": features, "tuples": tuples})
        code, group = crc32(text.encode()), _cpu_group(dist.group.WORLD)
        device = getattr(rows["embeddings"], "device", torch.device("cpu"))
        tensors = [x.to(device) for x in rows.values() if isinstance(x, Tensor)]
        agreed, size = self._agreed
        at_once = code == agreed and device.type == "cpu"
        message = tensors if at_once else [torch.empty(size, dtype=torch.uint8)]
        codes, *gathered = all_gather(torch.tensor([code]), *message, group=group)
        if codes.ne(code).any():
            texts: list[Any] = [None] * world_size()
            dist.all_gather_object(texts, text, group)
            raise ValueError(
                "embeddings: every process must hold the same number of rows, labels and features, in the same "
                f"dtypes, got by rank: {'; '.join(texts)}; drop or fill the last batch (drop_last=True, or "
                "Accelerate's even_batches), and cast the same on all"
            )
        check_batch(rows["embeddings"], rows.get("labels"))
        if len(tensors) < len(rows):
            raise ValueError(f"{', '.join(rows)}: expected tensors, got {text}")
        if tuples is not None:
            raise ValueError(
                f"indices_tuple: cannot index the batch of {world_size()} processes from one of them; "
                "pass the miner to DistributedLoss(loss, miner=...)"
            )
        if agreed is None:
            self._check_equal_state(group)
        if not at_once:
            self._agreed = code, sum(x.nbytes for x in tensors) if device.type == "cpu" else 0
            gathered = all_gather(*tensors)
        return dict(zip(rows, gathered, strict=True))

    def _check_equal_state(self, group: Any) -> None:
        digest = 0
        for x in (*self.loss.parameters(), *self.loss.buffers()):
            raw = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest = crc32(raw.numpy().data, digest)
        if all_gather(torch.tensor([digest]), group=group)[0].ne(digest).any():
            raise RuntimeError(
                f"loss: the {world_size()} processes hold different parameters or buffers of "
                f"{type(self.loss).__name__}, such as projections, expected the same; {_REMEDY}"
            )

    def _warn(self, gradient: Tensor) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"DistributedLoss: nothing averages the gradients of {type(self.loss).__name__}'s own parameters "
                f"over {world_size()} processes, so the parameters may drift apart; {_REMEDY}. If you average them "
                'yourself: warnings.filterwarnings("ignore", "DistributedLoss: ")',
                stacklevel=2,
            )

    def _loss(self, rows: Mapping[str, Any], indices_tuple: Any, features: Any) -> Tensor:
        rows = {name: full_precision(x) if isinstance(x, Tensor) else x for name, x in rows.items()}
        embeddings, labels = rows.pop("embeddings"), rows.pop("labels", None)
        if self.miner is not None and indices_tuple is None:
            reference = {name: x for name, x in rows.items() if name != "enqueue_mask"}
            indices_tuple = self.miner(embeddings, labels, **reference)
        given = {**rows, "indices_tuple": indices_tuple, "features": features}
        given = {name: x for name, x in given.items() if x is not None}
        taken = inspect.signature(self.loss.forward).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            for name in given.keys() - taken.keys():
                hint = {
                    "features": "; attach the losses inside it that read them, as in horde.attach(head)",
                    "indices_tuple": "; leave out the miner",
                }.get(name, "")
                raise ValueError(f"{name}: {type(self.loss).__name__} takes none{hint}")
        if labels is None and "labels" not in taken:  # SelfSupervisedLoss(embeddings, ref_emb=...)
            return self.loss(embeddings, **given)  # type: ignore[no-any-return]
        return self.loss(embeddings, labels, **given)  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _cpu_group(world: Any) -> Any:
    """A process group of tensors on the CPU, made by the first call of all processes."""
    return world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def _described(x: Any) -> str:
    """Rows, widths and dtypes; no sizes of positions, since maps, tokens and masks stay on their process."""
    if isinstance(x, Tensor):
        matrix = x.ndim < 3 and x.is_floating_point()
        return f"{tuple(x.shape if matrix else x.shape[:1])} {x.dtype}"
    if isinstance(x, Mapping):
        return ", ".join(f"{name} {_described(x[name])}" for name in sorted(x))
    if isinstance(x, (tuple, list)):
        return ", ".join(map(_described, x))
    return type(x).__name__


def prepare_loss(loss: nn.Module, accelerator: Any = None) -> nn.Module:
    """Make all processes agree on a loss.

    A loss with parameters is wrapped in DistributedDataParallel, which averages their gradients (give
    `loss.parameters()` to an optimizer). A loss without any cannot be wrapped; its buffers, such as fixed
    projections, are copied from the first process. Unlike `accelerator.prepare`, this does not wrap the loss in
    autocast: losses run in full precision. With one process nothing is wrapped.

    Args:
        loss: Usually a `DistributedLoss`.
        accelerator: An `accelerate.Accelerator`, to whose device the loss is moved. With torch.distributed alone,
            move it yourself: `prepare_loss(loss.to(device))`.

    Raises:
        ValueError: if the loss is no module.

    Example:
        >>> from pytorch_metric_learning import losses
        >>> criterion = prepare_loss(DistributedLoss(losses.ArcFaceLoss(3, 4)))
    """
    check_module("loss", loss, "write prepare_loss(loss, accelerator)")
    if accelerator is not None:
        loss = loss.to(accelerator.device)
    if world_size() == 1:
        return loss
    trained = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    if trained:
        device = trained[0].device
        devices = [device] if device.type == "cuda" else None
        prepared = nn.parallel.DistributedDataParallel(loss, device_ids=devices)
        # Not by DDP's argument: torch 2.14 renames it and then no longer makes them equal at the start.
        prepared.broadcast_buffers = False
        return prepared
    for tensor in [*loss.parameters(), *loss.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    return loss
