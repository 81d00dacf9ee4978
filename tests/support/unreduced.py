"""Several processes with a loss that nothing, the user or DistributedDataParallel keeps equal."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pml_regularizers import DistributedLoss, HORDELoss, prepare_loss
from tests.support.pool import Processes


class Whole(nn.Module):
    """A network with its loss inside."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, *batch: Tensor, **features: Tensor) -> Tensor:
        value: Tensor = self.loss(*batch, **features)
        return value


def other_start(processes: Processes, loss: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(loss.parameters()).add_(processes.process_index)
    return loss


WRAPPERS: dict[str, Callable[[Processes, nn.Module], nn.Module]] = {
    "nothing": lambda _, loss: loss,
    "nothing from the start": other_start,
    "by hand": lambda _, loss: loss,
    "frozen": lambda _, loss: loss.requires_grad_(False),
    "prepare_loss with an accelerator": lambda accelerator, loss: prepare_loss(loss, accelerator),
    "DistributedDataParallel of all": lambda _, loss: DistributedDataParallel(Whole(loss)),
}


def train(processes: Processes, how: str) -> dict[str, Any]:
    """Three steps by Adam: the warnings of each, the error that ended them, parameters, and the first gradient."""
    torch.manual_seed(0)
    loss = HORDELoss(losses.ContrastiveLoss(), 3, 6, order=2, moment_dim=5, projections="cascaded")
    weight = loss.moments.weight_0  # on a process's own images: elsewhere its gradient is another
    criterion = WRAPPERS[how](processes, DistributedLoss(loss))
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    torch.manual_seed(processes.process_index)
    found: dict[str, Any] = {"warnings": [], "error": None}
    for _ in range(3):
        x, features = torch.randn(4, 6, requires_grad=True), torch.randn(4, 3, 2, 2)
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                criterion(x, torch.arange(4) % 2, features=features).backward()
            except RuntimeError as error:
                return {**found, "error": str(error)}
        said = [str(one.message) for one in caught]
        found["warnings"].append([text for text in said if "DistributedLoss" in text])
        if how == "by hand":
            for parameter in loss.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= processes.num_processes
        if how != "frozen":
            found.setdefault("gradient", weight.grad.clone())
        optimizer.step()
    return {**found, "parameters": weight.detach()}


def train_all(processes: Processes) -> dict[str, dict[str, Any]]:
    return {how: train(processes, how) for how in WRAPPERS}
