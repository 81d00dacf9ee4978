"""The report's pictures: keys and colours of curves, and neighbours."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.records.results import Run
from benchmarks.reporting.curves import COLOURS, curves_svg
from benchmarks.reporting.figures import differing_neighbours, neighbours


def drawn(labels: list[str], without: tuple[str, ...] = ()) -> str:
    table = {"step": [0, 1], "loss": [1.0, 1.0]}
    tables = {label: [{} if label in without else table] for label in labels}
    return curves_svg(tables, {"t": "loss"}, singles=True)


def test_labels_are_neither_hidden_nor_mathematics() -> None:
    assert "_base $x$, &lt;b&gt; \\x1b</text>" in drawn(["_base $x$, <b> \x1b"])


def test_colours_come_in_the_order_of_the_labels_and_then_differ_in_dashes() -> None:
    look = r"stroke(?:-dasharray: ([^;]*); stroke-dashoffset: 0; stroke)?: (#\w+)"
    looks = re.findall(look, drawn([*"abcdefgh"], without=("a", "c")))
    colours = [COLOURS[i].lower() for i in (1, 3, 4, 5, 0, 1)]
    assert [colour for _, colour in looks] == colours * 2, "in the panel, and in the key"
    assert len({*looks}) == 6


# ---------------------------------------------------------------------------------------- neighbours


def save_retrieval(folder: Path, right: int) -> Run:
    """Five queries with two neighbours each; all of one query are of its class, and half of another's."""
    folder.mkdir()
    pixels = np.zeros((5, 8, 8), dtype=np.uint8)
    labels = np.zeros((5, 2), dtype=int) + 9
    labels[right], labels[4, 0] = right, 4
    np.savez(
        folder / "retrieval.npz",
        query_images=pixels,
        neighbour_images=pixels[:, None].repeat(2, axis=1),
        query_labels=np.arange(5),
        neighbour_labels=labels,
        query_names=np.array(["A", "B", *"CDE"]),
        neighbour_names=np.array(["xy"] * 10).reshape(5, 2),
        query_groups=np.array(["evenly spread", "evenly spread", "best", "best", "worst"]),
        query_precision=np.array([np.nan, 0.5, 1, 1, 0]),
    )
    return Run(folder, {})


def test_neighbours_of_one_method(tmp_path: Path) -> None:
    without = {"none": [Run(tmp_path, {})]}
    assert "No neighbours were saved" in neighbours(without)
    page = neighbours({"base": [save_retrieval(tmp_path / "a", right=3)], **without})
    titles = re.findall("<(?:h3|summary)>(.*?)<", page)
    assert titles == [
        "Evenly spread over the test set",
        "Best queries of base, by average precision, one of a class",
        "Worst queries of base, by average precision, one of a class",
    ]
    parts = re.split("<h3>|<summary>", page)[1:]
    assert [re.findall(r'alt="query: (.*?)"', part) for part in parts] == [
        ["A, class 0", "B, class 1, average precision 50.0 %"],
        ["C, class 2, average precision 100.0 %", "D, class 3, average precision 100.0 %"],
        ["E, class 4, average precision 0.0 %"],
    ]
    frames = [(part.count('class="right"'), part.count('class="wrong"')) for part in parts]
    assert frames == [(0, 4), (2, 2), (1, 1)]


def test_methods_answer_the_same_query_below_each_other(tmp_path: Path) -> None:
    methods = {
        "base": [save_retrieval(tmp_path / "a", right=0)],
        "<HORDE>": [save_retrieval(tmp_path / "b", right=1)],
    }
    page = neighbours(methods)
    spread = page.partition("<details>")[0]
    queries = spread.split('class="asked"')[1:]
    frames = [
        re.findall(r'title="(base|&lt;HORDE&gt;)"|class="(right|wrong)"', of) for of in queries
    ]
    assert [[method or frame for method, frame in of] for of in frames] == [
        ["base", "right", "right", "&lt;HORDE&gt;", "wrong", "wrong"],
        ["base", "wrong", "wrong", "&lt;HORDE&gt;", "right", "right"],
    ]
    assert page.count("<details>") == 4, "the best and the worst of each"
    assert ">1</b> base" in page
    assert ">2</b> &lt;HORDE&gt;" in page
    assert re.findall('border-color: (#.*?)"', page)[:2] == [*COLOURS[:2]]


def test_queries_for_which_one_of_two_networks_is_right(tmp_path: Path) -> None:
    """Of six images of two classes; the first neighbour decides."""

    class Images:
        labels, class_names = torch.tensor([0, 0, 0, 1, 1, 1]), ["a", "b"]
        name = to_picture = staticmethod(lambda item: item)

        def __getitem__(self, row: int) -> tuple[Any, int]:
            return np.zeros((8, 8), np.uint8), 0

    runs = {}
    for label, nearest in (("<new>", [1, 2, 1, 4, 0, 0]), ("old", [1, 3, 3, 4, 5, 0])):
        (folder := tmp_path / label).mkdir()
        neighbours = np.stack([nearest, [5] * 6], axis=1)
        np.savez(folder / "neighbours.npz", queries=np.arange(6), neighbours=neighbours)
        runs[label] = Run(folder, {})
    page = differing_neighbours(runs, Images())
    told = (
        "2 have a nearest neighbour of their own class with both networks, 2 with &lt;new&gt; alone"
    )
    assert (
        f"Of 6 images of classes that no training has seen, {told}, 1 with old alone, and 1" in page
    )
    right, wrong = page.split("<h3>")[1:]
    assert right.startswith("Right with &lt;new&gt;, wrong with old</h3>")
    asked = [re.findall(r'alt="query: (\d), class (.)"', part) for part in (right, wrong)]
    assert asked == [[("1", "a"), ("2", "a")], [("4", "b")]]
    same = differing_neighbours({"one": runs["old"], "two": runs["old"]}, Images())
    assert "0 with one alone, 0 with two alone" in same and same.count("<p") == 1
