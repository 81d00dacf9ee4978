"""A dataset's list of images, with their classes and their parts. No image is opened here."""

import codecs
import errno
import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.console.printing import PrintableError, is_plain, reason

NAMED = 20  # files in one error


class DatasetError(PrintableError, ValueError):
    """Error: a dataset is incomplete, damaged or another one; one sentence that names the file."""


class NotFoundError(DatasetError):
    """Error: a folder does not hold a dataset."""


Box = tuple[int, int, int, int]
"""Left, top, right and bottom of a part of an image, in pixels."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name an index file or an image in the error that its content raises in the context."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:  # damaged bytes make parsers and decoders raise almost any error
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DatasetError:
    """The error of a file whose content raised another one, with what to do."""
    why = f"{type(error).__name__}: {reason(error)}"
    if isinstance(error, OSError) and error.errno is not None:
        why = reason(error).removeprefix(f"{path}: ")
    remedy = "; restore or replace it"
    if isinstance(error, PermissionError):
        remedy = "; allow this user to read it"
    elif isinstance(error, OSError) and error.errno == errno.ELOOP:  # `walk` says what to remove
        remedy = ""
    elif isinstance(error, FileNotFoundError):
        remedy = "; restore it, or name another"
    return DatasetError(f"{path}: cannot be read ({why}){remedy}")


@dataclass(frozen=True, eq=False)  # so that what its files hold is kept by it
class Listing:
    """The n images of a dataset, in the order of its index files.

    Raises:
        DatasetError: if a name leads out of the folder, or cannot be shown.
    """

    name: str  # as in `data.dataset`
    root: Path  # paths are relative to it
    layout: str  # the one found, such as "img_highres"
    paths: Sequence[str]  # with forward slashes
    classes: Sequence[str]  # names, unique within the dataset
    parts: Sequence[str]  # "train", "query", "gallery", and "test", which is both of these
    upright: bool = False  # turn images by their EXIF orientation; or their pixels stay as stored
    left_out: Mapping[str, int] = field(default_factory=dict)  # files that are no images, by suffix
    boxes: Sequence[Box | None] | None = None  # the part of each image that is seen; None: all
    level: int | str | None = None  # data.class_level of a folder
    places: Sequence[str] | None = None  # where each is listed, such as "FILE, line 5", for errors
    groups: Sequence[str] | None = None  # see `Ranking`; "\0" begins the name of an image in none
    whole_groups: bool = False

    def __post_init__(self) -> None:
        for row, names in enumerate(zip(self.classes, self.paths, strict=True)):
            for name in names:  # shown, and as a path in the folder
                if not is_plain(name) or {"", ".", ".."} & set(name.split("/")):
                    raise DatasetError(
                        f"{self.places[row] if self.places else self.root}: the name {name!r} has control "
                        "characters, leads out of the folder or is not UTF-8; rename it, or restore the index files"
                    )

    def __len__(self) -> int:
        return len(self.paths)

    def counts(self) -> dict[str, tuple[int, int]]:
        """(images, classes) of each existing part."""
        images = Counter(self.parts)
        classes = Counter(part for part, _ in set(zip(self.parts, self.classes, strict=True)))
        return {part: (images[part], classes[part]) for part in images}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the listed paths, classes, parts, boxes and groups and of the files' sizes.

        A DatasetError names the files that are missing.
        """
        sizes, missing = [], {}
        for row, path in enumerate(self.paths):
            try:
                # Path's methods take twice the time.
                sizes.append(os.path.getsize(f"{self.root}/{path}"))  # noqa: PTH202
            except OSError as error:
                missing[row] = self.wrong(row, error)
        if missing:
            raise self.unusable(missing)
        digest = hashlib.sha256(self.name.encode())
        more = [column for column in (self.boxes, self.groups) if column is not None]
        digest.update(b"whole groups\n" if self.whole_groups else b"")
        for cells in zip(self.paths, self.classes, self.parts, sizes, *more, strict=True):
            digest.update("\0".join(map(str, cells)).encode() + b"\n")
        return digest.hexdigest()

    def wrong(self, row: int, error: Exception) -> DatasetError:
        """Error: an image cannot be used; it names the file, and its place in a table."""
        if not isinstance(error, DatasetError):
            error = unreadable(self.root / self.paths[row], error)
        return error if self.places is None else DatasetError(f"{self.places[row]}: {error}")

    def unusable(self, errors: Mapping[int, DatasetError]) -> DatasetError:
        """Error: the images of these rows cannot be used; it says why of the first, and names the first 20."""
        first, *others = errors
        line = f"{errors[first]}"
        if others:
            names = ", ".join(self.paths[row] for row in others[: NAMED - 1])
            rest = f" and {len(others) - NAMED + 1:,} others" if len(others) >= NAMED else ""
            line += f"; {len(others):,} more cannot be used: {names}{rest}"
        return DatasetError(line)


def counts_text(counts: Mapping[str, tuple[int, int]]) -> str:
    """Images and classes of each part, as text."""
    both = {"test": "query and gallery"} if {"query", "gallery"} & counts.keys() else {}
    rows = [(both.get(part, part), *numbers) for part, numbers in counts.items()]
    return ", ".join(f"{part} {images:,} / {classes:,}" for part, images, classes in rows)


def find(root: Path, markers: Collection[str]) -> tuple[Path, str]:
    """The folder that holds one of these files or folders, and which: root, one in it, or one in such a folder.

    The uppermost folder is taken, there the first marker, and of equal folders the first by name.
    """
    for above in ("", "*/", "*/*/"):  # some unpackers make two
        for marker in markers:
            if places := sorted(root.glob(above + marker)):
                return places[0].parents[marker.count("/")], marker
    raise NotFoundError(
        f"{root}: found no {' or '.join(markers)}, here or in the folders here; name the folder that the dataset "
        "was unpacked in (docs/datasets.md says where to get it)"
    )


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file, as `read_text` does; blank lines at the end are left out."""
    return read_text(path).rstrip("\r\n").splitlines()


def read_text(path: Path, remedy: str = "save the file as UTF-8") -> str:
    """Read a text file in UTF-8, or in UTF-16 with its mark; a DatasetError tells the remedy for another one."""
    with reading(path):
        content = path.read_bytes()
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        try:
            text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
            place = text.find("\0")  # UTF-16 without its mark reads as UTF-8
        except UnicodeDecodeError as error:
            place = error.start
        if place >= 0:
            line = content.count(b"\n", 0, place) + 1
            raise DatasetError(f"{path}, line {line}: is not UTF-8 text (byte {place}); {remedy}")
        return text
