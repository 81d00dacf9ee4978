"""The regularizers and VEM's attention against plain torch."""

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import pml_regularizers as ours
from speed.case import Case
from speed.losses import make_trunk


def joint_similarity(case: Case) -> None:
    """JRS on the paper's three representations against its equations in plain torch."""
    M, widths = (8, (16, 8, 40)) if case.tiny else (120, (1024, 512, 11_318))
    labels = torch.arange(M, device=case.device) // 2
    pooled, embeddings, classes = (torch.randn(M, width, device=case.device) for width in widths)
    classes = F.normalize(classes)
    inputs = [x.requires_grad_() for x in (pooled, embeddings, classes)]
    mixture, gaussian = ours.GaussianMixtureKernel, ours.GaussianKernel
    regularizer = ours.JRSRegularizer(
        {"pooled": mixture(), "embeddings": mixture(normalize=True), "classes": gaussian()}
    )

    def jrs() -> tuple[Tensor, ...]:
        features = {"pooled": pooled, "classes": classes}
        return torch.autograd.grad(regularizer(embeddings, labels, features=features), inputs)

    def kernel(x: Tensor, scales: Sequence[float] = (0.5, 1, 2)) -> Tensor:
        squares = x.square().sum(dim=1)
        distances = (squares[:, None] + squares - 2 * (x @ x.T)).clamp(min=0)
        tau = distances.detach().sum() / (M * M - M)
        parts = [torch.exp(-distances / (tau * scale)) for scale in scales]
        return sum(parts[1:], parts[0]) / len(parts)

    def straightforward() -> tuple[Tensor, ...]:
        K = kernel(pooled) * kernel(F.normalize(embeddings)) * kernel(classes, [1])
        return torch.autograd.grad(K[labels[:, None] != labels].mean(), inputs)

    case.compare(
        "Joint representation similarity, forward and backward",
        f"{M} images, {widths[0]} pooled features, {widths[1]} embeddings, {widths[2]:,} classes, float32",
        {"squares of lengths and one product": straightforward, "JRSRegularizer": jrs},
        rounds=50,
    )


def energy_confusion(case: Case) -> None:
    """Energy confusion computed from class means, against all pairs of images."""
    N, C, E = (16, 4, 8) if case.tiny else (4096, 64, 512)
    x = torch.randn(N, E, device=case.device, requires_grad=True)
    labels = torch.arange(N, device=case.device) % C
    average = F.normalize(F.one_hot(labels).float(), p=1, dim=0)
    others = ~torch.eye(C, dtype=torch.bool, device=case.device)
    regularizer = ours.EnergyConfusionRegularizer()

    def pairs() -> tuple[Tensor, ...]:
        unit = F.normalize(x)
        energies = average.T @ torch.cdist(unit, unit).square() @ average
        return torch.autograd.grad(energies[others].log1p().mean(), x)

    case.compare(
        "Energy confusion, forward and backward",
        f"{N:,} embeddings of {E} in {C} classes, float32",
        {
            "cdist": pairs,
            "EnergyConfusionRegularizer": lambda: torch.autograd.grad(regularizer(x, labels), x),
        },
    )


def vem(case: Case) -> None:
    """The same network without VEM, with it, and with it folded into the linear layer."""
    N, size = (2, 64) if case.tiny else (8, 256)
    network = make_trunk("resnet50", case.tiny).to(case.device).eval()
    images = torch.randn(N, 3, size, size, device=case.device)
    plain = ours.EmbeddingHead(network.num_features, 512)
    gated = ours.EmbeddingHead(network.num_features, 512, attention=ours.VEMAttention)
    heads = {"without": plain, "VEM": gated, "VEM, folded": copy.deepcopy(gated).fold()}

    @torch.inference_mode()
    def embed(head: ours.EmbeddingHead) -> object:
        return head(network(images))

    case.compare(
        "VEM in inference with resnet50",
        f"{N} images of {size} x {size}, float32",
        {name: partial(embed, head.to(case.device).eval()) for name, head in heads.items()},
        rounds=25,
        memory=None,
    )
