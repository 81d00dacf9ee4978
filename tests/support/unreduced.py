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
    "prepare_loss with an accelerator": prepare_loss,
    "DistributedDataParallel of all": lambda _, loss: DistributedDataParallel(Whole(loss)),
}


def train(processes: Processes, how: str, steps: int = 3) -> dict[str, Any]:
    """Steps by Adam: the warnings of each, the error that ended it, the parameters, and the first gradient."""
    torch.manual_seed(0)
    loss = HORDELoss(losses.ContrastiveLoss(), 3, 6, order=2, moment_dim=5, projections="cascaded")
    weight = loss.moments.weight_0  # on a process's own images: elsewhere its gradient is another
    criterion = WRAPPERS[how](processes, DistributedLoss(loss))
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    torch.manual_seed(processes.process_index)
    found: dict[str, Any] = {"warnings": [], "error": None}
    for _ in range(steps):
        x, features = torch.randn(4, 6, requires_grad=True), torch.randn(4, 3, 2, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with torch.no_grad():
                    criterion(x, torch.arange(4) % 2, features=features)
                value = criterion(x, torch.arange(4) % 2, features=features)
            except RuntimeError as error:
                found["error"] = str(error)
                break
            before = [str(one.message) for one in caught]  # a call alone says nothing
            assert not any("DistributedLoss" in one for one in before), before
            optimizer.zero_grad()
            value.backward()
        found["warnings"].append(
            [str(one.message) for one in caught if "DistributedLoss" in str(one.message)]
        )
        if how == "by hand":
            for parameter in loss.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= processes.num_processes
        if how != "frozen":
            found.setdefault("gradient", weight.grad.clone())
        optimizer.step()
    found["parameters"] = weight.detach()
    return found


def train_all(processes: Processes) -> dict[str, dict[str, Any]]:
    return {how: train(processes, how) for how in WRAPPERS}
