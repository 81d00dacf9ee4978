"""Cases of `python -m benchmarks.speed`, at the papers' sizes or at tiny ones."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
import torch
from pytorch_metric_learning.losses import MultipleLosses
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.backbones import register
from benchmarks.building import FrozenStages
from benchmarks.speed.measuring import Comparison, Target, process_bytes
from pml_regularizers import (
    BinomialDevianceLoss,
    EmbeddingHead,
    EnergyConfusionRegularizer,
    GaussianKernel,
    GaussianMixtureKernel,
    HighOrderMoments,
    HORDELoss,
    JRSRegularizer,
    RankAccuracyCalculator,
    VarianceRegularizer,
    VEMAttention,
    attach_all,
)
from pml_regularizers._summed_products import Activations
from pml_regularizers.moments import Projections

Device = torch.device

ALONE, NARROW = "binomial deviance alone", "HORDE, sketch of d / 4"


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


def horde_sketches(activations: Activations, tiny: bool, device: Device) -> Comparison:
    """HORDE's moments by tensor sketches against fixed matrices, with the same kind of backward pass."""
    N, P, C, d, K = (3, 4, 16, 64, 3) if tiny else (40, 64, 1024, 8192, 5)
    side = int(P**0.5)
    feature_map = torch.randn(N, C, side, side, device=device, requires_grad=True)

    def candidate(projections: Projections, width: int) -> Callable[[], object]:
        options: dict[str, Any] = {"projections": projections, "activations": activations}
        module = HighOrderMoments(C, order=K, moment_dim=width, scale=False, **options).to(device)
        gradients = [torch.randn(N, width, device=device) for _ in range(K - 1)]
        return lambda: torch.autograd.grad(module(feature_map), feature_map, gradients)

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


@dataclass(frozen=True)
class Sizes:
    """Sizes of a training step: those of HORDE's paper, or others; with frozen stages, whose outputs are kept."""

    images: int
    side: int = 256
    order: int = 5
    d: int = 8192
    embedding: int = 512
    frozen_stages: int = 0


def network_steps(
    trunk_name: str, sizes: Sizes, tiny: bool, device: Device, methods: Sequence[str] = ()
) -> Comparison:
    """Steps of a network with the metric loss alone and with each method, or with those named.

    A step is a forward pass, a backward pass and Adam, with 4 images per class. On a GPU, or with frozen stages,
    the network runs in bfloat16; on a GPU the loss runs in TF32.
    """
    if tiny:
        trunk_name = "test_resnet"
        sizes = replace(sizes, images=2, side=64, d=64, frozen_stages=min(1, sizes.frozen_stages))
    d, side = sizes.d, sizes.side
    register()
    trunk = timm.create_model(trunk_name, num_classes=0, global_pool="").to(device)
    inputs = torch.randn(sizes.images, 3, side, side, device=device)
    labels = torch.arange(sizes.images, device=device) // 4
    on_gpu = device.type == "cuda"
    half = on_gpu or sizes.frozen_stages > 0
    features: Callable[[Tensor], Tensor] = trunk
    if sizes.frozen_stages:
        stages = FrozenStages(trunk, sizes.frozen_stages, inputs)
        features, inputs = stages.upper, stages.lower(inputs).to(torch.bfloat16)

    def horde(d: int = d, **options: Any) -> Callable[[nn.Module], nn.Module]:
        common = {"order": sizes.order, "moment_dim": d, **options}
        return lambda loss: HORDELoss(loss, trunk.num_features, sizes.embedding, **common)

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

    def step(name: str) -> Callable[[], object]:
        attention = VEMAttention if name == "VEM" else None
        head = EmbeddingHead.for_trunk(trunk, sizes.embedding, attention=attention).to(device)
        loss = losses[name](BinomialDevianceLoss()).to(device)
        attach_all(loss, head)
        parameters = [*trunk.parameters(), *head.parameters(), *loss.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=1e-6)

        def run() -> None:
            torch.set_float32_matmul_precision("high" if on_gpu else "highest")
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                embeddings = head(features(inputs))
            loss(embeddings, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.set_float32_matmul_precision("highest")

        run()  # makes Adam's state before memory is counted
        return run

    precision = "trunk in bfloat16" if half else "float32"
    precision += ", moments in TF32" * on_gpu
    kept = f", {sizes.frozen_stages} frozen stages, their outputs kept" * bool(sizes.frozen_stages)
    return Comparison(
        f"A training step of {trunk_name}",
        f"{sizes.images} images of {side} px{kept}, HORDE with K = {sizes.order} and d = {d:,}, {precision}",
        {name: step(name) for name in (methods or losses)},
    )


def horde_step(trunk: str, tiny: bool, device: Device) -> Comparison:
    """A step of the optimizer with HORDE against the same step without."""
    methods = (ALONE, "HORDE, stored", "HORDE, sketch", NARROW)
    on_gpu = device.type == "cuda"
    return replace(
        network_steps(trunk, Sizes(40), tiny, device, methods),
        memory_against=ALONE,
        targets={methods[1]: Target(1.15)} if on_gpu else {NARROW: Target(1.10)},
        rounds=7 if on_gpu else 3,
    )


def all_methods(trunk: str, sizes: Sizes, tiny: bool, device: Device) -> Comparison:
    """A step of the optimizer with each method against the same step without."""
    steps = network_steps(trunk, sizes, tiny, device)
    rounds = 25 if sizes.frozen_stages else 3  # short steps vary more
    return replace(steps, name=f"{steps.name} with each method", rounds=rounds)


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


def retrieval(
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


PHOTOGRAPHS = Sizes(32, side=128, order=3, d=1024, embedding=128, frozen_stages=6)
"""As the recipes photographs/frozen train."""

CASES: Mapping[str, Callable[[bool, Device], Comparison]] = {
    "horde_moments": horde_moments,
    "horde_sketch_stored": partial(horde_sketches, "store"),
    "horde_sketch_recomputed": partial(horde_sketches, "recompute"),
    "horde_resnet50": partial(horde_step, "resnet50"),
    "horde_googlenet": partial(horde_step, "googlenet"),
    "methods_resnet50": partial(all_methods, "resnet50", Sizes(8)),
    "methods_googlenet": partial(all_methods, "googlenet", Sizes(8)),
    "methods_photographs": partial(all_methods, "tf_efficientnet_lite0", PHOTOGRAPHS),
    "joint_similarity": joint_similarity,
    "energy_confusion": energy_confusion,
    "vem": vem,
    "retrieval": partial(retrieval, "Stanford Online Products", 60_502, 60_502, 11_316),
    "query_gallery": partial(retrieval, "In-Shop", 26_830, 14_218, 3_985),
}
"""By their names on the command line."""
