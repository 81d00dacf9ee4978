"""Pictures from a run's saved files: deep features by t-SNE, and retrieved images."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from PIL import Image
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from benchmarks.reporting.drawing import COLOURS, short

PERPLEXITY, T_SNE_STEPS = 30, 350  # scikit-learn's default; more steps do not keep more neighbours

THUMBNAIL = 96  # largest side of a retrieved image, in pixels

RIGHT, WRONG = (0, 158, 115), (213, 94, 0)  # of COLOURS

# A class of Glyphs, which looks like a damaged name.
REPLACEMENT = ("\N{REPLACEMENT CHARACTER}", "(replacement)")

Floats = NDArray[np.floating]
Saved = dict[str, NDArray[Any]]


def saved(path: Path) -> Saved:
    """The arrays of an npz file; {} if there is none."""
    if not path.exists():
        return {}
    with path.open("rb") as file, np.load(file) as arrays:
        found = dict(arrays)
    for name, of in found.items():
        if of.dtype.kind == "U":  # np.strings.replace cuts the longer words off
            words = [word.replace(*REPLACEMENT) for word in of.ravel().tolist()]
            found[name] = np.array(words, dtype=np.str_).reshape(of.shape)
    return found


def t_sne(points: Floats) -> Floats | None:
    """Places (n, 2) of points (n, D); None if these are too few, one-dimensional, all equal or not finite."""
    points = points.astype(np.float32)
    if len(points) < 4 or points.shape[1] < 2 or not np.ptp(points, axis=0).max() > 0:
        return None
    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    how = {"init": "pca", "perplexity": perplexity, "max_iter": T_SNE_STEPS, "random_state": 0}
    with threadpool_limits(1):  # several threads wait for each other: 15 s instead of 1
        places: Floats = TSNE(**how).fit_transform(points)
    return places


def places_of_features(found: Saved) -> dict[str, Floats]:
    """Places of "features", "means" and "thinned" on one map; {} if t-SNE cannot place them."""
    parts = {name: found[name] for name in ("features", "means", "thinned")}
    places = t_sne(np.concatenate([*parts.values()]))
    if places is None:
        return {}
    ends = np.cumsum([len(part) for part in parts.values()])[:-1]
    return dict(zip(parts, np.split(places, ends), strict=True))


def draw_features(axes: Axes, found: Saved, places: dict[str, Floats], stars: str) -> None:
    """Draw deep features as points and their "means" or "thinned" means as stars, coloured by class."""
    for label, name in enumerate(found["class_names"]):
        colour = COLOURS[label]
        points = places["features"][found["feature_labels"] == label]
        axes.plot(*points.T, ".", color=colour, alpha=0.8, markersize=5, markeredgewidth=0)
        look = {"markersize": 9, "markeredgecolor": "black", "markeredgewidth": 0.4, "zorder": 3}
        of = places[stars][found["labels"] == label]
        axes.plot(*of.T, "*", color=colour, label=short(name), **look)
    axes.set(xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2")


def retrieval_rows(found: Saved, queries: int, neighbours: int) -> NDArray[np.uint8]:
    """Pixels (h, w, 3): evenly spread queries and their nearest neighbours, with a strong frame if of its class."""
    rows = np.flatnonzero(found["query_groups"] == "evenly spread")[:queries]
    lines = []
    for row in rows:
        right = found["neighbour_labels"][row] == found["query_labels"][row]
        cells = [_framed(found["query_images"][row], None)]
        for image, same in zip(found["neighbour_images"][row], right.tolist(), strict=True):
            cells.append(_framed(image, same))
        lines.append(np.concatenate(cells[: neighbours + 1], axis=1))
    return np.concatenate(lines)


def _framed(pixels: NDArray[np.uint8], right: bool | None) -> NDArray[np.uint8]:
    image = Image.fromarray(pixels).convert("RGB")
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    edge = max(2, image.width // 16)
    framed = Image.new("RGB", (image.width + 4 * edge, image.height + 4 * edge), "white")
    if right is not None:
        wide = edge if right else edge // 2
        start = 2 * edge - wide
        framed.paste(
            RIGHT if right else WRONG, (start, start, framed.width - start, framed.height - start)
        )
    framed.paste(image, (2 * edge, 2 * edge))
    return np.asarray(framed)
