"""Losses and gradients of one batch, by one process or spread over several."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn

from pml_regularizers import (
    DistributedLoss,
    DivergenceLoss,
    EmbeddingHead,
    GaussianKernel,
    GradientCache,
    HORDELoss,
    JRDLoss,
    VarianceRegularizer,
    VEMAttention,
    attach_all,
    prepare_loss,
)
from tests.library.contract import CHANNELS, CLASSES, HEADS, LOSSES, WIDTH
from tests.support.pool import Processes

BATCH = 12


def horde(base: nn.Module, **settings: Any) -> HORDELoss:
    return HORDELoss(
        base, CHANNELS, WIDTH, **{"moment_dim": 7, "projections": "cascaded"} | settings
    )


def with_base(loss: nn.Module) -> nn.Module:
    """A loss beside a metric loss, so that every parameter of the network gets a gradient; a sum as it is."""
    if isinstance(loss, losses.MultipleLosses):
        return loss
    return losses.MultipleLosses([losses.ContrastiveLoss(), loss], weights=[1, 0.7])


CASES: dict[str, Callable[[], nn.Module]] = {
    **{
        name: lambda case=case: with_base(case.make())
        for name, case in LOSSES.items()
        if not name.startswith("distributed")
    },
    # What upstream/distributed mends under PML's own wrapper.
    "triplet": losses.TripletMarginLoss,
    "proxy anchor": lambda: losses.ProxyAnchorLoss(CLASSES, WIDTH),
    "HORDE of arcface": lambda: horde(losses.ArcFaceLoss(CLASSES, WIDTH)),
    "HORDE, not in a sum": lambda: horde(losses.ContrastiveLoss()),
    "mined": lambda: horde(losses.TripletMarginLoss()),
    # Buffers beside parameters: DistributedDataParallel has to make both equal.
    "HORDE, random and embedded": lambda: horde(
        losses.ContrastiveLoss(), projections="random", embed_orders=True
    ),
    "variance in a slot": lambda: losses.ContrastiveLoss(
        embedding_regularizer=VarianceRegularizer()
    ),
}
PML_CASES = ("HORDE, not in a sum", "EC", "variance", "JRS", "JRD", "ensemble", "several")
"""Under PML's own wrapper, where the gradients of the network and of projections are exact."""
CACHED_CASES = ("several", "HORDE of arcface")
MINER = miners.BatchHardMiner()


class Net(nn.Module):
    """Images (N, 1, 6, 6) -> embeddings; every stage that a loss reads."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, CHANNELS, 3), nn.Tanh(), *between)
        self.head = EmbeddingHead(CHANNELS, WIDTH, attention=VEMAttention)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.head(self.trunk(x))
        return embeddings


def wrap_as_pml_does(loss: nn.Module) -> nn.Module:
    """Wrap a loss in `DistributedLossWrapper`; since it takes no sums, wrap the parts of a sum."""
    if isinstance(loss, losses.MultipleLosses):
        keys = list(loss.losses) if loss.is_dict else range(len(loss.losses))
        for key in keys:
            loss.losses[key] = DistributedLossWrapper(loss.losses[key])
    else:
        loss = DistributedLossWrapper(loss)
    trained = any(True for _ in loss.parameters())
    return nn.parallel.DistributedDataParallel(loss) if trained else loss


def share(processes: Processes | None) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The number of this process, and its images and labels of a batch."""
    processes = processes or Processes(0, 1)
    rank, world = processes.process_index, processes.num_processes
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(BATCH, 1, 6, 6, generator=generator, dtype=torch.float64)
    rows = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return rank, x[rows], torch.arange(BATCH)[rows] % CLASSES


def measure(
    case: str, processes: Processes | None, *, pml: bool = False, cached: bool = False
) -> dict[str, Any]:
    """Loss and gradients; without `processes`, of the plain loss on the whole batch."""
    rank, x, y = share(processes)
    # Initial weights differ by rank on purpose: preparing must make them agree.
    torch.manual_seed(rank)
    net, loss = Net().double(), CASES[case]().double()
    parameters = {
        f"{owner}.{name}": parameter
        for owner, module in (("net", net), ("loss", loss))
        for name, parameter in module.named_parameters()
    }
    attach_all(loss, net.head)
    mined = MINER if case == "mined" else None
    called: nn.Module = loss
    model: nn.Module = net
    if processes is not None:
        model = processes.prepare(net)
        ours = DistributedLoss(loss, mined)
        called = wrap_as_pml_does(loss) if pml else prepare_loss(ours, processes)
    embed: Any = GradientCache(model, called, 4) if cached else model
    embeddings = embed(x)
    tuples = mined(embeddings, y) if mined and processes is None else None
    value = called(embeddings, y, tuples)
    value.backward()
    if cached:
        embed.backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {"loss": value.detach(), "gradients": gradients}


def check_errors(processes: Processes) -> None:
    """Assert all refusals on every process."""
    loss = DistributedLoss(losses.ContrastiveLoss())
    rank = processes.process_index
    x, labels, tuples = torch.randn(3, 2), torch.arange(3), (torch.tensor([0]),) * 3
    assert loss(x, labels) >= 0  # they agree once, before they differ
    odd = rank == 1
    by_rank = "every process must hold the same number of rows"
    for embeddings, given, mined, message in (
        (x[rank:], labels[rank:], None, by_rank),
        (x, labels.int() if odd else labels, None, f"{by_rank}.*labels .*int64.*labels .*int32"),
        (x, labels, tuples if odd else None, f"{by_rank}.*tuples"),
        (labels if odd else x, labels, None, f"{by_rank}.*embeddings .*int64"),
        (x, [0, 1, 2], None, "labels: expected a tensor, got .*labels"),
        (x, labels, tuples, "indices_tuple: cannot index"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(embeddings, given, mined)
    with pytest.raises(ValueError, match="embeddings, labels, ref_emb: expected tensors, got"):
        loss(x, labels, ref_emb=[[1.0, 2.0]] * 3)
    assert loss(x[:2], labels[:2]) >= 0  # smaller on all
    similarity = DistributedLoss(LOSSES["JRS"].make())
    with pytest.raises(ValueError, match=rf"{by_rank}.*pooled \(3, 4\).*pooled \(3, 5\)"):
        similarity(x, labels, features={"pooled": torch.randn(3, 4 + odd)})
    maps = torch.randn(3, CHANNELS, 2, 2)
    # Nothing is trained, yet each process draws numbers of its own.
    torch.manual_seed(rank)
    drawn = DistributedLoss(horde(losses.ContrastiveLoss(), projections="sketch"))
    call = partial(drawn, torch.randn(3, WIDTH), labels, features=maps)
    with pytest.raises(
        RuntimeError, match=r"different parameters or buffers of HORDELoss, .* prep"
    ):
        call()
    prepare_loss(drawn)
    assert call() > 0
    # As many embeddings as all processes have features, and not theirs.
    count = 3 * processes.num_processes
    embeddings, alone = torch.randn(count, WIDTH) + rank, horde(losses.ContrastiveLoss())
    with pytest.raises(ValueError, match="wrap the loss in DistributedLoss"):
        alone(embeddings, torch.arange(count) % 2, features=maps)


def check_copies(processes: Processes) -> None:
    """Assert that copies of what a head returned, and an empty batch, have the value of one process."""
    world, rank = processes.num_processes, processes.process_index
    torch.manual_seed(5)
    head = EmbeddingHead(CHANNELS, WIDTH).double()
    network = nn.Sequential(nn.Conv2d(3, CHANNELS, 3).double(), head)
    images, labels = torch.randn(BATCH, 3, 6, 6, dtype=torch.float64), torch.arange(BATCH) % 3
    own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    loss = HORDELoss(losses.ContrastiveLoss(), CHANNELS, WIDTH, moment_dim=8).attach(head)
    wrapped = nn.parallel.DistributedDataParallel(network, find_unused_parameters=True)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            expected = loss(nn.functional.normalize(network(images)), labels)
            copied = nn.functional.normalize(wrapped(images[own]))
            torch.testing.assert_close(DistributedLoss(loss)(copied, labels[own]), expected)
    nothing = torch.randn(0, WIDTH, requires_grad=True)
    value = DistributedLoss(losses.ContrastiveLoss())(nothing, labels[:0])
    value.backward()
    assert value == 0 and nothing.grad is not None


def check_calls(processes: Processes) -> None:
    """Assert that every call that a loss takes has the value and the gradients of one process.

    Every process knows the whole batch; `mine` are its rows.
    """
    world, rank = processes.num_processes, processes.process_index
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels, other_labels = torch.arange(BATCH) % 3, torch.arange(BATCH) % 4
    x, y = draw(BATCH, WIDTH), draw(BATCH, WIDTH)
    tokens, mask = draw(BATCH, 4, CHANNELS), (torch.arange(4) < 3).expand(BATCH, -1)
    maps = draw(BATCH, CHANNELS, 2, 3)
    features = {"pooled": draw(BATCH, CHANNELS), "feature": draw(BATCH, 2)}
    names = ("pooled", "embeddings", "classes", "feature")
    several = JRDLoss(CLASSES, WIDTH, representations=names, kernels={"feature": GaussianKernel()})

    def mine(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: mine(part) for name, part in value.items()}
        if isinstance(value, tuple):
            return tuple(map(mine, value))
        return value[rank * BATCH // world : (rank + 1) * BATCH // world]

    def padded(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """With as many more tokens as the process has a number."""
        padding = torch.nn.functional.pad
        return padding(pair[0], (0, 0, 0, rank)), padding(pair[1], (0, rank))

    def twice(maps: torch.Tensor) -> torch.Tensor:
        """The same averages from maps of another size on each process."""
        return maps.repeat_interleave(1 + rank, dim=2)

    def in_other_order(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(sorted(features.items(), reverse=rank % 2 == 1))

    memory = losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, memory_size=50)
    views = losses.SelfSupervisedLoss(losses.NTXentLoss())
    for loss, arguments, extra, change in (
        (losses.ContrastiveLoss(), (labels,), {"ref_emb": y, "ref_labels": other_labels}, None),
        (views, (y,), {}, None),
        (views, (), {"ref_emb": y}, None),
        (memory, (labels,), {"enqueue_mask": torch.arange(BATCH) % 2 == 0}, None),
        (DivergenceLoss(HEADS, 0.1), (), {}, None),
        (horde(losses.ContrastiveLoss()), (labels,), {"features": (tokens, mask)}, padded),
        (horde(losses.ContrastiveLoss()), (labels,), {"features": maps}, twice),
        (several, (labels,), {"features": features}, in_other_order),
    ):
        loss = loss.double()
        prepared = prepare_loss(DistributedLoss(copy.deepcopy(loss)))
        loss.load_state_dict(getattr(prepared, "module", prepared).loss.state_dict())
        whole = x.clone().requires_grad_()
        expected = loss(whole, *arguments, **extra)
        expected.backward()
        rows = mine(x).clone().requires_grad_()
        given = {name: mine(value) for name, value in extra.items()}
        if change is not None:
            given["features"] = change(given["features"])
        value = prepared(rows, *map(mine, arguments), **given)
        value.backward()
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
        assert whole.grad.abs().max() > 0
        torch.testing.assert_close(rows.grad / world, mine(whole.grad), rtol=1e-9, atol=1e-14)


def measure_all(processes: Processes) -> dict[str, Any]:
    """The results of each case: at once, in chunks, and under PML's `DistributedLossWrapper`."""
    return {
        "ours": {case: measure(case, processes) for case in CASES},
        "cached": {case: measure(case, processes, cached=True) for case in CACHED_CASES},
        "pml": {case: measure(case, processes, pml=True) for case in PML_CASES},
    }
