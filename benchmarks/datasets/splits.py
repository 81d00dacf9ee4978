"""Class-disjoint validation within the training classes: k folds, equal on every machine."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

Split = Literal["train", "test", "development", "validation", "all"]
Stage = Literal["pretraining", "fine_tuning"]

Name = TypeVar("Name", str, int)


def shuffled(names: Iterable[Name], salt: str = "") -> list[Name]:
    """Names in an order that depends on them and the salt alone.

    A hash needs no generator and does not change from one version of numpy to the next. A name that is not UTF-8
    has an order, too: `Listing` refuses it by its name.
    """

    def digest(name: Name) -> bytes:
        return hashlib.sha256(f"{salt}{name}".encode(errors="surrogatepass")).digest()

    return sorted(names, key=digest)


def limited(names: Sequence[str], most: int | None, draw_seed: int | None = None) -> list[str]:
    """At most so many of the names, in their order: the first ones, or those that a seed draws.

    Whatever the names, a smaller draw of a seed is a part of its larger ones.
    """
    order = names if draw_seed is None else shuffled(names, f"{draw_seed} ")
    kept = set(order[:most])
    return [name for name in names if name in kept]


def validation_fold(names: Sequence[str], fold: int, folds: int) -> tuple[list[str], list[str]]:
    """The training classes to train on and those held out, both in their order.

    The sizes of folds differ by at most one class.

    Raises:
        ValueError: for a fold outside 0..folds-1, or if there are fewer classes than folds.
    """
    if folds < 2 or folds > len(names):
        raise ValueError(f"folds: expected 2 to {len(names)}, the number of classes, got {folds}")
    if not 0 <= fold < folds:
        raise ValueError(f"fold: expected 0 to {folds - 1}, got {fold}")
    start, stop = (round(len(names) * edge / folds) for edge in (fold, fold + 1))
    held_out = set(shuffled(names)[start:stop])
    kept = [name for name in names if name not in held_out]
    return kept, [name for name in names if name in held_out]
