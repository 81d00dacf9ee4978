"""Networks with the library's losses, for the parts of `make gpu`."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pytorch_metric_learning.losses import MultipleLosses
from torch import Tensor, nn

import pml_regularizers as ours

TERMS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "HORDE": lambda C, E, d: ours.HORDELoss(
        ours.BinomialDevianceLoss(), C, E, projections="cascaded", order=5, moment_dim=d
    ),
    "JRS": lambda *_: ours.JRSRegularizer(),
    "energy confusion": lambda *_: ours.EnergyConfusionRegularizer(),
    "VEM": lambda *_: ours.VarianceRegularizer(),
}


class Objective(nn.Module):
    """A trunk, a head with VEM, and a sum of losses; returns the loss of the images of all processes."""

    def __init__(self, trunk: nn.Module, C: int, terms: Sequence[str], E: int, d: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ours.EmbeddingHead(C, E, attention=ours.VEMAttention)
        losses = {name.replace(" ", "_"): TERMS[name](C, E, d) for name in terms}
        self.loss = ours.DistributedLoss(MultipleLosses(losses, weights=dict.fromkeys(losses, 1.0)))
        ours.attach_all(self.loss.loss, self.head)

    def forward(self, images: Tensor, labels: Tensor, half: torch.dtype | None = None) -> Tensor:
        with torch.autocast(images.device.type, half, enabled=half is not None):
            embeddings = self.head(self.trunk(images))
        value: Tensor = self.loss(embeddings, labels)
        return value


def loss_and_gradients(
    network: nn.Module, images: Tensor, device: torch.device, dtype: torch.dtype, half: Any = None
) -> list[Tensor]:
    """The loss of images, four per class, and its gradients for all parameters that have one."""
    network = copy.deepcopy(network).to(device, dtype)
    labels = torch.arange(len(images), device=device) // 4
    value = network(images.to(device, dtype), labels, half)
    gradients = torch.autograd.grad(value, list(network.parameters()), allow_unused=True)
    return [value, *(gradient for gradient in gradients if gradient is not None)]


def behind(name: str, tiny: bool) -> tuple[nn.Module, Tensor]:
    """HORDE behind this trunk, and 16 images."""
    import timm

    from benchmarks.backbones import register

    register()
    name, side, d = ("test_resnet", 32, 32) if tiny else (name, 128, 512)
    trunk = timm.create_model(name, num_classes=0, global_pool="")
    return Objective(trunk, trunk.num_features, ["HORDE"], 64, d), torch.randn(16, 3, side, side)
