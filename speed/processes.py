"""A loss over several processes, each with its share of the batch, against one process with the whole batch."""

import datetime
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import MultipleLosses
from torch import Tensor, nn

import pml_regularizers as ours
from speed.case import Case
from speed.losses import ALONE, LOSSES, Network, Sizes, labels_of

GROUP_SECONDS = {"cuda": 20, "cpu": 300}
"""Limit of a process group: a sandbox may let processes wait for each other for ever. A CPU may be busy."""

BACKENDS = {"cuda": {"gloo": 2, "nccl": 1}, "cpu": {"gloo": 2}}
"""Numbers of processes that share the batch, by device and backend."""

TERMS = (ALONE, "HORDE, cascaded", "HORDE, sketch", "JRS", "energy confusion", "VEM")


def small_network(device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """A small network with a sum of losses in float64, the same in every process, and a batch for all of them."""
    torch.manual_seed(0)
    sizes = Sizes(48, 36, 16, 8, 32, 3, 12)
    trunk = nn.Sequential(nn.Conv2d(3, sizes.C, 3), nn.Tanh())
    terms = {name: LOSSES[name](sizes) for name in TERMS}
    loss = ours.DistributedLoss(MultipleLosses(terms, weights=dict.fromkeys(terms, 1.0)))
    images = torch.randn(sizes.N, 3, 8, 8, dtype=torch.float64).to(device)
    network = Network(trunk, sizes, loss, vem=True).to(device, torch.float64)
    return network, images, labels_of(images)


def loss_and_gradients(network: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor | None]:
    value = network(images, labels)
    value.backward()
    return [value.detach(), *(parameter.grad for parameter in network.parameters())]


def share_batch(rank: int, device: str, folder: str) -> None:
    """The work of a process: its share of the batch, with each backend that has so many processes.

    The first one saves the loss and the gradients, in a file for each backend.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(0)
    for backend, count in BACKENDS[device].items():
        if rank >= count:
            continue
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/{backend}",
            rank=rank,
            world_size=count,
            timeout=datetime.timedelta(seconds=GROUP_SECONDS[device]),
        )
        network, images, labels = small_network(torch.device(device))
        network = nn.parallel.DistributedDataParallel(network)
        found = loss_and_gradients(network, images.chunk(count)[rank], labels.chunk(count)[rank])
        if rank == 0:
            torch.save(found, f"{folder}/{backend}.pt")
        if count > 1:
            dist.barrier()
        dist.destroy_process_group()


def check_processes(case: Case, processes: Any, folder: str) -> None:
    """Wait for processes that `share_batch`, and compare what they have saved."""
    expected = loss_and_gradients(*small_network(case.device))

    def compare(backend: str, name: str) -> None:
        found = torch.load(f"{folder}/{backend}.pt", map_location="cpu")
        case.check(name, found, expected, 1e-9)

    try:
        while not processes.join():
            pass
    finally:  # what one group has found stays, if the next fails
        for backend, count in BACKENDS[case.device.type].items():
            name = f"{backend}, {count} process{'es' * (count > 1)}"
            case.run(name, 0, partial(compare, backend, name))
