"""Class-disjoint validation within the training classes: k folds, equal on every machine."""

import hashlib
from collections.abc import Sequence
from typing import Literal

Split = Literal["train", "test", "development", "validation"]
Stage = Literal["pretraining", "fine_tuning"]


def shuffled(names: Sequence[str]) -> list[int]:
    """Positions of names in an order that depends on the names alone.

    A hash needs no generator and does not change from one version of numpy to the next. A name that is not UTF-8
    has an order, too: `Listing` refuses it by its name.
    """

    def digest(i: int) -> bytes:
        return hashlib.sha256(names[i].encode(errors="surrogatepass")).digest()

    return sorted(range(len(names)), key=digest)


def limited(names: Sequence[str], most: int | None, draw_seed: int | None = None) -> list[int]:
    """Positions of at most so many classes, ascending: the first ones, or those that a seed draws.

    Whatever the names, a smaller draw of a seed is a part of its larger ones.
    """
    order = list(range(len(names)))
    if draw_seed is not None:
        order = shuffled([f"{draw_seed} {name}" for name in names])
    return sorted(order[:most])


def validation_fold(names: Sequence[str], fold: int, folds: int) -> tuple[list[int], list[int]]:
    """Positions of the classes to train on, and of those held out, both ascending.

    Args:
        names: Names of all training classes.
        fold: The fold to hold out, 0..folds-1.
        folds: Number of parts; their sizes differ by at most one class.

    Raises:
        ValueError: for a fold outside 0..folds-1, or if there are fewer classes than folds.
    """
    if folds < 2 or folds > len(names):
        raise ValueError(f"folds: expected 2 to {len(names)}, the number of classes, got {folds}")
    if not 0 <= fold < folds:
        raise ValueError(f"fold: expected 0 to {folds - 1}, got {fold}")
    order = shuffled(names)
    start, stop = (round(len(names) * edge / folds) for edge in (fold, fold + 1))
    return sorted(order[:start] + order[stop:]), sorted(order[start:stop])
