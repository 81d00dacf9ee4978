"""Cases of `python -m benchmarks.speed`, at the papers' sizes or at tiny ones."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import timm
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor
from torch.nn import functional as F

import pml_regularizers as ours
from benchmarks.speed.measuring import Comparison, process_bytes
from benchmarks.speed.steps import FEW, training_step


def moments(maps: Tensor, K: int, d: int, **options: Any) -> Callable[[], object]:
    """HORDE's moments, forward and backward, with the gradients of those projections that train."""
    options = {"projections": "cascaded", **options}
    module = ours.HighOrderMoments(maps.shape[1], order=K, moment_dim=d, scale=False, **options)
    inputs = [maps, *module.to(maps.device).parameters()]
    gradients = [torch.randn(len(maps), d, device=maps.device) for _ in range(K - 1)]
    return lambda: torch.autograd.grad(module(maps), inputs, gradients)


def horde_moments(tiny: bool, device: torch.device) -> Comparison:
    """HORDE's moments against their matrix products alone."""
    N, side, C, d, K = (3, 2, 16, 300, 3) if tiny else (40, 8, 1024, 8192, 5)
    maps = torch.randn(N, C, side, side, device=device, requires_grad=True)
    x = torch.randn(N * side**2, C, device=device)
    weights = torch.randn(K, C, d, device=device)
    out, gradient = torch.randn(2, len(x), d, device=device)
    dx, dw = torch.empty_like(x), torch.empty_like(weights[0])

    def products() -> None:
        for weight in weights:
            torch.mm(x, weight, out=out)
        for weight in weights:
            torch.mm(gradient, weight.T, out=dx)
            torch.mm(x.T, gradient, out=dw)

    row = partial(moments, maps, K, d)
    return Comparison(
        "HORDE's moments, forward and backward",
        f"{N} maps of {side} x {side} x {C}, {K} orders of {d}, float32",
        {"matrix products alone": products} | {"stored": row(), "recomputed": row(checkpoint=True)},
    )


def horde_sketches(checkpoint: bool, tiny: bool, device: torch.device) -> Comparison:
    """HORDE's moments by tensor sketches against fixed matrices, with the same kind of backward pass."""
    N, side, C, d, K = (3, 2, 16, 64, 3) if tiny else (40, 8, 1024, 8192, 5)
    maps = torch.randn(N, C, side, side, device=device, requires_grad=True)
    row = partial(moments, maps, K, checkpoint=checkpoint)
    return Comparison(
        f"HORDE's moments by sketches, {'recomputed' if checkpoint else 'stored'}, forward and backward",
        f"{N} maps of {side} x {side} x {C}, {K} orders, float32",
        {
            f"random, d = {d:,}": row(d, projections="random"),
            f"sketch, d = {d // 4:,}": row(d // 4, projections="sketch"),
            f"sketch, d = {d:,}": row(d, projections="sketch"),
        },
    )


def horde_sketches_by_autograd(tiny: bool, device: torch.device) -> Comparison:
    """The recommended moments, orders 2 and 3 by sketches, against the same operations left to autograd."""
    N, side, C, d, K = (3, 2, 16, 64, 3) if tiny else (32, 8, 1024, 1024, 3)
    maps = torch.randn(N, C, side, side, device=device, requires_grad=True)
    module = ours.HighOrderMoments(C, order=K, moment_dim=d, scale=False)
    # One entry, -1 or +1, per channel; row 0 of the sums is for places without a channel.
    tables = torch.stack(module.to(device).weights()).flatten(1).long()
    gradients = [torch.randn(N, d, device=device) for _ in range(K - 1)]

    def by_autograd() -> tuple[Tensor, ...]:
        x = maps.flatten(2).transpose(1, 2)
        x = x / x.detach().square().mean(dim=(1, 2), keepdim=True).sqrt()
        padded = F.pad(x, (1, 0))
        phi, moments = 1, []
        for table in tables:
            sketch = (padded[..., table.abs()] * table.sign()).unflatten(2, (d, -1)).sum(dim=3)
            phi = phi * torch.fft.rfft(sketch)
            moments.append(torch.fft.irfft(phi.mean(dim=1), n=d))
        return torch.autograd.grad(moments[1:], maps, gradients)

    row = partial(moments, maps, K, d, projections="sketch")
    return Comparison(
        "HORDE's moments by sketches against autograd, forward and backward",
        f"{N} maps of {side} x {side} x {C}, {K} orders of {d}, float32",
        {"autograd": by_autograd, "stored": row(), "recomputed": row(checkpoint=True)},
    )


def joint_similarity(tiny: bool, device: torch.device) -> Comparison:
    """JRS on the paper's three representations against its equations in plain torch."""
    M, widths = (8, (16, 8, 40)) if tiny else (120, (1024, 512, 11_318))
    labels = torch.arange(M, device=device) // 2
    pooled, embeddings, classes = (torch.randn(M, width, device=device) for width in widths)
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

    return Comparison(
        "Joint representation similarity, forward and backward",
        f"{M} images, {widths[0]} pooled features, {widths[1]} embeddings, {widths[2]:,} classes, float32",
        {"squares of lengths and one product": straightforward, "JRSRegularizer": jrs},
        rounds=50,
    )


def energy_confusion(tiny: bool, device: torch.device) -> Comparison:
    """Energy confusion computed from class means, against all pairs of images."""
    N, C, E = (16, 4, 8) if tiny else (4096, 64, 512)
    x = torch.randn(N, E, device=device, requires_grad=True)
    labels = torch.arange(N, device=device) % C
    average = F.normalize(F.one_hot(labels).float(), p=1, dim=0)
    others = ~torch.eye(C, dtype=torch.bool, device=device)
    regularizer = ours.EnergyConfusionRegularizer()

    def pairs() -> tuple[Tensor, ...]:
        unit = F.normalize(x)
        energies = average.T @ torch.cdist(unit, unit).square() @ average
        return torch.autograd.grad(energies[others].log1p().mean(), x)

    return Comparison(
        "Energy confusion, forward and backward",
        f"{N:,} embeddings of {E} in {C} classes, float32",
        {
            "cdist": pairs,
            "EnergyConfusionRegularizer": lambda: torch.autograd.grad(regularizer(x, labels), x),
        },
    )


def vem(tiny: bool, device: torch.device) -> Comparison:
    """The same network without VEM, with it, and with it folded into the linear layer."""
    N, size, trunk = (2, 64, "test_resnet") if tiny else (8, 256, "resnet50")
    network: Any = timm.create_model(trunk, num_classes=0, global_pool="").to(device).eval()
    images = torch.randn(N, 3, size, size, device=device)
    plain = ours.EmbeddingHead(network.num_features, 512)
    gated = ours.EmbeddingHead(network.num_features, 512, attention=ours.VEMAttention)
    heads = {"without": plain, "VEM": gated, "VEM, folded": copy.deepcopy(gated).fold()}

    @torch.inference_mode()
    def embed(head: ours.EmbeddingHead) -> object:
        return head(network(images))

    return Comparison(
        f"VEM in inference with {trunk}",
        f"{N} images of {size} x {size}, float32",
        {name: partial(embed, head.to(device).eval()) for name, head in heads.items()},
        rounds=25,
        memory=None,
    )


def retrieval(
    dataset: str, n: int, queries: int, classes: int, tiny: bool, device: torch.device
) -> Comparison:
    """Accuracies on a test set: of each image among all others, or of some queries among the rest."""
    width = 512
    if tiny:
        n, queries, classes, width = 60, 60 if queries == n else 20, 12, 8
    labels = torch.arange(n) % classes
    vectors = F.normalize(torch.randn(classes, width)[labels] + 1.5 * torch.randn(n, width))
    size, parts, rounds = f"{n:,}", [vectors, labels], 1
    if queries < n:
        size, rounds = f"{queries:,} against {n - queries:,}", 3
        parts = [vectors[:queries], labels[:queries], vectors[queries:], labels[queries:]]
    names = ("mean_average_precision_at_r", "r_precision")
    recalls = (1, 10, 100, 1000)  # PML's calculator has only the first
    k = min(1000, n - 1)
    by_lists = AccuracyCalculator(("precision_at_1", *names), k=k, device=labels.device)
    by_ranks = ours.RankAccuracyCalculator(
        (*names, *(f"recall_at_{K}" for K in recalls)), device=device, recall_at=recalls
    )
    on_device: list[Any] = [part.to(device) for part in parts]
    return Comparison(
        f"Recall@1, 10, 100, 1000, MAP@R and R-precision: {dataset}",
        f"{size} vectors of {width} in {classes:,} classes, random ones around random centres",
        {
            "PML's AccuracyCalculator, k = 1000": partial(by_lists.get_accuracy, *parts),
            "RankAccuracyCalculator": partial(by_ranks.get_accuracy, *on_device),
        },
        rounds=rounds,
        memory=process_bytes,
    )


PHOTOGRAPHS: dict[str, Any] = {"side": 128, "order": 3, "d": 1024, "embedding": 128}
PHOTOGRAPHS["frozen_stages"] = 6  # as the recipes photographs/frozen train

CASES: Mapping[str, Callable[[bool, torch.device], Comparison]] = {
    "horde_moments": horde_moments,
    "horde_sketch_stored": partial(horde_sketches, False),
    "horde_sketch_recomputed": partial(horde_sketches, True),
    "horde_sketch_autograd": horde_sketches_by_autograd,
    "horde_resnet50": partial(training_step, "resnet50", 40, FEW),
    "horde_googlenet": partial(training_step, "googlenet", 40, FEW),
    "methods_resnet50": partial(training_step, "resnet50", 8, ()),
    "methods_googlenet": partial(training_step, "googlenet", 8, ()),
    "methods_photographs": partial(training_step, "tf_efficientnet_lite0", 32, (), **PHOTOGRAPHS),
    "joint_similarity": joint_similarity,
    "energy_confusion": energy_confusion,
    "vem": vem,
    "retrieval": partial(retrieval, "Stanford Online Products", 60_502, 60_502, 11_316),
    "query_gallery": partial(retrieval, "In-Shop", 26_830, 14_218, 3_985),
}
