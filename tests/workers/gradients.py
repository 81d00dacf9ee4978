"""Worker of test_distributed.py: losses and gradients of one batch, spread over the processes.

Saves {case: {"loss": tensor, "gradients": {name: tensor}}} of the first process; with one process, of the
plain loss on the whole batch, without any of the library's distributed code.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn

from pml_regularizers import DistributedLoss, EmbeddingHead, HORDELoss, prepare_loss

BATCH, CHANNELS, WIDTH, CLASSES = 12, 6, 5, 4


def horde(base: nn.Module, **settings: object) -> HORDELoss:
    return HORDELoss(base, CHANNELS, WIDTH, order=3, moment_dim=7, **settings)  # type: ignore[arg-type]


CASES = {
    "horde": lambda: horde(losses.ContrastiveLoss()),
    "horde independent": lambda: horde(losses.TripletMarginLoss(), projections="independent"),
    "horde random": lambda: horde(losses.ContrastiveLoss(), projections="random"),
    "horde of arcface": lambda: horde(losses.ArcFaceLoss(CLASSES, WIDTH)),
    "contrastive": losses.ContrastiveLoss,
    "triplet": losses.TripletMarginLoss,
    "proxy anchor": lambda: losses.ProxyAnchorLoss(CLASSES, WIDTH),
    "arcface": lambda: losses.ArcFaceLoss(CLASSES, WIDTH),
    "several": lambda: losses.MultipleLosses(
        [horde(losses.ContrastiveLoss()), losses.TripletMarginLoss()], weights=[1, 0.3]
    ),
    "mined": lambda: horde(losses.TripletMarginLoss()),
    "features passed": lambda: horde(losses.ContrastiveLoss()),
    "PML's wrapper": lambda: horde(losses.ContrastiveLoss()),
}
MINER = miners.BatchHardMiner()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, CHANNELS, 3), nn.Tanh())
        self.head = EmbeddingHead(CHANNELS, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.trunk(x)
        return self.head(features), features


def attach(loss: nn.Module, net: Net) -> nn.Module:
    for module in loss.modules():
        if isinstance(module, HORDELoss):
            module.attach(net.head.feature_map)
    return loss


def measure(case: str, accelerator: Accelerator | None) -> dict[str, object]:
    rank, world = (
        (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    )
    # Initial weights differ by rank on purpose: preparing must make them agree.
    torch.manual_seed(rank)
    net, loss = Net().double(), CASES[case]().double()
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(BATCH, 1, 7, 7, generator=generator, dtype=torch.float64)
    y = torch.arange(BATCH) % CLASSES
    rows = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    x, y = x[rows], y[rows]
    if case != "features passed":
        attach(loss, net)
    if accelerator is None:
        mined = MINER if case == "mined" else None
        embeddings, features = net(x)
        tuples = mined(embeddings, y) if mined else None
        extra = {"features": features} if case == "features passed" else {}
        value = loss(embeddings, y, tuples, **extra)
        value.backward()
    else:
        if case == "PML's wrapper":
            wrapped: nn.Module = nn.parallel.DistributedDataParallel(DistributedLossWrapper(loss))
        else:
            miner = MINER if case == "mined" else None
            wrapped = prepare_loss(accelerator, DistributedLoss(loss, miner))
        prepared = accelerator.prepare(net)
        embeddings, features = prepared(x)
        extra = {"features": features} if case == "features passed" else {}
        value = wrapped(embeddings, y, **extra)
        accelerator.backward(value)
    gradients = {
        f"{owner}.{name}": parameter.grad
        for owner, module in (("net", net), ("loss", loss))
        for name, parameter in module.named_parameters()
    }
    return {"loss": value.detach(), "gradients": gradients}


def check_errors(accelerator: Accelerator) -> None:
    """What every process must refuse; asserted here, since an exception elsewhere would hang the others."""
    loss = DistributedLoss(losses.ContrastiveLoss())
    rank = accelerator.process_index
    for embeddings, tuples, message in (
        (torch.randn(3 + rank, 2), None, "same number of rows"),
        (torch.randn(3, 2), (torch.tensor([0]),) * 3, "indices_tuple: cannot index"),
    ):
        try:
            loss(embeddings, torch.zeros(len(embeddings), dtype=torch.long), tuples)
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error: {message}")
    try:  # twice as many embeddings as features, but not those of all processes
        world = accelerator.num_processes
        embeddings = torch.randn(3 * world, WIDTH) + rank
        features = torch.randn(3, CHANNELS, 2, 2)
        horde(losses.ContrastiveLoss())(embeddings, torch.arange(3 * world) % 2, features=features)
    except ValueError as error:
        assert "wrap the loss in DistributedLoss" in str(error), error
    else:
        raise AssertionError("features of one process were taken for those of all")


def main(path: str) -> None:
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    accelerator = None if alone else Accelerator()
    found = {case: measure(case, accelerator) for case in CASES}
    if accelerator is not None:
        check_errors(accelerator)
        found["world_size"] = {"size": accelerator.num_processes}
    if accelerator is None or accelerator.is_main_process:
        torch.save(found, path)
    if accelerator is not None:
        accelerator.wait_for_everyone()
        accelerator.end_training()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    main(sys.argv[1])
