"""Searches a folder of images with a network that `python -m benchmarks.export` wrote.

    python examples/search_folder.py EXPORTED IMAGES [QUERY ...] [--neighbours 5] [--html FILE]
        [--false-positives 0.01] [--index FILE.npz]

A query is an image or a folder of images; without any, paths are read from the standard input, one per line. Each
query's nearest images are printed with their similarities: cosines of -1 to 1. If the export has thresholds, the
query is "known", with the class of the nearest image, "not sure" or "unknown"; how often that is right is told
first. --html also shows the images on a page that needs no other file.

A file counts once, whatever links and copies there are. The query itself is no answer: if it lies in the folder,
the other images judge it; if only the same file lies there under another name, it is known by that.

--index keeps the embeddings of the folder; the next search embeds only new and changed images. Images are found and
read as in a training on a folder: links are followed, hidden files left out, photographs turned upright, as EXIF
says. What cannot be read is named and left out. Exit status: 1 if that is a query, 2 if it is every one.

Trunks that timm lacks, GoogLeNet and BN-Inception, need `benchmarks.backbones.register()` here.
"""

import argparse
import base64
import filecmp
import hashlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import timm
from PIL import Image
from pytorch_metric_learning.utils.inference import InferenceModel
from torch import Tensor
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.console.arguments import at_least, decimal
from benchmarks.console.printing import printable
from benchmarks.console.writing import replacing
from benchmarks.datasets.image_files import read_image, walk
from benchmarks.datasets.listing import DatasetError
from benchmarks.reporting.identification import USUAL, Judge, judge
from benchmarks.reporting.templates import fill

THUMBNAIL = 320  # pixels of its longer side

HOW = "train with --evaluation.verification=true, on enough test images, and export that run"


class Images(Dataset[tuple[Tensor, int]]):
    """Image files as the network sees them, upright by their EXIF, with a label, which PML expects and ignores.

    Attributes:
        damaged: Why images cannot be read, by their index; a black one stands in for each.
    """

    def __init__(self, paths: Sequence[Path], view: Callable[[Image.Image], Tensor], mode: str):
        self.paths, self.view, self.mode = paths, view, mode
        self.damaged: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            image = read_image(self.paths[index], upright=True)
        except DatasetError as error:
            self.damaged[index] = str(error)
            image = Image.new("RGB", (THUMBNAIL, THUMBNAIL))
        return self.view(image.convert(self.mode)), 0


class Network:
    """An exported network, which embeds image files."""

    def __init__(self, exported: Path) -> None:
        model = timm.create_model(f"local-dir:{exported}", pretrained=True)
        config = timm.data.resolve_model_data_config(model)
        self.view = timm.data.create_transform(**config)
        self.mode = "RGB" if config["input_size"][0] == 3 else "L"
        self._model = InferenceModel(model, data_device="cpu")
        self._files = [exported / name for name in ("config.json", "model.safetensors")]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the network's files."""
        whole = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in self._files)
        return hashlib.sha256(whole).hexdigest()

    def embed(self, paths: Sequence[Path]) -> tuple[np.ndarray, list[str]]:
        """Unit embeddings, and why files cannot be read: "" for those that can."""
        images = Images(paths, self.view, self.mode)
        found: Tensor = self._model.get_embeddings_from_tensor_or_dataset(images, batch_size=64)
        return found.numpy(), [images.damaged.get(i, "") for i in range(len(paths))]


def embedded(
    network: Network, root: Path, paths: Sequence[Path], index: Path | None
) -> tuple[np.ndarray, list[str]]:
    """What `Network.embed` gives for a folder's images; of those in the index that have not changed, from there.

    Raises:
        ValueError: if the index is of another kind, network or folder.
    """
    if index is None:
        return network.embed(paths)
    names = [path.relative_to(root).as_posix() for path in paths]
    # The time of change tells what keeps its size, time and number, as copies into an old file do.
    facts = [path.stat() for path in paths]
    states = [f"{s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}" for s in facts]
    keys, stored = [*zip(names, states, strict=True)], dict[tuple[str, str], tuple[Any, str]]()
    if index.exists():
        old = read_index(index)
        other = "network" if str(old["model"]) != network.digest else "folder"
        if other == "network" or not {*old["names"].tolist()} & {*names}:
            raise ValueError(
                f"--index: {index} is of another {other}; name another file, or remove it"
            )
        files = zip(old["names"].tolist(), old["files"].tolist(), strict=True)
        results = zip(old["embeddings"], old["damaged"].tolist(), strict=True)
        stored = dict(zip(files, results, strict=True))
    new = [i for i, key in enumerate(keys) if key not in stored]
    kept, gone = len(keys) - len(new), len(stored.keys() - {*keys})
    told = f"{kept} images kept, {len(new)} new or changed, {gone} gone or changed"
    print(f"{index}: {told}", file=sys.stderr)
    if new:
        results = zip(*network.embed([paths[i] for i in new]), strict=True)
        stored |= zip([keys[i] for i in new], results, strict=True)
    embeddings, damaged = (list(column) for column in zip(*map(stored.get, keys), strict=True))
    if new or gone:
        columns = {"model": network.digest, "names": names, "files": states, "damaged": damaged}
        with replacing(index) as file:
            np.savez(file, embeddings=embeddings, **columns)
    return np.array(embeddings), damaged


def read_index(file: Path) -> dict[str, np.ndarray]:
    """The arrays of an index; raises a ValueError if it is another file."""
    try:
        with np.load(file) as arrays:
            columns = ("names", "files", "embeddings", "damaged")
            found = {name: arrays[name] for name in ("model", *columns)}
        if len({len(found[name]) for name in columns}) > 1 or found["files"].ndim > 1:
            raise ValueError("written by an earlier version")
    except (ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise ValueError(
            f"--index: {file} is no index of this program; name another file"
        ) from error
    return found


def same_file(one: Path, other: Path) -> bool:
    """True for links to one file, and for files of the same bytes."""
    return one.samefile(other) or (
        one.stat().st_size == other.stat().st_size and filecmp.cmp(one, other, shallow=False)
    )


@dataclass(frozen=True)
class Answer:
    """What was found for a query: the nearest images, and the same file under other names in the folder."""

    query: Path
    near: list[tuple[float, Path]]
    same: list[Path]
    verdict: str  # "known", "not sure", "unknown"; "" without thresholds
    name: str  # the class of the nearest image, or its name


class Search:
    """A folder to search; raises ValueError as `embedded` does, OSError if a file cannot be read."""

    def __init__(self, network: Network, root: Path, paths: Sequence[Path], index: Path | None):
        self.network, self.root = network, root
        embeddings, damaged = embedded(network, root, paths, index)
        for problem in filter(None, damaged):
            print(f"left out: {problem}", file=sys.stderr)
        files: dict[tuple[int, int], int] = {}  # each once, by its first name
        for i, path in enumerate(paths):
            if not damaged[i]:
                files.setdefault(((state := path.stat()).st_dev, state.st_ino), i)
        self.paths = [paths[i] for i in files.values()]
        self.embeddings = embeddings[[*files.values()]]

    def place_of(self, path: Path) -> Path | None:
        """The path of a file from the searched folder, as written or without links; None if it lies elsewhere."""
        for place, root in ((path, self.root), (path.resolve(), self.root.resolve())):
            place, root = (Path(os.path.normpath(one.absolute())) for one in (place, root))
            if place.is_relative_to(root):
                return place.relative_to(root)
        return None

    def class_of(self, path: Path) -> str | None:
        """The folder of an image below the searched one; None if it lies elsewhere, or directly in it."""
        place = self.place_of(path)
        return None if place is None or len(place.parts) < 2 else str(place.parent)

    def images_of_a_class(self) -> int | None:
        """The median over images; None if they lie in no folders of classes."""
        classes = [name for path in self.paths if (name := self.class_of(path))]
        sizes = Counter(classes)
        return int(np.median([sizes[name] for name in classes])) if classes else None

    def answer(self, query: Path, neighbours: int, judged: Judge | None) -> Answer:
        """Search for an image; raises a DatasetError if it cannot be read."""
        embedding, (problem,) = self.network.embed([query])
        if problem:
            raise DatasetError(problem)
        similarities = self.embeddings @ embedding[0]
        near, same = list[tuple[float, Path]](), list[Path]()
        for i in np.argsort(-similarities, kind="stable"):
            path = self.paths[i]
            if same_file(path, query):
                same.append(path)
            elif not any(same_file(path, other) for _, other in near):
                near.append((float(similarities[i]), path))
            if len(near) == neighbours:
                break
        inside = self.place_of(query) is not None
        first = same[0] if same and not inside else near[0][1] if near else None
        verdict = ""
        if judged is not None:
            verdict = judged.word(near[0][0]) if near else "unknown"
            verdict = "known" if same and not inside else verdict
        name = "" if first is None else self.class_of(first) or first.name
        return Answer(query, near, [] if inside else same, verdict, name)


def judge_of(
    exported: Path, images: int, own_images: int | None, rate: float | None
) -> tuple[Judge | None, str]:
    """The judge for a folder of so many images, and what is to be said of it; None without thresholds of use.

    Args:
        own_images: Of a class there.

    Raises:
        ValueError: if there is none for a rate that was asked for.
    """
    file = exported / "thresholds.json"
    stored = json.loads(file.read_text()) if file.exists() else {}
    try:
        if stored.get("identification") is None:
            raise ValueError(f'{exported} has no thresholds for "known" or "unknown"; {HOW}')
        found = judge(stored["identification"], images, rate, own_images)
    except ValueError as error:
        if rate is not None:
            raise ValueError(f"--false-positives: {error}") from error
        return None, f"No query is called known or unknown: {error}."
    if not stored.get("approximate"):
        return found, found.told()
    return found, f"{found.told()} This is approximate: a network of fewer classes was tested."


def share(text: str) -> float:
    """A `type` for argparse: a share, above 0."""
    if not 0 < (number := decimal(text)) <= 1:
        raise argparse.ArgumentTypeError(f"expected a share such as 0.01, got {text}")
    return number


def asked(paths: Sequence[Path]) -> Iterator[Path]:
    """The paths, or those on the standard input."""
    if paths:
        yield from paths
        return
    if sys.stdin.isatty():
        print("An image or a folder in each line; Ctrl-D ends.", file=sys.stderr)
    for line in map(str.strip, sys.stdin):
        if line:
            yield Path(line.strip("\"'"))


def images_in(folder: Path) -> list[Path]:
    """The images of a folder, at any depth; a link to nothing is named and left out."""
    paths = [inner / name for inner, _, images, _ in walk(folder) for name in images]
    for path in paths:
        if not path.exists():
            print(f"left out: {printable(str(path))}: is a link to nothing", file=sys.stderr)
    paths = [path for path in paths if path.exists()]
    if not paths:
        raise DatasetError(f"{folder}: holds no images")
    return paths


def picture(path: Path) -> str:
    """A thumbnail as an address that holds it."""
    image, file = read_image(path, upright=True), io.BytesIO()
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    image.save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def show(search: Search, answers: Sequence[Answer], told: str) -> str:
    """The page of the answers."""

    def figure(path: Path, **more: Any) -> dict[str, Any]:
        label = search.class_of(path) or ""
        return {"picture": picture(path), "name": path.name, "label": label, **more}

    shown = []
    for one in answers:
        own = search.class_of(one.query)
        near = [
            figure(path, similarity=similarity, right=own and search.class_of(path) == own)
            for similarity, path in one.near
        ]
        shown.append({"answer": one, "query": figure(one.query), "near": near, "own": own})
    values = {"answers": shown, "told": told}
    return fill(Path(__file__).with_suffix(".html"), **values)


def report(answer: Answer) -> None:
    told = {"known": f"known: {answer.name}", "not sure": f"not sure, perhaps {answer.name}"}
    print(printable(f"{answer.query}"))
    if answer.verdict:
        print(printable(f"  {told.get(answer.verdict, answer.verdict)}"))
    for path in answer.same:
        print(printable(f"  same file  {path}"))
    for similarity, path in answer.near:
        print(printable(f"  {similarity:.4f}  {path}"))
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Search a folder of images.")
    add = parser.add_argument
    add("exported", type=Path, help="the folder that was exported")
    add("images", type=Path, help="a folder of images, at any depth")
    words = "an image to look for, or a folder of them; default: paths on the standard input"
    add("queries", type=Path, nargs="*", metavar="query", help=words)
    add("--neighbours", type=at_least(1), default=5, help="default: 5")
    add("--html", type=Path, metavar="FILE", help="write a page, such as neighbours.html")
    words = f"share of unknown photographs that may be called known; default: {USUAL:g} or more"
    add("--false-positives", type=share, metavar="RATE", help=words)
    add("--index", type=Path, metavar="FILE.npz", help="keep the embeddings of the folder there")
    options = parser.parse_intermixed_args(arguments)
    if options.html is not None and (options.html.exists() or options.html.is_symlink()):
        parser.error(f"--html: {options.html} is there already; name a new file, or remove it")
    if (options.exported / "run.json").exists():
        parser.error(
            f"{options.exported}: is a run; export it first, by python -m benchmarks.export"
        )
    if options.index is not None and (options.index.is_dir() or not options.index.parent.is_dir()):
        parser.error(f"--index: {options.index} is a folder, or lies in none; name a file")
    try:
        paths = images_in(options.images)
        search = Search(Network(options.exported), options.images, paths, options.index)
        counts = len(search.paths), search.images_of_a_class()
        judged, told = judge_of(options.exported, *counts, options.false_positives)
    except (OSError, ValueError) as error:  # no such folder or file, or no image
        parser.error(str(error))
    print(told, file=sys.stderr)
    answers, unread = list[Answer](), 0
    for path in asked(options.queries):
        try:
            queries = images_in(path) if path.is_dir() else [path]
        except (OSError, ValueError) as error:
            queries, unread = [], unread + 1
            print(f"left out: {printable(str(error))}", file=sys.stderr)
        for query in queries:
            try:
                answers.append(search.answer(query, options.neighbours, judged))
                report(answers[-1])
            except (OSError, ValueError) as error:
                unread += 1
                print(f"left out: {printable(str(error))}", file=sys.stderr)
    if options.html is not None and answers:
        try:
            with options.html.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(show(search, answers, told))
        except OSError as error:
            parser.error(f"--html: {error}")
    return (1 if answers else 2) if unread else 0


if __name__ == "__main__":
    sys.exit(main())
