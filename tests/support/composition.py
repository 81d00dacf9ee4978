"""Ratios and gradients of one batch, by one process or spread over several.

Half of the batch's regularizers have weight 0 in the first step, which must not upset the processes.
"""

from typing import Any

import torch
from pytorch_metric_learning import losses
from torch import nn

from pml_regularizers import (
    DistributedLoss,
    EnergyConfusionRegularizer,
    HORDELoss,
    JRDLoss,
    VarianceRegularizer,
    attach_all,
    prepare_loss,
)
from pml_regularizers.gradient_ratios import capture_loss_terms, gradient_norm_ratios
from tests.library.contract import CHANNELS, CLASSES, WIDTH
from tests.support.gradients import Net, share
from tests.support.pool import Processes

STEPS = 2


def criterion() -> losses.MultipleLosses:
    sizes: Any = {"moment_dim": 7, "projections": "cascaded", "order_weights": (0.5, 2)}
    return losses.MultipleLosses(
        {
            "horde": HORDELoss(losses.ContrastiveLoss(), CHANNELS, WIDTH, **sizes),
            "jrd": JRDLoss(CLASSES, WIDTH),
            "variance": VarianceRegularizer(),
            "fc confusion": EnergyConfusionRegularizer(),
            "confusion": EnergyConfusionRegularizer(gradient="all"),
        },
        weights={"horde": 1, "jrd": 0, "variance": 0, "fc confusion": 0.3, "confusion": 0.2},
    )


def measure(processes: Processes | None) -> dict[str, Any]:
    rank, x, y = share(processes)
    # Initial weights differ by rank on purpose: preparing must make them agree.
    torch.manual_seed(rank)
    net, loss = Net().double(), criterion().double()
    attach_all(loss, net.head)
    called: nn.Module = loss
    model: nn.Module = net
    if processes is not None:
        called = prepare_loss(processes, DistributedLoss(loss))
        model = processes.prepare(net)
    found: dict[str, Any] = {"steps": []}
    for number in range(STEPS):
        loss.weights |= {"jrd": number / 2, "variance": number / 4}
        model.zero_grad()
        called.zero_grad()
        embeddings, _ = model(x)
        with capture_loss_terms(called) as terms:
            total = called(embeddings, y)
        both = [embeddings, net.trunk[0].weight]
        at = {"trunk": net.trunk.parameters(), "fc": net.head.fc.weight, "both": both}
        at["embeddings"] = embeddings
        ratios = gradient_norm_ratios(terms, base="horde.order_1", at=at)
        assert all(p.grad is None for p in (*net.parameters(), *loss.parameters()))
        total.backward()
        gradients = {
            f"{owner}.{name}": parameter.grad
            for owner, module in (("net", net), ("loss", loss))
            for name, parameter in module.named_parameters()
        }
        step = {"loss": total.detach(), "ratios": ratios}
        found["steps"].append({**step, "gradients": gradients})
    return found


def static_graph(processes: Processes) -> dict[str, Any]:
    """Errors of measuring in two steps under a static graph, and their gradients' distance from the mean."""
    net = nn.parallel.DistributedDataParallel(nn.Linear(3, 2).double(), static_graph=True)
    x = torch.full((4, 3), processes.process_index + 1.0, dtype=torch.float64)
    mean = (processes.num_processes + 1) / 2  # of the process numbers, from 1 on
    found: dict[str, Any] = {"said": [], "errors": []}
    for _ in range(STEPS):
        net.zero_grad()
        total = net(x).sum()
        try:
            gradient_norm_ratios(
                {"a": total, "b": 3 * total}, base="a", at={"net": net.parameters()}
            )
            found["said"].append("")
        except ValueError as error:
            found["said"].append(str(error))
        total.backward()
        found["errors"].append((net.module.weight.grad - 4 * mean).abs().max().item())
    return found


def measure_all(processes: Processes) -> dict[str, Any]:
    return {**measure(processes), "static_graph": static_graph(processes)}
