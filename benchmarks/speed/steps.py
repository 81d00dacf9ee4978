"""Training steps to compare: of a head and a loss on given inputs, or of a whole network with each method."""

from collections.abc import Callable, Sequence
from typing import Any

import timm
import torch
from pytorch_metric_learning.losses import MultipleLosses
from torch import Tensor, nn
from torch.nn import functional as F

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

EMBEDDING = 512  # E, unless it is one of the sizes that vary

ALONE = "binomial deviance alone"
NARROW = "HORDE, sketch of d / 4"


def training_step(trunk: nn.Module, head: EmbeddingHead, loss: nn.Module, inputs: Any) -> Step:
    """A step of forward pass, backward pass and Adam, with 4 images per class.

    On a GPU the network runs in bfloat16 and the loss in TF32.
    """
    head, loss = head.to(inputs.device), loss.to(inputs.device)
    labels = torch.arange(len(inputs), device=inputs.device) // 4
    parameters = [*trunk.parameters(), *head.parameters(), *loss.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-6)

    def run() -> None:
        with _half(inputs):
            embeddings = head(trunk(inputs))
        loss(embeddings, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    _in_tf32(run)()  # makes Adam's state before memory is counted
    return _in_tf32(run)


def _half(inputs: Any) -> torch.autocast:
    return torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda)


def _in_tf32(run: Step) -> Step:
    """The same step; on a GPU, matrix products may run in TF32."""

    def inside() -> object:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if torch.cuda.is_available() else "highest")
        try:
            return run()
        finally:
            torch.set_float32_matmul_precision(before)

    return inside


def network_steps(
    trunk_name: str, images: int, tiny: bool, device: Device, methods: Sequence[str] | None = None
) -> Comparison:
    """Steps of a network with the metric loss alone and with each method, or with those named in `methods`."""
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


def step_parts(trunk_name: str, tiny: bool, device: Device) -> Comparison:
    """A step of a network with HORDE, and each of its parts; on a GPU in the precisions of `training_step`."""
    side, d, images = (64, 64, 8) if tiny else (256, 8192, 40)
    register()
    name = "test_resnet" if tiny else trunk_name
    trunk = timm.create_model(name, num_classes=0, global_pool="").to(device)
    head = EmbeddingHead.for_trunk(trunk, EMBEDDING)
    horde = HORDELoss(BinomialDevianceLoss(), trunk.num_features, EMBEDDING, moment_dim=d)
    pixels = torch.randn(images, 3, side, side, device=device)
    labels = torch.arange(images, device=device) // 4
    whole = training_step(trunk, head, horde.attach(head), pixels)
    with torch.no_grad():
        maps = trunk(pixels)
    maps = torch.randn_like(maps, requires_grad=True)
    vectors = [torch.randn(images, EMBEDDING, device=device, requires_grad=True)]
    vectors += [torch.randn(images, d, device=device, requires_grad=True) for _ in horde.embeddings]
    network = [*trunk.parameters(), *head.parameters()]
    copies = [nn.Parameter(p.detach().clone()) for p in (*network, *horde.parameters())]
    for parameter in copies:
        parameter.grad = torch.zeros_like(parameter)

    def alone(forward: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Step:
        def run() -> object:
            found = forward()
            return torch.autograd.grad(found, inputs, [torch.ones_like(x) for x in found])

        return _in_tf32(run)

    def embed() -> list[Tensor]:
        with _half(pixels):
            found = head(trunk(pixels))
        horde.clear()
        return [found]

    embedded = [*vectors, *horde.embeddings.parameters()]

    def losses() -> list[Tensor]:
        embeddings = (
            F.normalize(e(z)) for e, z in zip(horde.embeddings.values(), vectors[1:], strict=True)
        )
        both = zip(horde.losses.values(), [vectors[0], *embeddings], strict=True)
        return [loss(vector, labels) for loss, vector in both]

    return Comparison(
        f"The parts of a training step of {name}",
        f"{images} images of {side} px, HORDE with K = {horde.order} and d = {d:,}, stored; each part alone, "
        "forward and backward",
        {
            "the whole step": whole,
            "trunk and head": alone(embed, network),
            "moments": alone(lambda: horde.moments(maps), [maps, *horde.moments.parameters()]),
            "losses of all orders, with their embeddings": alone(losses, embedded),
            "Adam's update": torch.optim.Adam(copies, lr=1e-6).step,
        },
        rounds=3,
    )
