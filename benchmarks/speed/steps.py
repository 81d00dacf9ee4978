"""Training steps to compare: of a head and a loss on given inputs, and of whole networks with each method."""

from collections.abc import Callable, Sequence
from typing import Any

import timm
import torch
from pytorch_metric_learning.losses import MultipleLosses
from torch import nn

from benchmarks.backbones import register
from benchmarks.speed.measuring import Comparison
from pml_regularizers import (
    BinomialDevianceLoss,
    EmbeddingHead,
    EnergyConfusionRegularizer,
    HORDELoss,
    JRSRegularizer,
    VarianceRegularizer,
    VEMAttention,
    attach_all,
)

Device = torch.device

Step = Callable[[], object]

EMBEDDING = 512  # E, where it is no size of a method

ALONE = "binomial deviance alone"
NARROW = "HORDE, sketch of d / 4"


def training_step(trunk: nn.Module, head: EmbeddingHead, loss: nn.Module, inputs: Any) -> Step:
    """Forward, backward and Adam; 4 images per class; on a GPU the network in bfloat16, the loss in TF32."""
    head, loss = head.to(inputs.device), loss.to(inputs.device)
    labels = torch.arange(len(inputs), device=inputs.device) // 4
    parameters = [*trunk.parameters(), *head.parameters(), *loss.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-6)

    def run() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if inputs.is_cuda else "highest")
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
            embeddings = head(trunk(inputs))
        loss(embeddings, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.set_float32_matmul_precision(before)

    run()  # Adam's state is there before memory is counted
    return run


def network_steps(
    trunk_name: str, images: int, tiny: bool, device: Device, methods: Sequence[str] | None = None
) -> Comparison:
    """A step of a network with a metric loss alone, and with each method or the `methods` of these names."""
    if tiny:
        trunk_name, images = "test_resnet", 2
    side, d = (64, 64) if tiny else (256, 8192)
    register()
    trunk = timm.create_model(trunk_name, num_classes=0, global_pool="").to(device)
    pixels = torch.randn(images, 3, side, side, device=device)

    def horde(d: int = d, **options: Any) -> Callable[[nn.Module], nn.Module]:
        C = trunk.num_features
        return lambda loss: HORDELoss(loss, C, EMBEDDING, moment_dim=d, **options)

    def beside(regularizer: type[nn.Module]) -> Callable[[nn.Module], nn.Module]:
        return lambda loss: MultipleLosses([loss, regularizer()])

    losses = {
        ALONE: lambda loss: loss,
        "HORDE, stored": horde(),
        "HORDE, recomputed": horde(activations="recompute"),
        "HORDE, fixed projections": horde(projections="random"),
        "HORDE, sketch": horde(projections="sketch"),
        NARROW: horde(d // 4, projections="sketch"),
        "energy confusion": beside(EnergyConfusionRegularizer),
        "VEM": beside(VarianceRegularizer),
        "JRS of pooled features and embeddings": beside(JRSRegularizer),
    }

    def step(name: str) -> Step:
        attention = VEMAttention if name == "VEM" else None
        head = EmbeddingHead.for_trunk(trunk, EMBEDDING, attention=attention)
        loss = losses[name](BinomialDevianceLoss())
        attach_all(loss, head)
        return training_step(trunk, head, loss, pixels)

    precision = "trunk in bfloat16, moments in TF32" if device.type == "cuda" else "float32"
    return Comparison(
        f"A training step of {trunk_name}",
        f"{images} images of {side} px, HORDE with K = 5 and d = {d:,}, {precision}",
        {name: step(name) for name in (methods or losses)},
    )
