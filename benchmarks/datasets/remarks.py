"""What a listing holds that is allowed and often a mistake: names that recur, parts as classes, copies."""

import re
import shlex
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

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


def remarks(listing: Listing, pixels: Sequence[str | bytes | None]) -> list[Remark]:
    """Lines on a listing; none if there is nothing to say.

    Args:
        pixels: Digests of the pixels of each listed file; None where there is none.
    """
    lines = [*_parts(listing)] if listing.name == "folder" else []
    if listing.name in ("folder", "table"):
        lines += _alike(listing)
    if listing.left_out:
        lines.append(("left out", left_out_text(listing.left_out)))
    return [*lines, *_copies(listing, pixels)]


def verify_command(data: Mapping[str, Any]) -> str:
    """The command that looks through all images of a run with these settings of `data`."""
    words = ["python", "-m", "benchmarks.datasets", "verify", data["dataset"]]
    names = ("root", "table", "test_classes", "class_level", "known_classes", "camera", "sequence")
    given = {name: value for name in names if (value := data.get(name)) is not None}
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


class _Image(NamedTuple):
    path: str
    group: str
    label: str
    part: str


def _copies(listing: Listing, pixels: Sequence[str | bytes | None]) -> Iterator[Remark]:
    """Images of the same pixels: both train and test, of one use, or of two classes.

    A link to an image and a copy of its file have the same pixels, too.
    """
    groups = listing.groups or [f"{row}" for row in range(len(listing))]
    listed = map(_Image, listing.paths, groups, listing.classes, listing.parts)
    alike = defaultdict(list)
    for digest, image in zip(pixels, listed, strict=True):
        alike[digest].append(image)
    alike.pop(None, None)
    same = [images for images in alike.values() if len(images) > 1]
    if across := [images for images in same if len({i.part == "train" for i in images}) > 1]:
        count = sum(image.part == "train" for images in across for image in images)
        yield (
            "train and test",
            f"{count:,} images train and test, such as {_example(across)}; remove one of each",
        )
    tested = sorted({*listing.parts} - {"train"}, reverse=True)
    for parts in (tested, ["train"]):  # a query may be copied in the gallery
        within = [[image for image in images if image.part in parts] for images in same]
        # Copies of one group are not ranked for each other.
        if copied := [images for images in within if len({i.group for i in images}) > 1]:
            there = f"part{'s' * (len(parts) > 1)} {' and '.join(parts)}"
            them, queries = "them" if parts[1:] else "it", ""
            if mixed := [images for images in copied if len({i.part for i in images}) > 1]:
                number = sum(map(_queries_with_copies, mixed))
                queries = f", {number:,} of them queries with a copy in the gallery"
            yield (
                "copies",
                f"{sum(map(len, copied)):,} images of {there} have a copy in {them}{queries}, such as "
                f"{_example(mixed or copied)}; a search finds it, whatever was learned: remove all except one",
            )
    if unclear := [images for images in same if len({i.label for i in images}) > 1]:
        yield (
            "two classes",
            f"{len(unclear):,} images are in two classes, such as {_example(unclear)}; keep the right one",
        )


def _queries_with_copies(images: Sequence[_Image]) -> int:
    """Queries among copies of one image, of which another is in the gallery."""
    held = sum(image.part != "query" for image in images)
    return sum(held > (image.part != "query") for image in images if image.part != "gallery")


def _example(groups: Sequence[Sequence[_Image]]) -> str:
    return f"{groups[0][0].path} = {groups[0][-1].path}"
