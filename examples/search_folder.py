"""Searches a folder of images with a network that `python -m benchmarks.export` wrote.

    python examples/search_folder.py EXPORTED IMAGES QUERY [QUERY ...] [--neighbours 5] [--html FILE]
        [--false-accepts 0.001] [--index FILE.npz]

Prints for each query the nearest images, without the query itself, and their similarities: cosines of -1 to 1. If
the export has thresholds, it says "same" of an image that is of the query's class with as few false accepts as
chosen, and else "not sure". --html also shows the images on a page that needs no other file; --index keeps the
embeddings of the folder for the next time. Images are found and read as in a training on a folder: links are
followed, hidden files left out, photographs turned upright, as EXIF says. A damaged image is named and left out.
Trunks that timm lacks, GoogLeNet and BN-Inception, need `benchmarks.backbones.register()` here.
"""

import argparse
import base64
import hashlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import timm
import torch
from PIL import Image
from pytorch_metric_learning.utils.inference import InferenceModel
from torch import Tensor
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.console import at_least, replacing
from benchmarks.datasets import DatasetError, read_image, walk

THUMBNAIL = 160  # pixels of its longer side

USUAL = 0.001  # false accepts, unless they are chosen

HOW = "train with --evaluation.verification=true, on enough test images, and export that run"

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Nearest images</title>
<meta name="viewport" content="width=device-width">
<style>
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #59636e; --rule: #d9dde3; --ground: #fff;
  --same: #007d5b; --other: #c25500; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #a5aeb8; --rule: #30363d; --ground: #0d1117;
  --same: #2fc79a; --other: #ff8c3a; } }
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5rem; color: var(--ink); background: var(--ground); }
p { max-width: 45rem; }
section { display: grid; grid-template-columns: repeat(auto-fill, minmax(140px, 160px)); gap: 1rem .75rem;
  padding: 1rem 0; border-top: 1px solid var(--rule); }
figure { margin: 0; overflow-wrap: anywhere; }
img { display: block; max-width: 100%; height: auto; margin-bottom: .3rem; border-radius: 4px;
  border-bottom: 4px solid transparent; }
.same img { border-color: var(--same); } .other img { border-color: var(--other); }
.verdict { padding: 0 .4em; border: 1px solid var(--soft); border-radius: 4px; color: var(--soft); }
.yes { border-color: var(--ink); background: var(--ink); color: var(--ground); font-weight: 600; }
small { color: var(--soft); }
</style>
<h1>Nearest images</h1>
"""
ABOUT = (
    "First the query, then the nearest images, the nearest first, each with its similarity, from -1 to 1, its "
    "folder and its name. If the query is in the searched folder: a green line below an image of its class, an "
    "orange one below another."
)


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


def figure(path: Path, images: Path, text: str, kind: str = "query") -> str:
    """HTML of a thumbnail with a text, its class and its name below."""
    picture, file = read_image(path, upright=True), io.BytesIO()
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(file, "JPEG")
    source = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    name, label = escape(path.name), escape(class_of(path, images) or "")
    caption = f"{text}<br><b>{label}</b><br><small>{name}</small>"
    return f'<figure class="{kind}"><img src="{source}" alt="">{caption}</figure>\n'


def class_of(path: Path, images: Path) -> str | None:
    """The folder of an image below the folder of all images; None if it lies elsewhere, or directly in it."""
    folder = path.absolute().parent
    inside = folder.is_relative_to(images.absolute()) and folder != images.absolute()
    return str(folder.relative_to(images.absolute())) if inside else None


def threshold(exported: Path, rate: float | None) -> tuple[float, float] | None:
    """The share of false accepts and its least similarity, as the export stores them; None without any.

    Raises:
        ValueError: if the rate is not one of the stored.
    """
    file = exported / "thresholds.json"
    rows = json.loads(file.read_text())["rates"] if file.exists() else []
    found = {row["false_accepts"]: row["threshold"] for row in rows if row["threshold"] is not None}
    if rate is None and found:
        rate = min((stored for stored in found if stored >= USUAL), default=max(found))
    if rate is not None and rate not in found:
        stored = ", ".join(f"{one:g}" for one in found)
        raise ValueError(
            f"--false-accepts: {exported} has a threshold for {stored}, not for {rate:g}"
            if found
            else f"--false-accepts: {exported} has no thresholds; {HOW}"
        )
    return None if rate is None else (rate, found[rate])


def digest(exported: Path) -> str:
    """SHA-256 of an exported model."""
    files = (exported / name for name in ("config.json", "model.safetensors"))
    return hashlib.sha256(
        b"".join(hashlib.sha256(f.read_bytes()).digest() for f in files)
    ).hexdigest()


def embedded(
    model: InferenceModel, known: Images, about: dict[str, np.ndarray], index: Path | None
) -> Tensor:
    """The embeddings of a folder's images: from the index if it is of this model and these files, else put there.

    Args:
        about: What the embeddings depend on: the model's digest; names, sizes and times of the files.

    Raises:
        ValueError: if the index is a file of another kind.
    """
    if index is not None and index.exists():
        try:
            with np.load(index) as arrays:
                kept = {name: arrays[name] for name in (*about, "embeddings", "damaged")}
        except (ValueError, KeyError, EOFError, BadZipFile) as error:
            raise ValueError(
                f"--index: {index} is no index of this program; name another file"
            ) from error
        others = [name for name in about if not np.array_equal(kept[name], about[name])]
        if not others:
            print(
                f"{index}: embeddings of {len(known)} images, kept from an earlier search",
                file=sys.stderr,
            )
            known.damaged |= {i: why for i, why in enumerate(kept["damaged"].tolist()) if why}
            return torch.from_numpy(kept["embeddings"])
        what = "of another model" if "model" in others else "of other images, or they have changed"
        print(f"{index}: is {what}; it is made anew", file=sys.stderr)
    embeddings: Tensor = model.get_embeddings_from_tensor_or_dataset(known, batch_size=64)
    if index is not None:
        damaged = np.array([known.damaged.get(i, "") for i in range(len(known))])
        with replacing(index) as file:
            np.savez(file, embeddings=embeddings.numpy(), damaged=damaged, **about)
    return embeddings


def search(
    exported: Path,
    images: Path,
    paths: Sequence[Path],
    queries: Sequence[Path],
    neighbours: int,
    index: Path | None,
) -> list[list[tuple[float, Path]]]:
    """Similarities and paths of the nearest images of each query, the nearest first.

    Raises:
        OSError: if the exported folder cannot be read.
        DatasetError: if a query cannot be read.
        ValueError: if the index is a file of another kind.
    """
    network = timm.create_model(f"local-dir:{exported}", pretrained=True)
    config = timm.data.resolve_model_data_config(network)
    view = timm.data.create_transform(**config)
    mode = "RGB" if config["input_size"][0] == 3 else "L"
    asked, known = Images(queries, view, mode), Images(paths, view, mode)
    sought = torch.stack([image for image, _ in asked])
    for problem in asked.damaged.values():
        raise DatasetError(problem)
    model = InferenceModel(network, data_device="cpu")
    states = [path.stat() for path in paths]
    about = {
        "model": np.array(digest(exported)),
        "names": np.array([path.relative_to(images).as_posix() for path in paths]),
        "files": np.array([(state.st_size, state.st_mtime_ns) for state in states]),
    }
    embeddings = embedded(model, known, about, index)
    for problem in known.damaged.values():
        print(f"left out: {problem}", file=sys.stderr)
    similarities = model.get_embeddings(sought) @ embeddings.T
    similarities[:, [*known.damaged]] = -torch.inf
    count = min(neighbours, len(paths) - len(known.damaged))
    best, found = similarities.topk(count, dim=1)
    return [
        [(similarity, paths[i]) for similarity, i in zip(row, places, strict=True)]
        for row, places in zip(best.tolist(), found.tolist(), strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Search a folder of images.")
    parser.add_argument("exported", type=Path, help="the folder that was exported")
    parser.add_argument("images", type=Path, help="a folder of images, at any depth")
    parser.add_argument(
        "queries", type=Path, nargs="+", metavar="query", help="an image to look for"
    )
    parser.add_argument("--neighbours", type=at_least(1), default=5, help="default: 5")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page of the images, such as neighbours.html",
    )
    parser.add_argument(
        "--false-accepts",
        type=float,
        metavar="RATE",
        help="share of the pairs of two classes that may be called the same; one that the export stores, "
        f"default: {USUAL:g}, or the next larger one",
    )
    parser.add_argument(
        "--index", type=Path, metavar="FILE.npz", help="keep the embeddings of the folder there"
    )
    options = parser.parse_args(arguments)
    if options.html is not None and (options.html.exists() or options.html.is_symlink()):
        parser.error(f"--html: {options.html} is there already; name a new file, or remove it")
    if (options.exported / "run.json").exists():
        parser.error(
            f"{options.exported}: is a run; export it first, by python -m benchmarks.export"
        )
    if options.index is not None and (options.index.is_dir() or not options.index.parent.is_dir()):
        parser.error(f"--index: {options.index} is a folder, or lies in none; name a file")
    try:
        paths = [folder / name for folder, _, images, _ in walk(options.images) for name in images]
        if not paths:
            parser.error(f"{options.images}: holds no images")
        chosen = threshold(options.exported, options.false_accepts)
        folders = options.exported, options.images
        asked = options.queries, options.neighbours + 1, options.index
        results = search(*folders, paths, *asked)
    except (DatasetError, OSError, ValueError) as error:  # no such folder or file, or no image
        parser.error(str(error))
    if chosen is None:
        told = f'No thresholds in {options.exported}. For "same" or "not sure": {HOW}.'
    else:
        rate, least = chosen
        told = (
            f'"same": the similarity is at least {least:.3f}, as for at most {100 * rate:g} % of the pairs of two '
            'classes in the test that measured it; else "not sure".'
        )
    print(told, file=sys.stderr)
    page = f"{PAGE}<p>{ABOUT}</p>\n<p>{escape(told)}</p>\n"
    for query, near in zip(options.queries, results, strict=True):
        print(query)
        page += f"<section>\n{figure(query, options.images, 'query')}"
        own = class_of(query, options.images)
        others = [(similarity, path) for similarity, path in near if not path.samefile(query)]
        for similarity, path in others[: options.neighbours]:
            line, text = f"  {similarity:.4f}", f"{similarity:.3f}"
            if chosen is not None:
                yes = similarity >= chosen[1]
                verdict = "same" if yes else "not sure"
                line += f"  {verdict:8}"
                text += f' <span class="verdict{" yes" if yes else ""}">{verdict}</span>'
            print(f"{line}  {path}")
            same = "same" if class_of(path, options.images) == own else "other" if own else ""
            page += figure(path, options.images, text, same)
        page += "</section>\n"
    if options.html is not None:
        try:
            with options.html.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(page)
        except OSError as error:
            parser.error(f"--html: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
