"""Pictures of queries and of their nearest neighbours, from the rows that runs have saved."""

import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import escape
from numpy.typing import NDArray
from PIL import Image

from benchmarks.building.images import build_datasets
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.datasets.transforms import ImageViews
from benchmarks.records.files import damage_named
from benchmarks.records.results import Run
from benchmarks.records.run_folder import NEIGHBOURS
from benchmarks.reporting.curves import COLOURS
from benchmarks.reporting.templates import fill
from benchmarks.settings.command import parse
from benchmarks.settings.errors import ConfigError

THUMBNAIL = 96  # largest side of a shown image, in pixels

SPREAD, EXTREMES = 8, 4
"""Queries of a report: evenly spread ones, and the best and the worst of a method."""

MOST, BESIDE = 6, 5  # queries for which two networks differ, and neighbours of each

Images = Glyphs | ImageSet


class Neighbours(NamedTuple):
    """Queries and their neighbours, as a run saved them: rows of its test set."""

    queries: NDArray[Any]  # (q,)
    near: NDArray[Any]  # (q, k), the nearest first
    precision: NDArray[Any]  # (q,) average precision; NaN in files of older code


def saved_by(run: Run) -> Neighbours:
    """The queries of a run and their neighbours; a damaged file is named."""
    with damage_named(path := run.file(NEIGHBOURS)), np.load(path) as arrays:
        queries, near = arrays["queries"], arrays["neighbours"]
        unknown = np.full(len(queries), np.nan)
        return Neighbours(queries, near, arrays.get("precision", unknown))


def report_neighbours(
    methods: Mapping[str, Sequence[Run]], images: Images | None = None
) -> dict[str, str]:
    """Queries with the neighbours that each method's first run found: {title: HTML}, as far as they were saved.

    Args:
        images: Those of the test; default: where the runs found them.
    """
    firsts = {label: runs[0] for label, runs in methods.items()}
    saved = {label: saved_by(run) for label, run in firsts.items() if run.file(NEIGHBOURS).exists()}
    run = next(iter(firsts.values()))
    if saved and images is None and (config := run.file("config.yaml")).is_file():
        with suppress(ConfigError):
            data = parse([f"--config={config}"]).experiment.data
            there = build_datasets(data, seed=run.seed).test
            images = there if there.fingerprint == run.info["data"].get("fingerprint") else None
    if not saved or images is None:
        return {}
    first, labels = next(iter(saved.values())), images.labels.numpy()
    spread = np.linspace(0, len(first.queries) - 1, SPREAD).astype(int)
    chosen = {"Evenly spread over the test set": [*dict.fromkeys(spread.tolist())]}
    for label, (queries, _, precision) in saved.items():
        for word, order in (("Best", np.argsort(-precision)), ("Worst", np.argsort(precision))):
            known = order[~np.isnan(precision[order])]
            rows = firsts_of_classes(known, labels[queries])[:EXTREMES]
            chosen[f"{word} queries of {label}, by average precision, one of a class"] = rows
    return {title: pictures(images, saved, {"": rows}) for title, rows in chosen.items() if rows}


def differing_neighbours(runs: Mapping[str, Run], dataset: Images) -> str:
    """Queries for which the nearest image of one of two networks, the recommended one first, is right alone."""
    labels, saved = dataset.labels.numpy(), {label: saved_by(run) for label, run in runs.items()}
    queries = next(iter(saved.values())).queries
    first, second = (labels[near[:, 0]] == labels[queries] for _, near, _ in saved.values())
    new, old = runs
    only = {
        f"Right with {new}, wrong with {old}": (first & ~second, MOST),
        f"Right with {old}, wrong with {new}": (second & ~first, MOST // 2),
    }
    sections = {
        title: firsts_of_classes(np.flatnonzero(differ), labels[queries])[:most]
        for title, (differ, most) in only.items()
    }
    both, neither = np.sum(first & second), np.sum(~first & ~second)
    alone = (np.sum(differ) for differ, _ in only.values())
    told = ", ".join(f"{n} with {label} alone" for n, label in zip(alone, runs, strict=True))
    return (
        f"<p>Of {len(queries)} images of classes that no training has seen, {both} have a nearest neighbour of "
        f"their own class with both networks, {escape(told)}, and {neither} with neither.</p>\n"
        f"{pictures(dataset, saved, sections)}"
    )


def pictures(
    dataset: Images, saved: Mapping[str, Neighbours], sections: Mapping[str, Sequence[int]]
) -> str:
    """Queries with the neighbours that each network found, in HTML; empty if there are none.

    Args:
        saved: By the name of the network; all have the same queries.
        sections: By title, places in the arrays of `saved`.
    """
    if not any(sections.values()):
        return ""
    if isinstance(dataset, ImageSet):  # as large as they are shown, and nothing cut off
        dataset, side, ones = copy(dataset), THUMBNAIL, (1.0, 1.0, 1.0)
        dataset.views = ImageViews(image_size=side, resize=side, mean=(0.0, 0.0, 0.0), std=ones)

    def shown(row: int, kind: str) -> tuple[str, str]:
        name = dataset.class_names[int(dataset.labels[row])]
        picture = _png(dataset.to_picture(dataset[int(row)][0]))
        return picture, f"{kind}: {dataset.name(int(row))}, class {name}"

    def answers(place: int) -> tuple[tuple[str, str], dict[str, Any]]:
        query = next(iter(saved.values())).queries[place]
        found: dict[str, Any] = {label: [] for label in saved}
        for label, (queries, near, _) in saved.items():
            for number, row in enumerate(near[queries == query].flat[:BESIDE], start=1):
                kind = "right" if dataset.labels[row] == dataset.labels[query] else "wrong"
                found[label].append((kind, shown(row, f"{kind}, neighbour {number}")))
        return shown(query, "query"), found

    return fill(
        Path(__file__).with_suffix(".html"),
        looks=dict(zip(saved, enumerate(cycle(COLOURS), start=1), strict=False)),
        sections={title: [*map(answers, rows)] for title, rows in sections.items() if rows},
    )


def firsts_of_classes(rows: NDArray[Any], classes: NDArray[Any]) -> list[int]:
    """Rows in their order, the first one of each class before the others."""
    _, firsts = np.unique(classes[rows], return_index=True)
    order = [*np.sort(firsts), *np.setdiff1d(np.arange(len(rows)), firsts)]
    return [int(rows[place]) for place in order]


def _png(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
