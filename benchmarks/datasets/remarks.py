"""What a listing holds that is allowed and often a mistake: names that recur, parts as classes, copies."""

import re
import shlex
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from benchmarks.datasets.catalogue import SETTINGS
from benchmarks.datasets.contents import ImageDigests
from benchmarks.datasets.folder import left_out_text
from benchmarks.datasets.listing import Listing

PARTS = {
    *("train", "training", "trainset", "trainval", "val", "valid", "validation", "dev", "eval"),
    *("evaluation", "test", "testing", "testset", "holdout", "query", "gallery", "seen", "unseen"),
    *("fold", "split"),
}
"""Words in the names of folders, without case, that are parts of a dataset and no classes."""

Remark = tuple[str, str]
"""The subject, and the finding with what to do."""


def remarks(listing: Listing, digests: Mapping[int, ImageDigests]) -> list[Remark]:
    """Lines on a listing; none if there is nothing to say.

    Args:
        digests: Those of the listed files that can be used, by their rows.
    """
    lines = [*_parts(listing)] if listing.name == "folder" else []
    if listing.name in ("folder", "table"):
        lines += _alike(listing)
    if listing.left_out:
        lines.append(("left out", left_out_text(listing.left_out)))
    return [*lines, *_copies(listing, digests)]


def verify_command(data: Mapping[str, Any]) -> str:
    """The command that looks through all images of a run with these settings of `data`."""
    words = ["python", "-m", "benchmarks.datasets", "verify", data["dataset"]]
    given = {name: value for name in SETTINGS if (value := data.get(name)) is not None}
    written = {name: f"{v}".lower() if isinstance(v, bool) else f"{v}" for name, v in given.items()}
    words += [f"--data.{name}={value}" for name, value in written.items()]
    return shlex.join(words)


def _parts(listing: Listing) -> Iterator[Remark]:
    """Folders that look like parts of a dataset."""
    classes = sorted(set(listing.classes))
    above = {folder for name in classes for folder in name.split("/")[:-1]}
    parts = {folder for folder in above if PARTS & {*_words(folder)}}
    single = {name.rpartition("/")[2] for name in classes if name.casefold() in PARTS}
    if len(single) > 1:  # one may be a vehicle
        parts |= single
    if len(parts) > 1 or any(len(_words(part)) == 1 for part in parts):  # not "test tubes" alone
        remedy = "set data.class_level to last, which joins a class's parts"
        if listing.level == "last":
            remedy = "put the images into folders of their classes"
        yield (
            "parts",
            f"{', '.join(sorted(parts))}: looks like a part of a dataset, but is taken for classes; "
            f"pass one part as data.root, or {remedy}",
        )


def _alike(listing: Listing) -> Iterator[Remark]:
    """Classes whose names differ in case, spaces or the folders above, or in a table as the numbers 1 and 1.0."""
    is_table = listing.name == "table"
    alike = defaultdict(list)
    for name in sorted(set(listing.classes)):
        last = name if is_table else name.rpartition("/")[2]
        key = unicodedata.normalize("NFKC", last).casefold().strip()
        key = re.sub(r"(?<=[^\W_])[\s_-]+(?=[^\W_])", " ", key)
        with suppress(ValueError):
            key = f"{float(key)}" if is_table else key
        alike[key].append(name)
    if several := [names for names in alike.values() if len(names) > 1]:
        remedy = "rename a folder" + ", or set data.class_level to last" * (listing.level != "last")
        if is_table:
            remedy = "write their label in one way"
        yield (
            "same names",
            f"{len(several):,} recur, such as {' and '.join(several[0][:2])}, and count as different classes; if "
            f"they are one, {remedy}",
        )


def _words(folder: str) -> list[str]:
    """The words of a folder's name, without case, digits and marks."""
    return re.findall(r"[^\W\d_]+", folder.casefold())


def _copies(listing: Listing, digests: Mapping[int, ImageDigests]) -> Iterator[Remark]:
    """Images of the same pixels: both train and test, of one use, or of two classes.

    A link to an image and a copy of its file have the same pixels, too.
    """
    paths, parts, groups = listing.paths, listing.parts, listing.groups or range(len(listing))
    alike = defaultdict(list)
    for row, file in digests.items():
        alike[file.pixels].append(row)
    same = [rows for rows in alike.values() if len(rows) > 1]

    def example(copies: Sequence[Sequence[int]]) -> str:
        return f"{paths[copies[0][0]]} = {paths[copies[0][-1]]}"

    if across := [rows for rows in same if len({parts[row] == "train" for row in rows}) > 1]:
        count = sum(parts[row] == "train" for rows in across for row in rows)
        yield (
            "train and test",
            f"{count:,} images train and test, such as {example(across)}; remove one of each",
        )
    tested = sorted({*parts} - {"train"}, reverse=True)
    for uses in (tested, ["train"]):  # a query may be copied in the gallery
        within = [[row for row in rows if parts[row] in uses] for rows in same]
        # Copies of one group are not ranked for each other.
        if copied := [rows for rows in within if len({groups[row] for row in rows}) > 1]:
            there = f"part{'s' * (len(uses) > 1)} {' and '.join(uses)}"
            them, queries = "them" if uses[1:] else "it", ""
            if mixed := [rows for rows in copied if len({parts[row] for row in rows}) > 1]:
                number = sum(_queries_with_copies([parts[row] for row in rows]) for rows in mixed)
                queries = f", {number:,} of them queries with a copy in the gallery"
            yield (
                "copies",
                f"{sum(map(len, copied)):,} images of {there} have a copy in {them}{queries}, such as "
                f"{example(mixed or copied)}; a search finds it, whatever was learned: remove all except one",
            )
    if unclear := [rows for rows in same if len({listing.classes[row] for row in rows}) > 1]:
        yield (
            "two classes",
            f"{len(unclear):,} images are in two classes, such as {example(unclear)}; keep the right one",
        )


def _queries_with_copies(parts: Sequence[str]) -> int:
    """Queries among copies of one image, of which another is in the gallery."""
    held = sum(part != "query" for part in parts)
    return sum(held > (part != "query") for part in parts if part != "gallery")
