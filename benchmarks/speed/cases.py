"""Cases of `python -m benchmarks.speed`, at the papers' sizes or at tiny ones."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import timm
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor
from torch.nn import functional as F

from benchmarks.speed import steps
from benchmarks.speed.measuring import Comparison, Target, process_bytes
from benchmarks.speed.steps import ALONE, NARROW, Device, network_steps
from pml_regularizers import (
    EmbeddingHead,
    EnergyConfusionRegularizer,
    GaussianKernel,
    GaussianMixtureKernel,
    HighOrderMoments,
    JRSRegularizer,
    RankAccuracyCalculator,
    VEMAttention,
)
from pml_regularizers._summed_products import Activations
from pml_regularizers.moments import Projections


def horde_moments(tiny: bool, device: Device) -> Comparison:
    """HORDE's moments against their matrix products alone."""
    N, P, C, d, K = (3, 4, 16, 300, 3) if tiny else (40, 64, 1024, 8192, 5)
    side = int(P**0.5)
    feature_map = torch.randn(N, C, side, side, device=device, requires_grad=True)
    x = feature_map.detach().flatten(2).transpose(1, 2).reshape(N * P, C)
    gradients = [torch.randn(N, d, device=device) for _ in range(K - 1)]
    options: dict[str, Any] = {"order": K, "moment_dim": d, "scale": False}
    modules = {
        activations: HighOrderMoments(C, activations=activations, **options).to(device)
        for activations in ("autograd", "store", "recompute")
    }
    weights = [weight.detach() for weight in modules["store"].weights()]
    out, gradient = torch.randn(2, N * P, d, device=device)
    dx, dw = torch.empty_like(x), torch.empty_like(weights[0])

    def products() -> None:
        for weight in weights:
            torch.mm(x, weight, out=out)
        for weight in weights:
            torch.mm(gradient, weight.T, out=dx)
            torch.mm(x.T, gradient, out=dw)

    def moments(module: HighOrderMoments) -> tuple[Tensor, ...]:
        inputs = [feature_map, *module.parameters()]
        return torch.autograd.grad(module(feature_map), inputs, gradients)

    on_gpu = device.type == "cuda"
    return Comparison(
        "HORDE's moments, forward and backward",
        f"{N} maps of {side} x {side} x {C}, {K} orders of {d}, float32",
        {
            "matrix products alone": products,
            **{name: partial(moments, module) for name, module in modules.items()},
        },
        memory_against="autograd",
        targets={
            "store": Target(1.15 if on_gpu else 1.10, 2 / 3),
            "recompute": Target(1.45 if on_gpu else 1.35, 1 / 16 if on_gpu else 1 / 8),
        },
    )


def _horde_sketches(activations: Activations, tiny: bool, device: Device) -> Comparison:
    """HORDE's moments by tensor sketches against fixed matrices, with the same kind of backward pass."""
    N, P, C, d, K = (3, 4, 16, 64, 3) if tiny else (40, 64, 1024, 8192, 5)
    side = int(P**0.5)
    feature_map = torch.randn(N, C, side, side, device=device, requires_grad=True)

    def moments(module: HighOrderMoments, gradients: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(feature_map), feature_map, gradients)

    def candidate(projections: Projections, width: int) -> Callable[[], object]:
        module = HighOrderMoments(
            C,
            order=K,
            moment_dim=width,
            projections=projections,
            activations=activations,
            scale=False,
        )
        gradients = [torch.randn(N, width, device=device) for _ in range(K - 1)]
        return partial(moments, module.to(device), gradients)

    first, narrow, wide = f"random, d = {d:,}", f"sketch, d = {d // 4:,}", f"sketch, d = {d:,}"
    return Comparison(
        f"HORDE's moments by sketches, {activations}, forward and backward",
        f"{N} maps of {side} x {side} x {C}, {K} orders, float32",
        {
            first: candidate("random", d),
            narrow: candidate("sketch", d // 4),
            wide: candidate("sketch", d),
        },
        memory_against=first,
        targets={narrow: Target(1 / 10, 1 / 4), wide: Target(1 / 3, 1.0)},
    )


horde_sketch_stored = partial(_horde_sketches, "store")
horde_sketch_recomputed = partial(_horde_sketches, "recompute")


def _horde_step(trunk: str, tiny: bool, device: Device) -> Comparison:
    """A step of the optimizer with HORDE against the same step without."""
    methods = (ALONE, "HORDE, stored", "HORDE, sketch", NARROW)
    on_gpu = device.type == "cuda"
    return replace(
        network_steps(trunk, 40, tiny, device, methods),
        memory_against=ALONE,
        targets={methods[1]: Target(1.15)} if on_gpu else {NARROW: Target(1.10)},
        rounds=7 if on_gpu else 3,
    )


horde_resnet50 = partial(_horde_step, "resnet50")
horde_googlenet = partial(_horde_step, "googlenet")
parts_resnet50 = partial(steps.step_parts, "resnet50")
parts_googlenet = partial(steps.step_parts, "googlenet")


def joint_similarity(tiny: bool, device: Device) -> Comparison:
    """JRS on the paper's three representations against its equations in plain torch."""
    M, widths = (8, (16, 8, 40)) if tiny else (120, (1024, 512, 11_318))
    labels = torch.arange(M, device=device) // 2
    pooled, embeddings, classes = (torch.randn(M, width, device=device) for width in widths)
    classes = F.normalize(classes)
    inputs = [x.requires_grad_() for x in (pooled, embeddings, classes)]
    regularizer = JRSRegularizer(
        {
            "pooled": GaussianMixtureKernel(),
            "embeddings": GaussianMixtureKernel(normalize=True),
            "classes": GaussianKernel(),
        }
    )
    features = {"pooled": pooled, "classes": classes}

    def ours() -> tuple[Tensor, ...]:
        return torch.autograd.grad(regularizer(embeddings, labels, features=features), inputs)

    def straightforward() -> tuple[Tensor, ...]:
        K = _mixture(pooled, 3) * _mixture(F.normalize(embeddings), 3) * _mixture(classes, 1)
        return torch.autograd.grad(K[labels[:, None] != labels].mean(), inputs)

    return Comparison(
        "Joint representation similarity, forward and backward",
        f"{M} images, {widths[0]} pooled features, {widths[1]} embeddings, {widths[2]:,} classes, float32",
        {"squares of lengths and one product": straightforward, "JRSRegularizer": ours},
        memory_against="squares of lengths and one product",
        targets={"JRSRegularizer": Target(1.0)},
        rounds=50,
    )


def _mixture(x: Tensor, components: int) -> Tensor:
    n, squares = len(x), x.square().sum(dim=1)
    distances = (squares[:, None] + squares - 2 * (x @ x.T)).clamp(min=0)
    tau = distances.detach().sum() / (n * n - n)
    parts = [
        torch.exp(-distances / (tau * 2.0 ** (k - components // 2))) for k in range(components)
    ]
    return sum(parts[1:], parts[0]) / components


def energy_confusion(tiny: bool, device: Device) -> Comparison:
    """Energy confusion computed from class means, against all pairs of images."""
    N, C, E = (16, 4, 8) if tiny else (4096, 64, 512)
    x = torch.randn(N, E, device=device, requires_grad=True)
    labels = torch.arange(N, device=device) % C
    members = F.one_hot(labels).float()
    average = members / members.sum(dim=0)
    others = ~torch.eye(C, dtype=torch.bool, device=device)
    regularizer = EnergyConfusionRegularizer(gradient="all")

    def pairs() -> tuple[Tensor, ...]:
        unit = F.normalize(x)
        energies = average.T @ torch.cdist(unit, unit).square() @ average
        return torch.autograd.grad(energies[others].log1p().mean(), x)

    def ours() -> tuple[Tensor, ...]:
        return torch.autograd.grad(regularizer(x, labels), x)

    return Comparison(
        "Energy confusion, forward and backward",
        f"{N:,} embeddings of {E} in {C} classes, float32",
        {"cdist": pairs, "EnergyConfusionRegularizer": ours},
        memory_against="cdist",
        targets={"EnergyConfusionRegularizer": Target(0.1)},
    )


def vem(tiny: bool, device: Device) -> Comparison:
    """The same network without VEM, with it, and with it folded into the linear layer."""
    N, size, trunk = (2, 64, "test_resnet") if tiny else (8, 256, "resnet50")
    network = timm.create_model(trunk, num_classes=0, global_pool="").to(device).eval()
    images = torch.randn(N, 3, size, size, device=device)
    heads = {
        "without": EmbeddingHead(network.num_features, 512),
        "VEM": EmbeddingHead(network.num_features, 512, attention=VEMAttention),
    }
    heads["VEM, folded"] = copy.deepcopy(heads["VEM"]).fold()

    def embed(head: EmbeddingHead) -> Tensor:
        with torch.inference_mode():
            result: Tensor = head(network(images))
        return result

    return Comparison(
        f"VEM in inference with {trunk}",
        f"{N} images of {size} x {size}, float32",
        {name: partial(embed, head.to(device).eval()) for name, head in heads.items()},
        targets={"VEM": Target(1.01), "VEM, folded": Target(1.0)},
        rounds=25,
    )


def _retrieval(
    dataset: str, n: int, queries: int, classes: int, tiny: bool, device: Device
) -> Comparison:
    """Accuracies on a test set: of each image among all others, or of some queries among the rest."""
    width = 512
    if tiny:
        n, queries, classes, width = 60, 60 if queries == n else 20, 12, 8
    centres = torch.randn(classes, width)
    labels = torch.arange(n) % classes
    vectors = F.normalize(centres[labels] + 1.5 * torch.randn(n, width))
    on_gpu, cpu = device.type == "cuda", torch.device("cpu")
    size, parts = f"{n:,}", [vectors, labels]
    if queries < n:
        size = f"{queries:,} against {n - queries:,}"
        parts = [vectors[:queries], labels[:queries], vectors[queries:], labels[queries:]]
    theirs, ours = "PML's AccuracyCalculator, k = 1000", "RankAccuracyCalculator"
    names = ("precision_at_1", "mean_average_precision_at_r", "r_precision")
    recalls = (1, 10, 100, 1000)  # PML's calculator has only the first
    by_lists = AccuracyCalculator(names, k=min(1000, n - 1), device=cpu)
    by_ranks = RankAccuracyCalculator(
        (*names[1:], *(f"recall_at_{K}" for K in recalls)), device=device, recall_at=recalls
    )
    return Comparison(
        f"Recall@1, 10, 100, 1000, MAP@R and R-precision: {dataset}",
        f"{size} vectors of {width} in {classes:,} classes, random ones around random centres",
        {
            theirs: partial(by_lists.get_accuracy, *parts),
            ours: partial(by_ranks.get_accuracy, *(part.to(device) for part in parts)),
        },
        memory_against=theirs,
        targets={ours: Target(1 / 3 if on_gpu else 1.0, 1 / 8)},
        rounds=1 if queries == n else 3,
        memory=process_bytes,
    )


retrieval = partial(_retrieval, "Stanford Online Products", 60_502, 60_502, 11_316)
query_gallery = partial(_retrieval, "In-Shop", 26_830, 14_218, 3_985)
