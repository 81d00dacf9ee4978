r"""Transfer of embeddings from seen to unseen classes: the two terms of a bound on the error.

JRD (Chu et al., ICML 2020), section 2, after Ben-David et al. (2010), for seen classes s and unseen u:

    eps_u(h) <= eps_s(h) + d_H + lambda                  eq. 1
    d_H      = 1 - min_h eps*(h)                         eq. 2, `h_divergence`
    lambda   = eps_s(h*) + eps_u(h*)                     eq. 3, `ideal_joint_error`

eps* is the error of a binary classifier that separates seen images from unseen ones; h* is one classifier of all
classes. The hypotheses are 1-nearest-neighbour classifiers. Both are fitted on a labelled split of seen and
unseen images, and their errors are counted on the rest. The minimum is therefore not searched: the fitted
classifier stands for it.

The paper leaves open: the splits (here a class-stratified random half, or given rows); whether eps* pools
the images of both domains (it does here) or averages the domains' errors (`balanced=True`); the metric
(here Euclidean on unit vectors, the paper's representation, which equals cosine). Ben-David's own estimate of the
divergence is 2 (1 - 2 eps*), from 0 (chance) to 2: `form="proxy_a"`. Here lambda is the sum of eq. 3; the values
in Table 3 are small for a sum, and fit half of it, the mean of the two errors.
"""

import reprlib
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ._precision import full_precision
from .stratified_parts import check_labels, check_tensor, shuffled_by_class

BLOCK = 2**24
"""Number of similarities held at once: 64 MB in float32."""


def nearest(queries: Tensor, references: Tensor) -> Tensor:
    """Row of the nearest reference of each query, by Euclidean distance: (N, E), (M, E) -> (N,).

    In blocks: no more than about 2^24 distances are held at once.
    """
    # |q - r|^2 = |q|^2 - 2 (q^T r - |r|^2 / 2); the centre, subtracted, leaves fewer digits to cancel.
    centre = references.mean(dim=0)
    references = references - centre
    offset = references.square().sum(dim=1) / 2
    with torch.autocast(queries.device.type, enabled=False):
        return torch.cat(
            [
                ((block - centre) @ references.T - offset).argmax(dim=1)
                for block in torch.split(queries, max(1, BLOCK // len(references)))
            ]
        )


def ideal_joint_error(
    seen: Tensor,
    seen_labels: Tensor,
    unseen: Tensor,
    unseen_labels: Tensor,
    *,
    labelled: float | tuple[Tensor, Tensor] = 0.5,
    normalize: bool = True,
    seed: int = 0,
) -> float:
    """lambda: the errors, on seen and on unseen images, of one classifier of all their classes. JRD, eq. 3.

    A sum of two rates, between 0 and 2. Small if the embeddings tell the unseen classes apart as well.

    Args:
        seen: (N, E), embeddings of images of training classes.
        seen_labels: (N,).
        unseen: (M, E), embeddings of images of other classes.
        unseen_labels: (M,).
        labelled: The images to fit the classifier on: a share of every class, drawn at random, or the rows of
            `seen` and of `unseen`, as `stratified_parts` gives them. The paper does not state its splits.
        normalize: L2-normalise the embeddings, as retrieval does.
        seed: Of the draw; the global generators are left alone.

    Raises:
        ValueError: if shapes do not fit, an embedding is not finite, a class is both seen and unseen, a class to
            draw a share of has a single image, or nothing is left to fit on or to test.

    Example:
        >>> x, y = torch.eye(4).repeat(2, 1), torch.arange(4).repeat(2)
        >>> ideal_joint_error(x[y < 2], y[y < 2], x[y >= 2], y[y >= 2])
        0.0
    """
    split = _Split(seen, seen_labels, unseen, unseen_labels, labelled, normalize, seed)
    wrong_seen, wrong_unseen = split.errors(seen_labels, unseen_labels)
    return wrong_seen.double().mean().item() + wrong_unseen.double().mean().item()  # eq. 3


def h_divergence(
    seen: Tensor,
    seen_labels: Tensor,
    unseen: Tensor,
    unseen_labels: Tensor,
    *,
    balanced: bool = False,
    form: Literal["printed", "proxy_a"] = "printed",
    labelled: float | tuple[Tensor, Tensor] = 0.5,
    normalize: bool = True,
    seed: int = 0,
) -> float:
    """Accuracy, 1 - error, of a classifier that separates seen images from unseen ones. JRD, eq. 2.

    1 if seen and unseen images lie apart, about 1/2 if they are mixed (for domains of equal size, or with
    `balanced`). JRD's Table 3: 0.93.

    Args:
        seen: (N, E), embeddings of images of training classes.
        seen_labels: (N,); used only to draw a share of every class.
        unseen: (M, E), embeddings of images of other classes.
        unseen_labels: (M,).
        balanced: Average the errors of the two domains, instead of counting all images alike; it matters
            where one domain is larger.
        form: "printed", 1 - error, or "proxy_a", Ben-David's 2 (1 - 2 error).
        labelled: As in `ideal_joint_error`.
        normalize: L2-normalise the embeddings, as retrieval does.
        seed: Of the draw; the global generators are left alone.

    Raises:
        ValueError: as in `ideal_joint_error`.

    Example:
        >>> x, y = torch.eye(4).repeat(2, 1), torch.arange(4).repeat(2)
        >>> h_divergence(x[y < 2], y[y < 2], x[y >= 2], y[y >= 2])
        1.0
    """
    if form not in ("printed", "proxy_a"):
        raise ValueError(f'form: expected "printed" or "proxy_a", got {form!r}')
    split = _Split(seen, seen_labels, unseen, unseen_labels, labelled, normalize, seed)
    domains = torch.zeros_like(seen_labels), torch.ones_like(unseen_labels)
    wrong_seen, wrong_unseen = (wrong.double() for wrong in split.errors(*domains))
    if balanced:
        error = (wrong_seen.mean() + wrong_unseen.mean()).item() / 2
    else:
        error = torch.cat([wrong_seen, wrong_unseen]).mean().item()
    return 1 - error if form == "printed" else 2 * (1 - 2 * error)  # eq. 2, as printed


class _Split:
    """The rows of seen and unseen images to fit on, and for each of the other images the nearest of these."""

    def __init__(
        self,
        seen: Tensor,
        seen_labels: Tensor,
        unseen: Tensor,
        unseen_labels: Tensor,
        labelled: float | tuple[Tensor, Tensor],
        normalize: bool,
        seed: int,
    ) -> None:
        _check(seen, seen_labels, "seen")
        _check(unseen, unseen_labels, "unseen")
        if seen.shape[1] != unseen.shape[1]:
            raise ValueError(
                f"unseen: expected embeddings {seen.shape[1]} wide, as those of seen, got shape "
                f"{tuple(unseen.shape)}"
            )
        shared = set(seen_labels.tolist()) & set(unseen_labels.tolist())
        if shared:
            raise ValueError(
                f"unseen_labels: {len(shared)} classes are also in seen_labels, such as {min(shared)}; give "
                "the unseen classes numbers that no seen class has"
            )
        if isinstance(labelled, tuple) and len(labelled) == 2:
            rows_seen, rows_unseen = labelled
        elif not isinstance(labelled, float) or not 0 < labelled < 1:
            raise ValueError(
                "labelled: expected a share between 0 and 1, or a tuple of two tensors, the rows of seen and of "
                f"unseen; got {reprlib.repr(labelled)}"
            )
        else:
            rows_seen = _share(seen_labels, labelled, seed, "seen_labels")
            rows_unseen = _share(unseen_labels, labelled, seed, "unseen_labels")
        self.fitted = [
            _mask(rows_seen, len(seen), "seen"),
            _mask(rows_unseen, len(unseen), "unseen"),
        ]
        domains = [full_precision(x.detach()) for x in (seen, unseen)]
        if normalize:
            domains = [F.normalize(x) for x in domains]
        references = torch.cat([x[mask] for x, mask in zip(domains, self.fitted, strict=True)])
        self.neighbours = [
            nearest(x[~mask], references).cpu()
            for x, mask in zip(domains, self.fitted, strict=True)
        ]

    def errors(self, seen_targets: Tensor, unseen_targets: Tensor) -> list[Tensor]:
        """Mask, for each domain, of the tested images whose nearest neighbour has another target."""
        targets = (seen_targets.cpu(), unseen_targets.cpu())
        known = torch.cat([y[mask] for y, mask in zip(targets, self.fitted, strict=True)])
        return [
            known[neighbours] != y[~mask]
            for neighbours, y, mask in zip(self.neighbours, targets, self.fitted, strict=True)
        ]


def _share(labels: Tensor, share: float, seed: int, name: str) -> Tensor:
    """Rows of a share of every class: rounded, at least one row and never all."""
    order = shuffled_by_class(labels, seed)
    classes, sizes = torch.unique(labels, return_counts=True)
    if sizes.min() < 2:
        raise ValueError(
            f"{name}: class {classes[sizes.argmin()].item()} has one image, to be fitted on or tested, not both; "
            "leave it out, or pass labelled=(rows of seen, rows of unseen)"
        )
    take = (sizes * share).round().long().clamp(min=1).minimum(sizes - 1)
    first = sizes.cumsum(0) - sizes
    place = torch.arange(len(labels), device=labels.device) - first.repeat_interleave(sizes)
    return order[place < take.repeat_interleave(sizes)]


def _mask(rows: Tensor, size: int, name: str) -> Tensor:
    check_tensor(rows, f"labelled, rows of {name}")
    mask = torch.zeros(size, dtype=torch.bool)
    if rows.dtype == torch.bool:
        if rows.shape != (size,):
            raise ValueError(
                f"labelled: expected {size} entries for {name}, got shape {tuple(rows.shape)}"
            )
    elif rows.is_floating_point() or ((rows < 0) | (rows >= size)).any():
        came = rows.dtype if rows.is_floating_point() else f"{rows.min()} to {rows.max()}"
        raise ValueError(
            f"labelled: expected rows of {name}, integers from 0 to {size - 1}, got {came}"
        )
    mask[rows.cpu()] = True
    if not 0 < mask.sum() < size:
        raise ValueError(
            f"labelled: expected some of the {size} rows of {name} to fit on, and some left to test, got "
            f"{mask.sum().item()}"
        )
    return mask


def _check(embeddings: Tensor, labels: Tensor, name: str) -> None:
    check_labels(labels, f"{name}_labels")
    check_tensor(embeddings, name)
    if embeddings.ndim != 2 or len(embeddings) != len(labels):
        raise ValueError(
            f"{name}: expected embeddings ({len(labels)}, E), one row per label, got shape "
            f"{tuple(embeddings.shape)}"
        )
    if not embeddings.isfinite().all():
        bad = (~embeddings.isfinite()).any(dim=1).sum().item()
        raise ValueError(f"{name}: {bad} of {len(embeddings)} embeddings hold NaN or infinity")
