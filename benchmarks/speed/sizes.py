"""Comparisons of docs/costs.md: methods over their sizes, and HORDE's trained and fixed projections."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.speed.measuring import Comparison, Sizes
from benchmarks.speed.steps import EMBEDDING, Device, Step, training_step
from pml_regularizers import (
    BinomialDevianceLoss,
    EmbeddingHead,
    EnergyConfusionRegularizer,
    HORDELoss,
    JRDLoss,
    VarianceRegularizer,
    VEMAttention,
)
from pml_regularizers.moments import Projections

METHODS = ("horde", "energy_confusion", "vem", "jrd")

POSITIONS = 64  # of a map of 8 x 8

TIMED_WIDTHS = (128, 256, 512, 1024, 2048)  # d of trained and fixed projections in training steps


# ------------------------------------------------------------------------- forward and backward pass


def horde(tiny: bool, device: Device) -> Comparison:
    """Moments, their embeddings and binomial deviance on each order.

    The base point has the paper's 40 maps of 8 x 8 from 5 classes, but a quarter of GoogLeNet's 1,024 channels
    and 1/32 of the paper's d = 8,192; E = 512. Fixed projections have no embeddings, as in the paper's Table 3.
    """

    def step(sizes: Sizes, **options: Any) -> Step:
        N, C, K, d = (sizes[name] for name in ("N", "C", "K", "d"))
        loss = HORDELoss(BinomialDevianceLoss(), C, EMBEDDING, order=K, moment_dim=d, **options)
        return _pass(loss.to(device), sizes, _leaf(N, C, 8, POSITIONS // 8, device=device))

    variants: dict[str, dict[str, Any]] = {
        "trained, stored": {"activations": "store"},
        "trained, recomputed": {"activations": "recompute"},
        "fixed, stored": {"projections": "random", "activations": "store"},
        "fixed, recomputed": {"projections": "random", "activations": "recompute"},
    }
    grids = {
        "N": (10, 20, 40, 80, 160),
        "C": (64, 128, 256, 512, 1024),
        "d": (64, 128, 256, 512, 1024),
        "K": (2, 3, 5, 7, 10),
        "classes": (2, 5, 10, 20),
    }
    return _over(
        *("HORDE", horde.__doc__, {"N": 40, "C": 256, "d": 256, "K": 5, "classes": 5}, grids),
        lambda sizes: {name: step(sizes, **options) for name, options in variants.items()},
        *(3, tiny),
    )


def energy_confusion(tiny: bool, device: Device) -> Comparison:
    """The regularizer alone.

    The base point has the paper's 64 classes and E = 512. It has 1,024 images instead of the paper's 128, so
    that the arithmetic takes more time than the calls of operations.
    """
    regularizer = EnergyConfusionRegularizer(gradient="all")

    def step(sizes: Sizes) -> Step:
        embeddings, labels = _batch(sizes["N"], sizes["classes"], device, sizes["E"])
        return lambda: torch.autograd.grad(regularizer(embeddings, labels), embeddings)

    grids = {
        "N": (128, 256, 512, 1024, 2048, 4096),
        "E": (64, 128, 256, 512, 1024, 2048),
        "classes": (8, 16, 32, 64, 128, 256, 512),
    }
    base = {"N": 1024, "E": 512, "classes": 64}
    return _over(
        *("Energy confusion", energy_confusion.__doc__, base, grids),
        lambda sizes: {"closed form": step(sizes)},
        *(9, tiny),
    )


def vem(tiny: bool, device: Device) -> Comparison:
    """The gate on pooled features and its regularizer.

    The base point is the paper's: 64 images, 2,048 channels.
    """

    def step(sizes: Sizes) -> Step:
        N, C = sizes["N"], sizes["C"]
        attention, regularizer = VEMAttention(C).to(device), VarianceRegularizer()
        pooled, predicted = _leaf(N, C, device=device), attention.variance
        gradient = torch.randn(N, C, device=device)

        def run() -> object:
            gated = attention(pooled)
            value = regularizer(gated, features=(pooled, predicted))
            return torch.autograd.grad([gated, value], [pooled, predicted], [gradient, None])

        return run

    grids = {"N": (16, 64, 256, 1024, 4096), "C": (512, 2048, 8192, 32768, 131072)}
    return _over(
        *("Variance attention (VEM)", vem.__doc__, {"N": 64, "C": 2048}, grids),
        lambda sizes: {"gate and regularizer": step(sizes)},
        *(9, tiny),
    )


def jrd(tiny: bool, device: Device) -> Comparison:
    """AM-softmax and the similarity of pooled features, embeddings and classes.

    The base point is the paper's on Stanford Online Products: 120 images, C = 1,024 channels, 11,318 classes; E
    = 512.
    """

    def step(sizes: Sizes) -> Step:
        loss = JRDLoss(sizes["classes"], EMBEDDING).to(device)
        return _pass(loss, sizes, _leaf(sizes["N"], sizes["C"], device=device), "pooled")

    grids = {
        "N": (30, 60, 120, 240, 480),
        "C": (256, 512, 1024, 2048, 4096),
        "classes": (1415, 2830, 5659, 11318, 22636, 45272),
    }
    base = {"N": 120, "C": 1024, "classes": 11318}
    title = "Joint representation diversification (JRD)"
    return _over(title, jrd.__doc__, base, grids, lambda sizes: {"JRD": step(sizes)}, 5, tiny)


def _over(
    title: str,
    about: str | None,
    base: Sizes,
    grids: Mapping[str, Sequence[int]],
    at: Callable[[Sizes], Mapping[str, Step]],
    rounds: int,
    tiny: bool,
) -> Comparison:
    """A comparison of variants at a base point, and over one size at a time."""
    if tiny:
        small = dict(zip(base, (8, 6, 4, 2), strict=False)) | {"classes": 8}
        base = {name: small[name] for name in base}
        grids = {name: (n, n + 1, n + 2) for name, n in base.items()}
    point = ", ".join(f"{size} = {value:,}" for size, value in base.items())
    size = f"{' '.join(str(about).split())} Base point: {point}"
    candidates = at(base)
    first = next(iter(candidates))
    return Comparison(title, size, candidates, first, rounds=rounds, grids=grids, base=base, at=at)


def _pass(loss: nn.Module, sizes: Sizes, read: Tensor, stage: str | None = None) -> Step:
    embeddings, labels = _batch(sizes["N"], sizes["classes"], read.device)
    inputs = [embeddings, read, *loss.parameters()]
    features = read if stage is None else {stage: read}
    return lambda: torch.autograd.grad(loss(embeddings, labels, features=features), inputs)


def _batch(N: int, classes: int, device: Device, width: int = EMBEDDING) -> tuple[Tensor, Tensor]:
    embeddings = F.normalize(torch.randn(N, width, device=device)).requires_grad_()
    return embeddings, torch.arange(N, device=device) % classes


def _leaf(*shape: int, device: Device) -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


# ------------------------------------------------------------------------------------ training steps


def horde_steps(N: int, tiny: bool, device: Device) -> Comparison:
    """A step of head and loss on given maps, including Adam, with trained and with fixed projections."""
    N, C = (2, 16) if tiny else (N, 1024)
    maps = _leaf(N, C, 8, POSITIONS // 8, device=device)
    kinds: dict[str, Projections] = {"trained": "cascaded", "fixed": "random"}

    def step(projections: Projections, d: int) -> Step:
        head = EmbeddingHead(C, EMBEDDING)
        return training_step(nn.Identity(), head, _horde(C, d, projections).attach(head), maps)

    rows = {f"{kind}, d = {d:,}": step(p, d) for d in TIMED_WIDTHS for kind, p in kinds.items()}
    return Comparison(
        f"A step of head and loss, {N} images",
        f"{N} maps of 8 x 8 x {C}, K = 5, E = {EMBEDDING}",
        rows,
        rounds=3,
        against={name: name.replace("fixed", "trained") for name in rows},
    )


def empty_horde(d: int, projections: Projections) -> HORDELoss:
    """HORDE at the paper's size, except for d, on the meta device: it takes no memory."""
    with torch.device("meta"):
        return _horde(1024, d, projections)


def _horde(C: int, d: int, projections: Projections) -> HORDELoss:
    return HORDELoss(BinomialDevianceLoss(), C, EMBEDDING, moment_dim=d, projections=projections)


def held_bytes(module: nn.Module) -> int:
    """Bytes of buffers, and of parameters with their gradients and Adam's two moments."""
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    return 4 * parameters + sum(buffer.nbytes for buffer in module.buffers())
