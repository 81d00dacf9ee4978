"""Searches a folder of images with a network that `python -m benchmarks.export` wrote.

    python examples/search_folder.py EXPORTED IMAGES QUERY [QUERY ...] [--neighbours 5] [--html FILE]

Prints for each query the nearest images, without the query itself, and their distances, 0 to 2, between embeddings
of length one; --html also shows them on a page that needs no other file. Images are found and read as in a training
on a folder: links are followed, hidden files left out, photographs turned upright, as EXIF says. A damaged image is
named and left out. Trunks that timm lacks, GoogLeNet and BN-Inception, need `benchmarks.backbones.register()` here.
"""

import argparse
import base64
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

import timm
import torch
from PIL import Image
from pytorch_metric_learning.utils.inference import InferenceModel
from torch import Tensor
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.console import at_least
from benchmarks.datasets import DatasetError, read_image, walk

THUMBNAIL = 160  # pixels of its longer side

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Nearest images</title>
<meta name="viewport" content="width=device-width">
<style>
:root { color-scheme: light dark; }
:root { --ink: #1c1e21; --soft: #59636e; --rule: #d9dde3; --same: #007d5b; --other: #c25500; }
@media (prefers-color-scheme: dark) {
:root { --ink: #e6edf3; --soft: #a5aeb8; --rule: #30363d; --same: #2fc79a; --other: #ff8c3a; }
body { background: #0d1117; }
}
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5rem; color: var(--ink); }
section { display: flex; flex-wrap: wrap; gap: .75rem; padding: 1rem 0; border-top: 1px solid var(--rule); }
figure { margin: 0; width: 160px; overflow-wrap: anywhere; }
figure:first-child { margin-right: 1rem; }
img { border-radius: 4px; border-bottom: 4px solid transparent; }
.same img { border-color: var(--same); } .other img { border-color: var(--other); }
small { color: var(--soft); }
</style>
<h1>Nearest images</h1>
<p>Left the query, then the nearest images, the nearest first, each with its folder, its name and its distance, from
0 to 2. Of a query from the same folder of images: green for an image of its class, orange for another.</p>
"""


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
    """HTML of a thumbnail with its class, its name and a text below."""
    picture, file = read_image(path, upright=True), io.BytesIO()
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(file, "JPEG")
    source = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    name, label = escape(path.name), escape(class_of(path, images) or "")
    caption = f"<b>{label}</b><br><small>{name}<br>{text}</small>"
    return f'<figure class="{kind}"><img src="{source}" alt=""><br>{caption}</figure>\n'


def class_of(path: Path, images: Path) -> str | None:
    """The folder of an image below the folder of all images; None if it lies elsewhere, or directly in it."""
    folder = path.absolute().parent
    inside = folder.is_relative_to(images.absolute()) and folder != images.absolute()
    return str(folder.relative_to(images.absolute())) if inside else None


def search(
    exported: Path, paths: Sequence[Path], queries: Sequence[Path], neighbours: int
) -> Iterator[list[tuple[float, Path]]]:
    """Distances and paths of the nearest images of each query, the nearest first.

    Raises:
        OSError: if the exported folder cannot be read.
        DatasetError: if a query cannot be read.
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
    model.train_knn(known)
    for problem in known.damaged.values():
        print(f"left out: {problem}", file=sys.stderr)
    count = min(neighbours + len(known.damaged), len(paths))
    squared, found = model.get_nearest_neighbors(sought, count)
    for row, rank in zip(squared.clamp(min=0).sqrt().tolist(), found.tolist(), strict=True):
        near = zip(row, rank, strict=True)
        yield [(distance, paths[i]) for distance, i in near if i not in known.damaged][:neighbours]


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
    options = parser.parse_args(arguments)
    if options.html is not None and (options.html.exists() or options.html.is_symlink()):
        parser.error(f"--html: {options.html} is there already; name a new file, or remove it")
    try:
        paths = [folder / name for folder, _, images, _ in walk(options.images) for name in images]
        if not paths:
            parser.error(f"{options.images}: holds no images")
        results = [*search(options.exported, paths, options.queries, options.neighbours + 1)]
    except (DatasetError, OSError) as error:  # no such folder or file, or no image
        parser.error(str(error))
    page = PAGE
    for query, near in zip(options.queries, results, strict=True):
        print(query)
        page += f"<section>\n{figure(query, options.images, 'query')}"
        own = class_of(query, options.images)
        others = [(distance, path) for distance, path in near if not path.samefile(query)]
        for distance, path in others[: options.neighbours]:
            print(f"  {distance:.4f}  {path}")
            same = "same" if class_of(path, options.images) == own else "other" if own else ""
            page += figure(path, options.images, f"{distance:.4f}", same)
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
