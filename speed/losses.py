"""The losses that all cases compare, and networks that train by them."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import timm
import torch
from pytorch_metric_learning.losses import MultipleLosses
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor, nn
from torch.nn import functional as F

import pml_regularizers as ours
from benchmarks.backbones import register

TRUNKS = ("resnet50", "googlenet")


class Sizes(NamedTuple):
    """A batch of N images with maps of P positions and C channels, embeddings of E, K orders of d, and classes."""

    N: int
    P: int
    C: int
    E: int
    d: int
    K: int
    classes: int

    def default(self) -> "Sizes":
        """With the order and the width of HORDELoss's defaults."""
        return self._replace(K=3, d=min(self.d, 1024))


def horde(sizes: Sizes, **options: Any) -> nn.Module:
    defaults = {"order": sizes.K, "moment_dim": sizes.d, "projections": "cascaded"}
    return ours.HORDELoss(ours.BinomialDevianceLoss(), sizes.C, sizes.E, **{**defaults, **options})


ALONE = "binomial deviance"

LOSSES: Mapping[str, Callable[[Sizes], nn.Module]] = {
    ALONE: lambda _: ours.BinomialDevianceLoss(),
    "HORDE, sketch (default)": lambda s: horde(s.default(), projections="sketch"),
    "HORDE, cascaded": horde,
    "HORDE, recomputed": lambda s: horde(s, checkpoint=True),
    'HORDE, cascaded, matmul_dtype="bfloat16"': lambda s: horde(s, matmul_dtype="bfloat16"),
    "HORDE, random": lambda s: horde(s, projections="random"),
    "HORDE, sketch": lambda s: horde(s, projections="sketch"),
    "HORDE, sketch of d / 4": lambda s: horde(s._replace(d=s.d // 4), projections="sketch"),
    "powers of cosines": lambda _: ours.CosinePowersLoss(ours.BinomialDevianceLoss()),
    "JRS": lambda _: ours.JRSRegularizer(),
    "JRD": lambda s: ours.JRDLoss(s.classes, s.E),
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


def labels_of(batch: Tensor) -> Tensor:
    """Four images per class."""
    return torch.arange(len(batch), device=batch.device) // 4


def value_and_gradients(
    loss: nn.Module,
    inputs: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    half: torch.dtype | None = None,
    scale: float = 1.0,
) -> list[Tensor]:
    """The value of a loss and its gradients for parameters and inputs.

    Args:
        dtype: Precision of the loss, and of the inputs if `half` is None.
        half: Precision of the inputs and of an autocast around the loss.
        scale: Factor of the value before the backward pass, as of a `GradScaler`; the gradients are divided by it.
    """
    loss = copy.deepcopy(loss).to(device, dtype)
    leaves = {
        name: x.to(device, half or dtype, copy=True).requires_grad_() for name, x in inputs.items()
    }
    names = getattr(loss, "feature_names", ())
    features: dict[str, Any] = {name: leaves.get(name) for name in names}
    if "attention" in features:
        features["attention"] = leaves["pooled"], leaves["predicted"]
    x, options = leaves["embeddings"], {"features": features} if names else {}
    with torch.autocast(device.type, half, enabled=half is not None):
        value = loss(x, labels_of(x), **options)
    return _with_gradients(value, [*loss.parameters(), *leaves.values()], scale)


def _with_gradients(value: Tensor, leaves: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    gradients = torch.autograd.grad(value * scale, leaves, allow_unused=True)
    return [value.detach(), *(x.double() / scale for x in gradients if x is not None)]


class Network(nn.Module):
    """A trunk, a head, and a loss of what they return: VEM's has its gate in the head."""

    def __init__(self, trunk: nn.Module, sizes: Sizes, loss: nn.Module, vem: bool) -> None:
        super().__init__()
        attention = ours.VEMAttention if vem else None
        self.trunk = trunk
        self.head = ours.EmbeddingHead(sizes.C, sizes.E, attention=attention)
        self.loss = ours.attach_all(loss, self.head)

    def forward(self, images: Tensor, labels: Tensor, half: torch.dtype | None = None) -> Tensor:
        with torch.autocast(images.device.type, half, enabled=half is not None):
            embeddings = self.head(self.trunk(images))
        value: Tensor = self.loss(embeddings, labels)
        return value


def with_method(trunk: nn.Module, sizes: Sizes, name: str) -> Network:
    """A network with one of the losses; regularizers stand beside binomial deviance."""
    loss = LOSSES[name](sizes)
    if isinstance(loss, BaseRegularizer):
        loss = MultipleLosses([ours.BinomialDevianceLoss(), loss])
    return Network(trunk, sizes, loss, vem=name == "VEM")


def make_trunk(name: str, tiny: bool) -> Any:
    """A network of timm, or its tiny stand-in, without pooling and classifier."""
    register()
    return timm.create_model("test_resnet" if tiny else name, num_classes=0, global_pool="")


def horde_behind(name: str, tiny: bool) -> tuple[Network, Tensor]:
    """HORDE behind a trunk, and 16 images."""
    trunk = make_trunk(name, tiny)
    sizes = Sizes(16, 16, trunk.num_features, 64, 32 if tiny else 512, 5, 4)
    side = 32 if tiny else 128
    return Network(trunk, sizes, horde(sizes), vem=True), torch.randn(16, 3, side, side)


def loss_and_gradients(
    network: nn.Module,
    images: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    half: torch.dtype | None = None,
) -> list[Tensor]:
    """The loss of images, and its gradients for all parameters that have one."""
    network = copy.deepcopy(network).to(device, dtype)
    images = images.to(device, dtype)
    return _with_gradients(network(images, labels_of(images), half), list(network.parameters()))
