"""Check of a dataset: decodes every image, and reports all faults at once."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch

from benchmarks.datasets.contents import image_digests
from benchmarks.datasets.listing import Listing, counts_text
from benchmarks.datasets.queries import Ranking, count_queries, queries_text
from benchmarks.datasets.remarks import remarks

RESULTS = {True: "ok", False: "FAILED"}

STUDY_TRAINS = 6
"""Classes to train on that the study photographs/own needs: two in each of its folds."""

Check = tuple[str, str, str]
"""The subject, "ok" or "FAILED" (or "": neither right nor wrong), and the finding."""


def verify(
    listing: Listing, published: Mapping[str, tuple[int, int]] | None = None
) -> tuple[list[Check], list[str]]:
    """Check the lists, and every listed file.

    Args:
        published: The published (images, classes) of each part; None for images of one's own.

    Returns:
        All checks, and a line for every listed file that cannot be used.
    """
    digests, errors = image_digests(listing, anew=True)
    told = f"{len(errors):,} of {len(listing):,} cannot be used"
    told += "" if digests else "; is data.root right?"
    counts = listing.counts()
    if published is None:
        depths = Counter(name.count("/") + 1 for name in set(listing.classes))
        each = [f"{count:,} classes at depth {depth}" for depth, count in sorted(depths.items())]
        checks = [("counts", "", counts_text(counts)), ("classes", "", ", ".join(each))]
        checks += _both_uses(listing)
    else:
        wrong = "" if counts == published else f"; published: {counts_text(published)}"
        checks = [("counts", RESULTS[not wrong], counts_text(counts) + wrong)]
    checks += [
        _several_images(listing),
        _queries(listing),
        *_groups(listing),
        ("images", RESULTS[not errors], told),
    ]
    checks += [(subject, "", text) for subject, text in remarks(listing, digests)]
    if not errors:
        checks.append(("fingerprint", "", listing.fingerprint))
    return checks, [str(error) for error in errors.values()]


def _both_uses(listing: Listing) -> list[Check]:
    """A remark if a training or a study has too few classes to train on or to test on."""
    uses = Counter(use for use, _ in _sizes(listing))
    train, test = uses["train on"], uses["test on"]
    if train >= STUDY_TRAINS and test >= 2:
        return []
    text = (
        f"you have {len(set(listing.classes)):,} classes, {train:,} to train on, {test:,} to test on: "
        f"a training needs two of each, and the study photographs/own {2 * STUDY_TRAINS}, half of them to train on "
        "(benchmarks.evaluate only those to test on)"
    )
    return [("both uses", "", text)]


def _sizes(listing: Listing) -> Counter[tuple[str, str]]:
    """The images of each use and class."""
    rows = zip(listing.parts, listing.classes, strict=True)
    return Counter(("train on" if part == "train" else "test on", name) for part, name in rows)


def _queries(listing: Listing) -> Check:
    """Count the queries of a test, and those that have nothing to find."""
    if {*listing.parts} == {"train"}:
        return "queries", "", "no image tests"
    rows = [row for row, part in enumerate(listing.parts) if part != "train"]
    ranking = Ranking.listed(listing, rows)
    _, labels = np.unique([listing.classes[row] for row in rows], return_inverse=True)
    asked, unanswered = count_queries(torch.from_numpy(labels), ranking)
    text = queries_text(asked, unanswered)
    if ranking is not None and asked == unanswered:
        text += ": no query's class is in the gallery"
        text += "" if listing.groups is None else " by another group"
    return "queries", RESULTS[asked > unanswered], text


def _groups(listing: Listing) -> list[Check]:
    """Count the groups whose images leave rankings."""
    if listing.groups is None:
        return []
    names = [name for name in listing.groups if not name.startswith("\0")]
    alone = len(listing) - len(names)
    text = f"{len(names):,} images of {len({*names}):,}; {alone:,} of none"
    return [("sequences" if listing.whole_groups else "cameras", "", text)]


def _several_images(listing: Listing) -> Check:
    """Count the classes of one image: in a batch they make no pair, and a search finds none of them."""
    sizes = _sizes(listing)
    classes = Counter(use for use, _ in sizes)
    alone = Counter(use for (use, _), size in sizes.items() if size == 1)
    enough = all(alone[use] < classes[use] for use in classes)
    counts = [f"{alone[use]:,} of {classes[use]:,} classes to {use}" for use in sorted(classes)]
    why = "" if enough else ": nothing can be trained or retrieved from classes of one image"
    return "one image", RESULTS[enough], f"{', '.join(counts)} have one image{why}"
