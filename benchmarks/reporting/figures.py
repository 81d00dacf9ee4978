"""The report as one HTML file that loads nothing: images are PNG inside the page, curves are SVG."""

import base64
import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import escape
from numpy.typing import NDArray
from PIL import Image

from benchmarks.console.writing import replace_file
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.records.files import damage_named
from benchmarks.records.results import Run
from benchmarks.reporting.comparison import compare, grouped
from benchmarks.reporting.curves import COLOURS, RECALLS, curves_svg
from benchmarks.reporting.templates import fill
from benchmarks.settings.yaml_files import dump

THUMBNAIL = 96  # largest side of a retrieved image, in pixels

MOST, BESIDE = 6, 5  # queries for which two networks differ, and neighbours of each

Methods = dict[str, list[Run]]


def write_html(runs: Sequence[Run], path: Path, baseline: str | None = None) -> None:
    """Write the report; arguments and errors as in `compare`."""
    comparison = compare(runs, baseline)
    methods = {label: group.runs for label, group in grouped(runs).items() if group.runs}
    page = fill(
        Path(__file__).with_name("page.html"),
        title=" vs. ".join(methods),
        comparison=comparison,
        runs=runs,
        yaml=dump,
        curves=curves(methods),
        neighbours=neighbours(methods),
    )
    replace_file(path, page.encode())


def curves(methods: Methods) -> list[str]:
    """Recall@1 on seen and on unseen classes, and the loss, over steps: those that were recorded."""
    of_tests, of_steps = (
        {label: [run.table(name) for run in members] for label, members in methods.items()}
        for name in ("evaluation", "training")
    )
    drawn = [curves_svg(of_tests, {title: RECALLS[title]}, singles=True) for title in RECALLS]
    drawn.append(curves_svg(of_steps, {"Training loss": "loss"}, singles=True))
    return [figure for figure in drawn if figure]


def neighbours(methods: Methods) -> str:
    """Queries, each with the nearest neighbours that every method found for it; a damaged file is named."""
    sections: dict[str, dict[tuple[int, str], list[dict[str, Any]]]] = {}
    for label, members in methods.items():
        path = members[0].file("retrieval.npz")
        if not path.exists():
            continue
        with damage_named(path), np.load(path) as arrays:
            found = dict(arrays)
            for row, group in enumerate(found["query_groups"].tolist()):
                # All methods share these queries; the others differ between methods.
                title = group if group == "evenly spread" else f"{group} queries of {label}"
                query = row, str(found["query_names"][row])
                answer = _answer(found, row) | {"method": label}
                sections.setdefault(title, {}).setdefault(query, []).append(answer)
    opened = {"evenly spread": "Evenly spread over the test set"}
    return _sections(sections, [*methods], opened)


def _sections(sections: Any, labels: Sequence[str], opened: Mapping[str, str]) -> str:
    looks = dict(zip(labels, enumerate(cycle(COLOURS), start=1), strict=False))
    template = Path(__file__).with_name("neighbours.html")
    return fill(template, sections=sections, looks=looks, opened=opened)


def differing_neighbours(runs: Mapping[str, Run], dataset: Glyphs | ImageSet) -> str:
    """Queries for which the nearest image of one of two networks is right and that of the other is not.

    Args:
        runs: {label: run that saved its neighbours}, the recommended one first.
        dataset: The images that the runs were tested on, with views for a reader.
    """
    labels, rank = dataset.labels.numpy(), {}
    for label, run in runs.items():
        with damage_named(path := run.file("neighbours.npz")), np.load(path) as arrays:
            queries, rank[label] = arrays["queries"], arrays["neighbours"]
    first, second = (labels[near[:, 0]] == labels[queries] for near in rank.values())
    one, other = runs
    only = {
        f"Right with {one}, wrong with {other}": (first & ~second, MOST),
        f"Right with {other}, wrong with {one}": (second & ~first, MOST // 2),
    }
    sections = {
        title: {
            (row, ""): [
                _pictures(dataset, queries[row], near[row]) | {"method": label}
                for label, near in rank.items()
            ]
            for row in _of_different_classes(differ, labels[queries])[:most]
        }
        for title, (differ, most) in only.items()
        if differ.any()
    }
    both, neither = np.sum(first & second), np.sum(~first & ~second)
    alone = (np.sum(differ) for differ, _ in only.values())
    told = ", ".join(f"{n} with {label} alone" for n, label in zip(alone, runs, strict=True))
    shown = ""
    if sections:
        shown = _sections(sections, [*runs], opened={title: title for title in sections})
    return (
        f"<p>Of {len(queries)} images of classes that no training has seen, {both} have a nearest neighbour of "
        f"their own class with both networks, {escape(told)}, and {neither} with neither.</p>\n{shown}"
    )


def shown_neighbours(
    dataset: Glyphs | ImageSet,
    label: str,
    queries: Mapping[str, Sequence[tuple[int, NDArray[Any]]]],
) -> str:
    """Queries with their nearest images, by the titles of their sections."""
    sections = {
        title: {
            (int(row), ""): [_pictures(dataset, row, near) | {"method": label}]
            for row, near in members
        }
        for title, members in queries.items()
    }
    return _sections(sections, [label], opened={title: title for title in sections})


def _of_different_classes(chosen: NDArray[np.bool_], classes: NDArray[Any]) -> list[int]:
    """The chosen rows, the first one of each class before the others."""
    rows = np.flatnonzero(chosen)
    _, firsts = np.unique(classes[rows], return_index=True)
    order = [*np.sort(firsts), *np.setdiff1d(np.arange(len(rows)), firsts)]
    return [int(rows[place]) for place in order]


def _pictures(dataset: Glyphs | ImageSet, query: int, near: NDArray[Any]) -> dict[str, Any]:
    """A query and its neighbours, as pictures with texts."""

    def shown(row: int, kind: str) -> tuple[str, str]:
        name = dataset.class_names[int(dataset.labels[row])]
        picture = _png(dataset.to_picture(dataset[int(row)][0]))
        return picture, f"{kind}: {dataset.name(int(row))}, class {name}"

    return {
        "query": shown(query, "query"),
        "neighbours": [
            (*shown(row, f"neighbour {i}"), bool(dataset.labels[row] == dataset.labels[query]))
            for i, row in enumerate(near[:BESIDE], start=1)
        ],
    }


def _answer(found: Mapping[str, NDArray[Any]], row: int) -> dict[str, Any]:
    """A query and its neighbours, as pictures with texts."""
    of, name, precision = (found[f"query_{key}"][row] for key in ("labels", "names", "precision"))
    about = f", average precision {100 * precision:.1f} %" if np.isfinite(precision) else ""
    columns = (found[f"neighbour_{key}"][row] for key in ("labels", "names", "images"))
    return {
        "query": (_png(found["query_images"][row]), f"query: {name}, class {of}{about}"),
        "neighbours": [
            (_png(image), f"neighbour {i}: {neighbour}, class {label}", bool(label == of))
            for i, (label, neighbour, image) in enumerate(zip(*columns, strict=True), start=1)
        ],
    }


def _png(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
