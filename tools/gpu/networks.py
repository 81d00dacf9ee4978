"""Losses, networks and processes that the parts of `make gpu` check."""

import copy
import datetime
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import MultipleLosses
from torch import Tensor, nn
from torch.nn import functional as F

import pml_regularizers as ours

GROUP_SECONDS = {"cuda": 20, "cpu": 300}
"""Limit of a process group: a sandbox may let processes wait for each other for ever. A CPU may be busy."""

BACKENDS = {"cuda": {"gloo": 2, "nccl": 1}, "cpu": {"gloo": 2}}
"""Numbers of processes that share the batch, by device and backend."""


class Sizes(NamedTuple):
    """A batch of N images with maps of P positions and C channels, embeddings of E, K orders of d, and classes."""

    N: int
    P: int
    C: int
    E: int
    d: int
    K: int
    classes: int


def horde(sizes: Sizes, **options: Any) -> nn.Module:
    options = {"order": sizes.K, "moment_dim": sizes.d} | options
    return ours.HORDELoss(ours.BinomialDevianceLoss(), sizes.C, sizes.E, **options)


LOSSES: Mapping[str, Callable[[Sizes], nn.Module]] = {
    "binomial deviance": lambda _: ours.BinomialDevianceLoss(),
    "HORDE, cascaded": lambda sizes: horde(sizes, projections="cascaded"),
    "HORDE, recomputed": lambda sizes: horde(sizes, projections="cascaded", checkpoint=True),
    "HORDE, random": lambda sizes: horde(sizes, projections="random"),
    "HORDE, sketch": horde,
    "JRS": lambda _: ours.JRSRegularizer(),
    "JRD": lambda sizes: ours.JRDLoss(sizes.classes, sizes.E),
    "energy confusion": lambda _: ours.EnergyConfusionRegularizer(gradient="fc"),
    "VEM": lambda _: ours.VarianceRegularizer(),
}


def draw_inputs(sizes: Sizes) -> dict[str, Tensor]:
    """Embeddings, and what the losses read besides: by the names in their `feature_names`."""
    N, C, E, side = sizes.N, sizes.C, sizes.E, round(sizes.P**0.5)
    return {
        "embeddings": F.normalize(torch.randn(N, E)),
        "feature_map": torch.randn(N, C, side, side),
        "pooled": torch.randn(N, C),
        "predicted": torch.rand(C),
        "stopgrad_embeddings": F.normalize(torch.randn(N, E)),
    }


def value_and_gradients(
    loss: nn.Module,
    inputs: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    half: torch.dtype | None = None,
    scale: float = 1.0,
) -> list[Tensor]:
    """The value of a loss and its gradients for parameters and inputs, four images per class.

    Args:
        dtype: Precision of the loss, and of the inputs if `half` is None.
        half: Precision of the inputs and of an autocast around the loss.
        scale: Factor of the value before the backward pass, as of a `GradScaler`; the gradients are divided by it.
    """
    loss = copy.deepcopy(loss).to(device, dtype)
    leaves = {
        name: x.to(device, half or dtype, copy=True).requires_grad_() for name, x in inputs.items()
    }
    labels = torch.arange(len(leaves["embeddings"]), device=device) // 4
    names = getattr(loss, "feature_names", ())
    features: dict[str, Any] = {name: leaves.get(name) for name in names}
    if "attention" in features:
        features["attention"] = leaves["pooled"], leaves["predicted"]
    with torch.autocast(device.type, half, enabled=half is not None):
        value = loss(leaves["embeddings"], labels, **({"features": features} if names else {}))
    tensors = [*loss.parameters(), *leaves.values()]
    gradients = torch.autograd.grad(value * scale, tensors, allow_unused=True)
    return [value.detach(), *(x.double() / scale for x in gradients if x is not None)]


class Network(nn.Module):
    """A trunk, a head, and a loss of what they return."""

    def __init__(self, trunk: nn.Module, C: int, E: int, loss: nn.Module, vem: bool) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ours.EmbeddingHead(C, E, attention=ours.VEMAttention if vem else None)
        self.loss = ours.attach_all(loss, self.head)

    def forward(self, images: Tensor, labels: Tensor, half: torch.dtype | None = None) -> Tensor:
        with torch.autocast(images.device.type, half, enabled=half is not None):
            embeddings = self.head(self.trunk(images))
        value: Tensor = self.loss(embeddings, labels)
        return value


def make_trunk(name: str, tiny: bool) -> Any:
    """A network of timm, or its tiny stand-in, without pooling and classifier."""
    import timm

    from benchmarks.backbones import register

    register()
    return timm.create_model("test_resnet" if tiny else name, num_classes=0, global_pool="")


def behind(name: str, tiny: bool) -> tuple[Network, Tensor]:
    """HORDE behind a trunk, and 16 images."""
    trunk = make_trunk(name, tiny)
    sizes = Sizes(16, 16, trunk.num_features, 64, 32 if tiny else 512, 5, 4)
    loss = LOSSES["HORDE, cascaded"](sizes)
    side = 32 if tiny else 128
    return Network(trunk, sizes.C, sizes.E, loss, vem=True), torch.randn(16, 3, side, side)


def loss_and_gradients(
    network: nn.Module,
    images: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    half: torch.dtype | None = None,
) -> list[Tensor]:
    """The loss of images, four per class, and its gradients for all parameters that have one."""
    network = copy.deepcopy(network).to(device, dtype)
    labels = torch.arange(len(images), device=device) // 4
    value = network(images.to(device, dtype), labels, half)
    gradients = torch.autograd.grad(value, list(network.parameters()), allow_unused=True)
    return [value.detach(), *(gradient for gradient in gradients if gradient is not None)]


def small_network(device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """A small network with a sum of losses in float64, the same in every process, and a batch for all of them."""
    torch.manual_seed(0)
    sizes = Sizes(48, 36, 16, 8, 32, 3, 12)
    trunk = nn.Sequential(nn.Conv2d(3, sizes.C, 3), nn.Tanh())
    names = ("binomial deviance", "HORDE, cascaded", "HORDE, sketch")
    names += ("JRS", "energy confusion", "VEM")
    terms = {name: LOSSES[name](sizes) for name in names}
    loss = ours.DistributedLoss(MultipleLosses(terms, weights=dict.fromkeys(terms, 1.0)))
    images = torch.randn(sizes.N, 3, 8, 8, dtype=torch.float64)
    network = Network(trunk, sizes.C, sizes.E, loss, vem=True).to(device, torch.float64)
    return network, images.to(device), (torch.arange(sizes.N) // 4).to(device)


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
        value = network(images.chunk(count)[rank], labels.chunk(count)[rank])
        value.backward()
        if rank == 0:
            found = [value.detach(), *(parameter.grad for parameter in network.parameters())]
            torch.save(found, f"{folder}/{backend}.pt")
        if count > 1:
            dist.barrier()
        dist.destroy_process_group()
