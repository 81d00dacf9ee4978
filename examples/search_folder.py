"""Searches a folder of images with a network that `python -m benchmarks.export` wrote.

    python examples/search_folder.py EXPORTED IMAGES QUERY [QUERY ...] [--neighbours 5] [--html FILE]

Prints for each query the nearest images, without the query itself, and their distances, 0 to 2, between embeddings
of length one; --html also shows them on a page that needs no other file. Photographs are turned upright, as EXIF
says. Trunks that timm lacks, GoogLeNet and BN-Inception, need `benchmarks.backbones.register()` here.
"""

import argparse
import base64
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

import timm
import torch
from PIL import Image, ImageOps
from pytorch_metric_learning.utils.inference import InferenceModel
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # of those endings; nothing else is opened

THUMBNAIL = 160  # pixels of its longer side

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Nearest images</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5rem; color: #1c1e21; background: #fff; }
section { display: flex; flex-wrap: wrap; gap: .75rem; padding: 1rem 0; border-top: 1px solid #d9dde3; }
figure { margin: 0; width: 160px; overflow-wrap: anywhere; }
figure:first-child { margin-right: 1rem; font-weight: 600; }
</style>
<h1>Nearest images</h1>
<p>Left the query, then the nearest images and their distances, the nearest first.</p>
"""


class Images(Dataset[tuple[Tensor, int]]):
    """Image files as the network sees them, upright by their EXIF, with a label, which PML expects and ignores."""

    def __init__(self, paths: Sequence[Path], view: Callable[[Image.Image], Tensor], mode: str):
        self.paths, self.view, self.mode = paths, view, mode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.view(read(self.paths[index], self.mode)), 0


def read(path: Path, mode: str) -> Image.Image:
    """An image file, turned upright."""
    with Image.open(path, formats=FORMATS) as image:
        upright = image
        with suppress(Exception):  # damaged EXIF
            upright = ImageOps.exif_transpose(image)
        return upright.convert(mode)


def figure(path: Path, text: str) -> str:
    """HTML of a thumbnail with its path and a text below."""
    picture, file = read(path, "RGB"), io.BytesIO()
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(file, "JPEG")
    source = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    return f'<figure><img src="{source}" alt=""><br>{escape(str(path))}<br>{text}</figure>\n'


def search(
    exported: Path, paths: Sequence[Path], queries: Sequence[Path], neighbours: int
) -> tuple[Tensor, Tensor]:
    """Squared distances and indices into `paths`, (queries, neighbours), the nearest first."""
    network = timm.create_model(f"local-dir:{exported}", pretrained=True)
    config = timm.data.resolve_model_data_config(network)
    view = timm.data.create_transform(**config)
    mode = "RGB" if config["input_size"][0] == 3 else "L"
    sought = torch.stack([image for image, _ in Images(queries, view, mode)])
    model = InferenceModel(network, data_device="cpu")
    model.train_knn(Images(paths, view, mode))
    return model.get_nearest_neighbors(sought, min(neighbours, len(paths)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Search a folder of images.")
    parser.add_argument("exported", type=Path, help="the folder that was exported")
    parser.add_argument("images", type=Path, help="a folder of images, at any depth")
    parser.add_argument(
        "queries", type=Path, nargs="+", metavar="query", help="an image to look for"
    )
    parser.add_argument("--neighbours", type=int, default=5, help="default: 5")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page of the images, such as neighbours.html",
    )
    options = parser.parse_args(arguments)
    if options.html is not None and (options.html.exists() or options.html.is_symlink()):
        parser.error(f"--html: {options.html} is there already; name a new file, or remove it")
    paths = sorted(p for p in options.images.rglob("*") if p.suffix.lower() in IMG_EXTENSIONS)
    if not paths:
        parser.error(f"{options.images}: holds no images")

    try:
        squared, found = search(options.exported, paths, options.queries, options.neighbours + 1)
    except OSError as error:  # no such folder or file, or no image
        parser.error(str(error))
    page = PAGE
    for query, row, rank in zip(options.queries, squared.clamp(min=0).sqrt(), found, strict=True):
        print(query)
        page += f"<section>\n{figure(query, '')}"
        near = zip(row.tolist(), (paths[index] for index in rank.tolist()), strict=True)
        others = [(distance, path) for distance, path in near if not path.samefile(query)]
        for distance, path in others[: options.neighbours]:
            print(f"  {distance:.4f}  {path}")
            page += figure(path, f"{distance:.4f}")
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
