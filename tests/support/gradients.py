"""Losses and gradients of one batch, by one process or spread over several."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn

from pml_regularizers import (
    AttentionEnsemble,
    BinomialDevianceLoss,
    CosineContrastiveLoss,
    DenseNPairsLoss,
    DistributedLoss,
    DivergenceLoss,
    EmbeddingHead,
    EnergyConfusionRegularizer,
    EnsembleLoss,
    GaussianKernel,
    HORDELoss,
    IntraClassRegularizer,
    JIntraRegularizer,
    JMMDRegularizer,
    JRDLoss,
    JRSRegularizer,
    LaplaceKernel,
    LinearRamp,
    ScheduledLosses,
    VarianceRegularizer,
    VEMAttention,
    attach_all,
    prepare_loss,
)
from tests.support.pool import Processes

BATCH, CHANNELS, WIDTH, CLASSES, HEADS = 12, 6, 6, 4, 3


def horde(base: nn.Module, **settings: object) -> HORDELoss:
    return HORDELoss(base, CHANNELS, WIDTH, order=3, moment_dim=7, **settings)  # type: ignore[arg-type]


def with_base(regularizer: nn.Module) -> nn.Module:
    """A regularizer beside a metric loss, so that every parameter of the network gets a gradient."""
    return losses.MultipleLosses([losses.ContrastiveLoss(), regularizer], weights=[1, 0.7])


def confusion(**settings: object) -> nn.Module:
    return with_base(EnergyConfusionRegularizer(**settings))  # type: ignore[arg-type]


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    loss = losses.ContrastiveLoss()
    loss.register_buffer("drawn", buffer)
    return loss


def ensemble(base: nn.Module, **settings: object) -> EnsembleLoss:
    divergence = DivergenceLoss(HEADS, 0.1, **settings)  # type: ignore[arg-type]
    return EnsembleLoss(base, HEADS, embedding_regularizer=divergence, embedding_reg_weight=0.5)


def together() -> nn.Module:
    return ScheduledLosses(
        {
            "horde": horde(losses.ArcFaceLoss(CLASSES, WIDTH)),
            "variance": VarianceRegularizer(),
            "confusion": EnergyConfusionRegularizer(),
            "joint": JRSRegularizer(),
        },
        weights={"horde": 1.0, "variance": 0.5, "confusion": LinearRamp(0.3, 1.0, 5), "joint": 2.0},
    )


CASES: dict[str, Callable[[], nn.Module]] = {
    "horde": lambda: horde(losses.ContrastiveLoss()),
    "horde independent": lambda: horde(losses.TripletMarginLoss(), projections="independent"),
    "horde random": lambda: horde(losses.ContrastiveLoss(), projections="random"),
    "horde sketch": lambda: horde(losses.ContrastiveLoss(), projections="sketch"),
    # Buffers beside parameters: DistributedDataParallel has to make both equal.
    "horde random embedded": lambda: horde(
        losses.ContrastiveLoss(), projections="random", embed_orders=True
    ),
    "horde random of proxies": lambda: horde(
        losses.ProxyAnchorLoss(CLASSES, WIDTH), projections="random"
    ),
    "horde of arcface": lambda: horde(losses.ArcFaceLoss(CLASSES, WIDTH)),
    "contrastive": losses.ContrastiveLoss,
    "triplet": losses.TripletMarginLoss,
    "proxy anchor": lambda: losses.ProxyAnchorLoss(CLASSES, WIDTH),
    "arcface": lambda: losses.ArcFaceLoss(CLASSES, WIDTH),
    "binomial": BinomialDevianceLoss,
    "cosine contrastive": CosineContrastiveLoss,
    "n-pairs": DenseNPairsLoss,
    "several": lambda: losses.MultipleLosses(
        [horde(losses.ContrastiveLoss()), losses.TripletMarginLoss()], weights=[1, 0.3]
    ),
    "mined": lambda: horde(losses.TripletMarginLoss()),
    "features passed": lambda: horde(losses.ContrastiveLoss()),
    "confusion": confusion,
    "confusion of all": lambda: confusion(gradient="all", reduction="ordered_sum", log=False),
    "confusion drawn": lambda: confusion(num_pairs=2, seed=4),
    "confusion by another distance": lambda: confusion(
        gradient="all", distance=distances.LpDistance(p=1)
    ),
    "variance": lambda: with_base(VarianceRegularizer()),
    "variance unbiased": lambda: with_base(VarianceRegularizer(unbiased=True)),
    "variance in a slot": lambda: losses.ContrastiveLoss(
        embedding_regularizer=VarianceRegularizer()
    ),
    "joint similarity": JRSRegularizer,
    "joint mmd": JMMDRegularizer,
    "joint intra": JIntraRegularizer,
    "intra class": lambda: IntraClassRegularizer(
        {"pooled": LaplaceKernel(), "embeddings": GaussianKernel()}
    ),
    "jrd": lambda: JRDLoss(CLASSES, WIDTH),
    "jrd-c": lambda: JRDLoss(CLASSES, WIDTH, representations=("pooled", "embeddings")),
    "jrd-pooling": lambda: JRDLoss(CLASSES, WIDTH, representations=("embeddings", "classes")),
    "mrd": lambda: JRDLoss(CLASSES, WIDTH, representations=("embeddings",)),
    "ensemble": lambda: ensemble(losses.ContrastiveLoss()),
    "ensemble of proxies": lambda: ensemble(
        losses.ProxyAnchorLoss(CLASSES, WIDTH // HEADS), images="same"
    ),
    "ensemble with horde": lambda: horde(
        losses.ContrastiveLoss(), first_loss=ensemble(losses.ArcFaceLoss(CLASSES, WIDTH // HEADS))
    ),
    "all together": together,
}
# Under PML's own wrapper, where the gradients of the network and of projections are exact.
PML_CASES = (
    "horde",
    "confusion",
    "confusion of all",
    "variance",
    "joint similarity",
    "joint mmd",
    "jrd",
    "ensemble",
    "ensemble with horde",
    "all together",
)
MINER = miners.BatchHardMiner()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, CHANNELS, 3), nn.Tanh())
        self.head = EmbeddingHead(CHANNELS, WIDTH, attention=VEMAttention)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.trunk(x)
        return self.head(features), features


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = AttentionEnsemble(
            nn.Sequential(nn.Conv2d(1, 5, 3), nn.Tanh()),
            nn.Sequential(nn.Conv2d(5, CHANNELS // HEADS, 1), nn.Tanh()),
            stem_channels=5,
            body_channels=CHANNELS // HEADS,
            embedding_size=WIDTH,
            num_heads=HEADS,
        )
        self.head = self.trunk  # what losses attach to

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings = self.trunk(x)
        return embeddings, embeddings


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


def measure(case: str, processes: Processes | None, *, pml: bool = False) -> dict[str, Any]:
    """Loss and gradients; without `processes`, of the plain loss on the whole batch."""
    rank, world = (
        (0, 1) if processes is None else (processes.process_index, processes.num_processes)
    )
    # Initial weights differ by rank on purpose: preparing must make them agree.
    torch.manual_seed(rank)
    net = (Ensemble() if case.startswith("ensemble") else Net()).double()
    loss = CASES[case]().double()
    parameters = {
        f"{owner}.{name}": parameter
        for owner, module in (("net", net), ("loss", loss))
        for name, parameter in module.named_parameters()
    }
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(BATCH, 1, 7, 7, generator=generator, dtype=torch.float64)
    y = torch.arange(BATCH) % CLASSES
    rows = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    x, y = x[rows], y[rows]
    if case != "features passed":
        attach_all(loss, net.head)
    mined = MINER if case == "mined" else None
    if processes is None:
        embeddings, features = net(x)
        tuples = mined(embeddings, y) if mined else None
        extra = {"features": features} if case == "features passed" else {}
        value = loss(embeddings, y, tuples, **extra)
        value.backward()
    else:
        wrapped = (
            wrap_as_pml_does(loss) if pml else prepare_loss(processes, DistributedLoss(loss, mined))
        )
        prepared = processes.prepare(net)
        embeddings, features = prepared(x)
        extra = {"features": features} if case == "features passed" else {}
        value = wrapped(embeddings, y, **extra)
        value.backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {"loss": value.detach(), "gradients": gradients}


def check_errors(processes: Processes) -> None:
    """Assert all refusals on every process."""
    loss = DistributedLoss(losses.ContrastiveLoss())
    rank = processes.process_index
    x, labels, tuples = torch.randn(3, 2), torch.arange(3), (torch.tensor([0]),) * 3
    odd = rank == 1
    by_rank = "every process must hold the same number of rows"
    for embeddings, given, mined, message in (
        (x[rank:], labels[rank:], None, by_rank),
        (x.double() if odd else x, labels, None, f"{by_rank}.*float32.*float64"),
        (x, labels.int() if odd else labels, None, f"{by_rank}.*labels .*int64.*labels .*int32"),
        (x, None if odd else labels, None, f"{by_rank}.*labels NoneType"),
        (x, labels, tuples if odd else None, f"{by_rank}.*tuples"),
        (x, None, None, "labels: expected a tensor of 3 integers, got NoneType"),
        (x, labels, tuples, "indices_tuple: cannot index"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(embeddings, given, mined)
    maps = torch.randn(3, CHANNELS, 2, 2)
    for odd_maps in (maps.double(), None):
        reading = DistributedLoss(horde(losses.ContrastiveLoss()))
        with pytest.raises(ValueError, match=f"{by_rank}.*features"):
            reading(torch.randn(3, WIDTH), labels, features=odd_maps if odd else maps)
    for make in (
        lambda: horde(losses.ContrastiveLoss(), projections="sketch"),
        lambda: confusion(gradient="all", num_pairs=2, seed=torch.initial_seed()),
        lambda: with_buffer(torch.randn(2)),
        lambda: with_buffer((torch.arange(1000) == 501 + rank).long()),
    ):
        torch.manual_seed(rank)  # nothing is trained, yet each process draws numbers of its own
        drawn = make()
        extra = {"features": torch.randn(3, CHANNELS, 2, 2)} if isinstance(drawn, HORDELoss) else {}
        with pytest.raises(
            RuntimeError, match=r"different buffers of \w+, such as .* prepare_loss"
        ):
            DistributedLoss(drawn)(torch.randn(3, WIDTH), labels, **extra)
        assert prepare_loss(DistributedLoss(drawn))(torch.randn(3, WIDTH), labels, **extra) > 0
    # As many embeddings as all processes have features, and not theirs.
    count = 3 * processes.num_processes
    embeddings, alone = torch.randn(count, WIDTH) + rank, horde(losses.ContrastiveLoss())
    with pytest.raises(ValueError, match="wrap the loss in DistributedLoss"):
        alone(embeddings, torch.arange(count) % 2, features=torch.randn(3, CHANNELS, 2, 2))


def measure_all(
    processes: Processes, cases: Sequence[str], pml_cases: Sequence[str]
) -> dict[str, Any]:
    """{case: {"loss": tensor, "gradients": {name: tensor}}}, and the same under PML's `DistributedLossWrapper`."""
    return {
        "ours": {case: measure(case, processes) for case in cases},
        "pml": {case: measure(case, processes, pml=True) for case in pml_cases},
    }
