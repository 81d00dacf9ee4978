"""The same loss and the same gradients on one process and on many.

Every process computes its own rows of the batch and of all that a loss derives from features (phase 1). It then
gathers the rows of all processes in rank order and evaluates the loss of the whole batch (phase 2). The backward
pass of the gathering sums gradients over the processes, and DistributedDataParallel divides them by the number of
processes. Together they give the gradient of one process that holds the whole batch, both for the network and for
the loss's own parameters. The reported loss is that of the whole batch, too.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from pytorch_metric_learning.utils import distributed as pml_distributed
from torch import Tensor, nn

from ._precision import full_precision

_REMEDY = (
    "wrap the loss before its optimizer is made: criterion = prepare_loss(DistributedLoss(loss))"
)
_TEXT = 400
"""Bytes by which a process describes its batch to the others."""
_gathering: ContextVar[bool] = ContextVar("gathering", default=False)


def world_size() -> int:
    """Number of processes that share the batch; 1 outside torch.distributed."""
    return dist.get_world_size() if pml_distributed.is_distributed() else 1


class _AllGather(torch.autograd.Function):
    """Rows of all processes in rank order; backwards, the sum of all processes' gradients of our rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, x)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def all_gather(x: Tensor) -> Tensor:
    """Concatenate `x` (n, ...) of all processes in rank order, with the gradient of the joint batch.

    Every process must pass the same shape.
    """
    gathered: Tensor = _AllGather.apply(x)
    return gathered


@contextmanager
def _gathered() -> Iterator[None]:
    token = _gathering.set(True)
    try:
        yield
    finally:
        _gathering.reset(token)


def are_own_rows(rows: int, batch_size: int) -> bool:
    """True if a loss was called with the batch of all processes, of which this one computed `rows` rows."""
    if rows * world_size() == batch_size and (_gathering.get() or world_size() > 1):
        return True  # gathered by DistributedLoss, or by PML's DistributedLossWrapper
    return rows == batch_size and not _gathering.get()


def gather_rows(x: Tensor, embeddings: Tensor) -> Tensor:
    """Phase 1 -> phase 2: the rows of the whole batch, from those of this process.

    Args:
        x: (n, D), the rows that this process computed.
        embeddings: (N, E), the embeddings that the loss was called with.

    Returns:
        (N, D). Inside `DistributedLoss` in rank order; inside PML's `DistributedLossWrapper`
        in the order of its embeddings, own rows first.

    Raises:
        ValueError: if there are more embeddings than rows, but not those of all processes.
    """
    if _gathering.get():
        return all_gather(x)
    if len(x) == len(embeddings):
        return x
    own = embeddings[: len(x)].detach().to(x.dtype)
    gathered, _, _ = pml_distributed.gather(torch.cat([own, x], dim=1), None)
    found, rows = torch.split(gathered, [own.shape[1], x.shape[1]], dim=1)
    if not torch.equal(found, embeddings.to(x.dtype)):
        raise ValueError(
            f"features: got {len(x)} samples, and the {len(embeddings)} embeddings are not those of all "
            "processes, own rows first; wrap the loss in DistributedLoss, or pass embeddings and features of "
            "the same samples"
        )
    return rows


def gather_parts(parts: Sequence[Tensor], embeddings: Tensor) -> list[Tensor]:
    """`gather_rows` for several matrices in one exchange; without a copy if there is nothing to exchange."""
    if not _gathering.get() and all(len(part) == len(embeddings) for part in parts):
        return list(parts)
    rows = gather_rows(torch.cat(list(parts), dim=1), embeddings)
    return list(torch.split(rows, [part.shape[1] for part in parts], dim=1))


class DistributedLoss(nn.Module):
    """Evaluate a loss on the batch of all processes, exactly as one process would.

    Under DistributedDataParallel's averaging, the value, the network's gradients and the gradients of
    the loss's own parameters equal those of one process on the concatenated batch. PML's
    `DistributedLossWrapper` gives the same network gradients, but multiplies the value and the
    gradients of proxies and class weights by the number of processes.

    With one process it only calls the loss.

    **If the loss has parameters, something must average their gradients**: `prepare_loss`, or any
    DistributedDataParallel around the loss. Without it, the first backward pass warns, and a call with gradients
    raises an error once the parameters differ between processes. If you average the gradients yourself, silence
    the warning: `warnings.filterwarnings("ignore", "DistributedLoss: ")`.

    Args:
        loss: Any PML loss, `MultipleLosses` included.
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
    _compared = False

    def __init__(self, loss: nn.Module, miner: nn.Module | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.miner = miner

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None = None,
        *,
        features: Any = None,
    ) -> Tensor:
        """The loss of the whole batch.

        Args:
            embeddings: (n, E), this process's rows; n is the same on all processes.
            labels: (n,), of the same dtype on all processes, as the embeddings.
            indices_tuple: Mined tuples; with several processes pass `miner=` to the constructor instead.
            features: This process's features, for losses that read features.

        Raises:
            ValueError: on every process, if they hold different numbers of rows or labels or different dtypes; with
                several processes, if there are no labels or `indices_tuple` is given; or if `features` are given to
                a loss that takes none.
            RuntimeError: if the loss's parameters differ between processes, since nothing averages their
                gradients, or buffers do, such as fixed projections that each process drew for itself. All
                buffers are compared in the first call, some entries of those of integers in every call.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            if world_size() == 1:
                return self._loss(embeddings, labels, indices_tuple, features)
            self._check_alike(embeddings, labels, indices_tuple, features)
            if not isinstance(labels, Tensor):
                raise ValueError(
                    f"labels: expected a tensor of {len(embeddings)} integers, got {type(labels).__name__}"
                )
            if indices_tuple is not None:
                raise ValueError(
                    f"indices_tuple: cannot index the batch of {world_size()} processes from one of them; "
                    "pass the miner to DistributedLoss(loss, miner=...)"
                )
            trained = [parameter for parameter in self.loss.parameters() if parameter.requires_grad]
            # The name is private to torch: without it there is no warning.
            ddp = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", "gone")
            alone = bool(trained) and ddp is None and torch.is_grad_enabled()
            if alone:
                self._check_equal_parameters(trained)
            labels = labels.to(embeddings.device)
            with _gathered():
                loss = self._loss(all_gather(embeddings), all_gather(labels), None, features)
            if alone and isinstance(loss, Tensor) and loss.requires_grad:
                loss.register_hook(self._warn)  # type: ignore[no-untyped-call]
            return loss

    def _check_alike(
        self,
        embeddings: Tensor,
        labels: Any,
        indices_tuple: tuple[Tensor, ...] | None,
        features: Any,
    ) -> None:
        """Compare what the processes hold, in one exchange: to gather what differs would abort them."""
        text = f"embeddings {_described(embeddings)}, labels {_described(labels)}"
        text += "" if indices_tuple is None else ", tuples"
        text += "" if features is None else f", features {_described(features)}"
        fixed = _digest(self.loss.buffers(), whole=not self._compared)
        own = torch.tensor([*fixed, *text.encode()[:_TEXT].ljust(_TEXT)], dtype=torch.uint8)
        found = all_gather(own.unsqueeze(0).to(embeddings.device))
        if not found.ne(found[0]).any():
            self._compared = True
            return
        texts = found[:, len(fixed) :]
        if texts.ne(texts[0]).any():
            held = [bytes(row).decode(errors="replace").rstrip() for row in texts.tolist()]
            raise ValueError(
                "embeddings: every process must hold the same number of rows, labels and features, in the same "
                f"dtypes, got by rank: {'; '.join(held)}; drop or fill the last batch (drop_last=True, or "
                "Accelerate's even_batches), and cast the same on all"
            )
        raise RuntimeError(
            f"loss: the {world_size()} processes hold different buffers of {type(self.loss).__name__}, such as "
            f"fixed projections or draws, expected the same; {_REMEDY}"
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

    def _check_equal_parameters(self, trained: Sequence[nn.Parameter]) -> None:
        probes = [p.detach().flatten()[:: max(p.numel() // 64, 1)].double() for p in trained]
        gathered = all_gather(torch.cat(probes).unsqueeze(0))
        for found in torch.split(gathered, [len(probe) for probe in probes], dim=1):
            # Not to the bit: the machines may differ in kind.
            if (found.amax(dim=0) - found.amin(dim=0)).max() > 1e-4 * found.abs().max():
                raise RuntimeError(
                    f"loss: the {world_size()} processes hold different parameters of {type(self.loss).__name__}, "
                    f"expected the same, since nothing averages their gradients; {_REMEDY}"
                )

    def _loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
        features: Any,
    ) -> Tensor:
        embeddings = full_precision(embeddings)
        if self.miner is not None and indices_tuple is None:
            indices_tuple = self.miner(embeddings, labels)
        if features is not None and not hasattr(self.loss, "attach"):
            raise ValueError(
                f"features: {type(self.loss).__name__} takes no features; attach the losses inside it "
                "that read them, as in horde.attach(head.feature_map)"
            )
        extra = {} if features is None else {"features": features}
        loss: Tensor = self.loss(embeddings, labels, indices_tuple, **extra)
        return loss


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{tuple(x.shape)} {x.dtype}"
    if isinstance(x, (tuple, Mapping)):
        parts = [*x.keys(), *x.values()] if isinstance(x, Mapping) else x
        return f"({', '.join(map(_described, parts))})"
    return x if isinstance(x, str) else type(x).__name__


def _digest(buffers: Iterable[Tensor], *, whole: bool) -> bytes:
    """Four bytes that depend on every byte of the buffers, or, at little cost, on some entries of integers.

    Floating ones may follow the batches, and differ by rounding between machines.
    """
    found: list[Any] = []
    for x in buffers:
        if whole:
            found.append(
                crc32(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            )
        elif not (x.is_floating_point() or x.is_complex()):
            found.append(x.detach().flatten()[:: max(x.numel() // 64, 1)].tolist())
    return crc32(str(found).encode()).to_bytes(4, "big")


def prepare_loss(accelerator: Any, loss: nn.Module | None = None) -> nn.Module:
    """Make all processes agree on a loss: `prepare_loss(loss)`, or `prepare_loss(accelerator, loss)`.

    A loss with parameters is wrapped in DistributedDataParallel, so that their gradients are averaged
    (give `loss.parameters()` to an optimizer). A loss without parameters cannot be wrapped; its buffers (such as
    fixed random projections) are copied from the first process instead. Unlike `accelerator.prepare`, this does
    not wrap the loss in autocast: losses run in full precision. With one process nothing is wrapped.

    Args:
        accelerator: An `accelerate.Accelerator`; the loss is moved to its device. With torch.distributed alone,
            leave it out and move the loss yourself: `prepare_loss(loss.to(device))`.
        loss: Usually a `DistributedLoss`.

    Example:
        >>> from pytorch_metric_learning import losses
        >>> criterion = prepare_loss(DistributedLoss(losses.ArcFaceLoss(3, 4)))
    """
    if loss is None:
        loss = accelerator
        if not isinstance(loss, nn.Module):
            raise ValueError(
                f"loss: expected a module, got {type(loss).__name__}; call prepare_loss(loss), or "
                "prepare_loss(accelerator, loss)"
            )
        processes = world_size()
    else:
        loss, processes = loss.to(accelerator.device), accelerator.num_processes
    if processes == 1:
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
