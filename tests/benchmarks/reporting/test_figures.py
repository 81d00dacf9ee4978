"""The report's pictures: what is drawn where, and that what cannot be drawn is left out."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.records import write_json
from benchmarks.records.results import Run
from benchmarks.reporting import drawing, figures, pictures
from benchmarks.reporting.figures import confusion, deep_features, retrieval_grids, saved_pictures

BASE = {"loss": {"class_path": "some.BaseLoss"}, "weight": 1.0}


def run(folder: Path, label: str = "base", recall: float = 0.5, **info: Any) -> Run:
    defaults = {"seed": 0, "data": {"split": "test"}, "metrics": {"recall_at_1": recall}}
    return Run(folder, {"label": label, "config": {"losses": [BASE]}, **defaults, **info})


def markers(svg: str, colour: str = "") -> list[tuple[float, float]]:
    """Where markers of a colour stand, in points from the upper left corner."""
    pattern = r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill: ([^;"]+)'
    found = re.findall(pattern, svg)
    return [(float(x), float(y)) for x, y, fill in found if fill.startswith(colour)]


def test_more_methods_than_colours_can_be_told_apart() -> None:
    methods = {str(i): [] for i in range(36)}
    assert len({figures._style(methods, label) for label in methods}) == 36


def test_a_label_with_an_underscore_stands_in_the_key(tmp_path: Path) -> None:
    figure, axes = drawing.new_figure("x", "y")
    axes.plot([1, 2], label=drawing.plain("_base"))
    assert "_base</text>" in drawing.figure_html(figure, "t", "c")


# -------------------------------------------------------------------------------- features and stars


def clusters(count: int, dim: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """`count` points in each of six clusters far from each other."""
    rng = np.random.default_rng(0)
    labels = np.arange(6).repeat(count)
    return (20 * rng.normal(size=(6, dim))[labels] + rng.normal(size=(6 * count, dim))), labels


def save_features(folder: Path, **changes: Any) -> Run:
    points, of = clusters(10)
    stars, labels = clusters(5)
    saved = {
        "features": points,
        "feature_labels": of,
        "means": stars,
        "thinned": stars + 0.1,
        "labels": labels,
        "class_names": np.array(["<A>", "B$1$", "C", "D", "E", "F" * 50]),
        "positions": np.array(16),
        "thinned_positions": np.array(3),
    }
    saved |= changes
    floats = ("features", "means", "thinned")
    np.savez(
        folder / "features.npz",
        **{k: v.astype(np.float16) if k in floats else v for k, v in saved.items()},
    )
    return run(folder)


def test_deep_features_and_their_means_are_drawn(tmp_path: Path) -> None:
    page = deep_features(save_features(tmp_path))
    assert '<svg role="img" aria-label="Deep features and their means: base"' in page
    counts = [len(markers(page, colour.lower())) for colour in drawing.COLOURS]
    assert counts == [2 * (10 + 5) + 1] * 6, "points and stars in two panels, and the key"
    texts = re.findall(r">([^<>]+)</text>", page)
    for text in ("a  means of all features", "&lt;A&gt;", "B$1$", "F" * 21 + "…"):
        assert texts.count(text) == 1
    for words in (
        "Seed 0: 30 images of 6 training classes, as in HORDE&#39;s Figure 1",
        "Points: 2 of the 16 deep features of each image",
        "over all, and over 3 of them, on the same map",
    ):
        assert words in page


def test_t_sne_keeps_neighbours() -> None:
    points, labels = clusters(10)
    places = pictures.t_sne(points)
    assert places is not None
    assert places.shape == (60, 2)
    distances = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    assert (labels[distances.argmin(axis=1)] == labels).all()
    np.testing.assert_array_equal(places, pictures.t_sne(points))


@pytest.mark.parametrize(
    "points",
    [
        np.ones((3, 4)),
        np.arange(20.0)[:, None],
        np.ones((20, 4)),
        np.zeros((20, 4)),
        np.full((20, 4), np.nan),
    ],
)
def test_what_t_sne_cannot_place_is_left_out(points: np.ndarray) -> None:
    assert pictures.t_sne(points) is None


@pytest.mark.parametrize("shape", [(4, 2), (5, 300), (20, 2)])
def test_t_sne_of_few_points(shape: tuple[int, int]) -> None:
    places = pictures.t_sne(np.random.default_rng(0).normal(size=shape).round())
    assert places is not None
    assert np.isfinite(places).all()


def test_features_of_older_code_are_left_out(tmp_path: Path) -> None:
    older = save_features(tmp_path)
    with np.load(tmp_path / "features.npz") as file:
        np.savez(tmp_path / "features.npz", **{n: file[n] for n in file if n != "means"})
    assert deep_features(older) == ""


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    for content in (b"", b"text", b"PK\3\4 cut off"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"features.npz: is damaged \(.*run that training"):
            saved_pictures(run(tmp_path))


def test_no_features_no_figure(tmp_path: Path) -> None:
    assert deep_features(run(tmp_path)) == ""
    flat = {"means": np.ones((30, 1)), "thinned": np.ones((30, 1))}
    assert deep_features(save_features(tmp_path, features=np.ones((60, 1)), **flat)) == ""


# ----------------------------------------------------------------------------- confusions, neighbours


def test_confused_classes(tmp_path: Path) -> None:
    found = {
        "pairs": [
            {"class": "<A>", "taken_for": "B", "count": 3, "queries": 4},
            {"class": "B", "taken_for": "<A>", "count": 1, "queries": 8},
        ],
    }
    write_json(tmp_path / "confusion.json", found)
    page = confusion(run(tmp_path))
    rows = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', page)
    assert rows == [("&lt;A&gt; → B", "3 of 4", "75"), ("B → &lt;A&gt;", "1 of 8", "12")]


def test_no_confusion(tmp_path: Path) -> None:
    assert confusion(run(tmp_path)) == ""
    nothing = {"pairs": []}
    write_json(tmp_path / "confusion.json", nothing)
    assert "Every nearest neighbour is of the query" in confusion(run(tmp_path))


def test_grids_of_groups(tmp_path: Path) -> None:
    pixels = np.zeros((5, 8, 8), dtype=np.uint8)
    np.savez(
        tmp_path / "retrieval.npz",
        query_images=pixels,
        neighbour_images=pixels[:, None].repeat(2, axis=1),
        query_labels=np.arange(5),
        neighbour_labels=np.array([[0, 0], [1, 0], [2, 2], [3, 3], [0, 0]]),
        query_names=np.array(list("ABCDE")),
        neighbour_names=np.array(["xy"] * 10).reshape(5, 2),
        query_groups=np.array(["evenly spread", "evenly spread", "best", "best", "worst"]),
        query_precision=np.array([np.nan, 0.5, 1, 1, 0]),
    )
    page = retrieval_grids(run(tmp_path))
    parts = re.split("<h4>(.*?):? .*?</h4>", page)
    assert parts[1::2] == ["Evenly", "Best", "Worst"]
    assert [re.findall(r'alt="query: (.*?)"', part) for part in parts[2::2]] == [
        ["A, class 0", "B, class 1, average precision 50.0 %"],
        ["C, class 2, average precision 100.0 %", "D, class 3, average precision 100.0 %"],
        ["E, class 4, average precision 0.0 %"],
    ]
    assert [(part.count('"right"'), part.count('"wrong"')) for part in parts[2::2]] == [
        (3, 1),
        (4, 0),
        (0, 2),
    ]
