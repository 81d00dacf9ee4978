"""The report's pictures: keys and colours of curves, and neighbours."""

import re
from typing import Any

import numpy as np
import torch

from benchmarks.records.results import Run
from benchmarks.reporting.curves import COLOURS, curves_svg
from benchmarks.reporting.figures import differing_neighbours, neighbours
from tests.benchmarks.reporting.made_runs import save_retrieval


def test_colours_come_in_the_order_of_the_labels_and_then_differ_in_dashes():
    """Labels are neither hidden, nor mathematics, nor HTML."""
    table = {"step": [0, 1], "loss": [1.0, 1.0]}
    labels = ["a", "_base $x$, <b> \x1b", *"cdefgh"]
    tables = {label: [{} if label in "ac" else table] for label in labels}
    svg = curves_svg(tables, {"t": "loss"}, singles=True)
    assert "_base $x$, &lt;b&gt; \\x1b</text>" in svg
    look = r"stroke(?:-dasharray: ([^;]*); stroke-dashoffset: 0; stroke)?: (#\w+)"
    looks = re.findall(look, svg)
    colours = [COLOURS[i].lower() for i in (1, 3, 4, 5, 0, 1)]
    assert [colour for _, colour in looks] == colours * 2, "in the panel, and in the key"
    assert len({*looks}) == 6


def test_neighbours_of_two_methods(tmp_path):
    """They answer the same evenly spread queries below each other; a third method saved none."""
    methods = {label: [Run(tmp_path / label, {})] for label in ("base", "<HORDE>", "none")}
    for right, (run,) in enumerate(methods.values()):
        run.folder.mkdir()
        if run.folder.name != "none":
            save_retrieval(run.folder, right)
    page = neighbours(methods)
    spread, *folded = page.split("<details>")
    asked = [re.findall(r'alt="query: (.*?)"', part) for part in (spread, folded[0])]
    assert asked == [
        ["A, class 0", "&lt;B&gt;, class 1, average precision 50.0 %"],
        ["C, class 2, average precision 100.0 %", "D, class 3, average precision 100.0 %"],
    ]
    look = r'title="(base|&lt;HORDE&gt;)"|class="(right|wrong)"'
    queries = [re.findall(look, of) for of in spread.split('class="asked"')[1:]]
    assert [[method or frame for method, frame in of] for of in queries] == [
        ["base", "right", "right", "&lt;HORDE&gt;", "wrong", "wrong"],
        ["base", "wrong", "wrong", "&lt;HORDE&gt;", "right", "right"],
    ]
    titles = re.findall(r"<summary>(\w+) queries of (\S+),", page)
    assert titles[1:3] == [("Worst", "base"), ("Best", "&lt;HORDE&gt;")] and len(titles) == 4


def test_queries_for_which_one_of_two_networks_is_right(tmp_path):
    """Of six images of two classes; the first neighbour decides."""

    class Images:
        labels, class_names = torch.tensor([0, 0, 0, 1, 1, 1]), ["a", "b"]
        name = to_picture = staticmethod(lambda item: item)

        def __getitem__(self, row: int) -> tuple[Any, int]:
            return np.zeros((8, 8), np.uint8), 0

    runs = {}
    for label, nearest in (("<new>", [1, 2, 1, 4, 0, 0]), ("old", [1, 3, 3, 4, 5, 0])):
        (folder := tmp_path / label).mkdir()
        near = np.stack([nearest, [5] * 6], axis=1)
        np.savez(folder / "neighbours.npz", queries=np.arange(6), neighbours=near)
        runs[label] = Run(folder, {})
    page = differing_neighbours(runs, Images())
    assert [int(n) for n in re.findall(r"\d+", page.partition("</p>")[0])] == [6, 2, 2, 1, 1]
    right, wrong = page.split("<h3>")[1:]
    assert right.startswith("Right with &lt;new&gt;, wrong with old</h3>")
    asked = [re.findall(r'alt="query: (\d), class (.)"', part) for part in (right, wrong)]
    assert asked == [[("1", "a"), ("2", "a")], [("4", "b")]]
    same = differing_neighbours({"one": runs["old"], "two": runs["old"]}, Images())
    assert "0 with one alone, 0 with two alone" in same and same.count("<p") == 1
