"""The cost page: what it counts, what it concludes, and that it is written whole or not at all."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.speed import measuring, size_pages
from benchmarks.speed.measuring import Comparison, measure_over, slope
from benchmarks.speed.size_pages import METHODS, TIMED_WIDTHS, empty_horde, held_bytes, main
from pml_regularizers import HighOrderMoments

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "costs"
    assert main(["--tiny", "--output", str(folder)]) == 0
    return folder.with_suffix(".md")


def test_the_page_shows_every_figure_that_is_written(page: Path) -> None:
    shown = re.findall(r"!\[.+\]\((.+)\)", page.read_text())
    written = sorted(page.parent.rglob("*.svg"))
    assert sorted(page.parent / figure for figure in shown) == written
    assert [file.stem for file in written] == sorted(build.__name__ for build in METHODS)
    for file in written:
        assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_page_has_all_methods_sizes_and_steps(page: Path) -> None:
    text = page.read_text()
    assert "python -m benchmarks.speed.size_pages --tiny --output docs/costs" in text
    for build in METHODS:
        method = build(True, CPU)
        _, section = text.split(f"### {method.name}\n")
        header, _, *rows = re.findall(r"^\|.*\|$", section, re.MULTILINE)
        assert re.findall(r"over (\w+)", header) == list(method.grids)
        for name, row in zip(method.candidates, rows, strict=False):
            assert re.fullmatch(rf"\| {name} \|.+(\| -?\d+\.\d\d, -?\d+\.\d\d )+\|", row)
    for name in ("alone", "stored", "recomputed", "fixed projections", "confusion", "VEM", "JRS"):
        _, section = text.split("## A step of a real network")
        assert re.search(rf"^\| [\w ,]*{name}[\w ]* \| \d\.\d+ \|", section, re.MULTILINE)
    for d in TIMED_WIDTHS:
        assert len(re.findall(rf"^\| trained, d = {d:,} \| 1\.00 \| \S+ s \|$", text, re.M)) == 2
        assert len(re.findall(rf"^\| fixed, d = {d:,} \| \S+ \| \S+ to \S+ \|$", text, re.M)) == 2


def test_a_run_that_fails_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> str:
        raise RuntimeError("the last table")

    old = tmp_path / "costs.md"
    old.write_text("old")
    monkeypatch.setattr(size_pages, "METHODS", ())
    monkeypatch.setattr(size_pages, "horde_steps", fail)
    with pytest.raises(RuntimeError, match="the last table"):
        main(["--tiny", "--output", str(tmp_path / "costs")])
    assert [file.name for file in tmp_path.iterdir()] == ["costs.md"]
    assert old.read_text() == "old"


@pytest.mark.parametrize("build", METHODS)
@pytest.mark.parametrize("tiny", [False, True])
def test_the_base_point_is_on_every_grid(build: Callable[..., Comparison], tiny: bool) -> None:
    method = build(tiny, CPU)
    assert method.grids.keys() == method.base.keys()
    for size, values in method.grids.items():
        assert method.base[size] in values
        assert sorted(set(values)) == list(values)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.7])
@pytest.mark.parametrize("points", [3, 4, 5, 6])
def test_a_slope_is_that_of_the_upper_half(power: float, points: int) -> None:
    x = [2.0**k for k in range(points)]
    y = [3 * value**power for value in x]
    assert slope(x, y) == pytest.approx(power, abs=1e-12)
    lower = points // 2
    assert slope(x, [7.0] * lower + y[lower:]) == pytest.approx(power, abs=1e-12)
    assert slope(x, [*y[:lower], 2 * y[lower], *y[lower + 1 :]]) < power - 0.1


def test_memory_and_times_of_a_sweep() -> None:
    def at(sizes: Mapping[str, int]) -> dict[str, Callable[[], object]]:
        n = sizes["n"]
        counts = {"one": 1, "three": 3}
        return {k: lambda c=c: torch.zeros(c, n, n).sum() for k, c in counts.items()}  # type: ignore[misc]

    values = (4, 8, 16, 32)
    squares = Comparison(
        *("squares", "Size", at({"n": 8}), "one"),
        rounds=1,
        grids={"n": values},
        base={"n": 8},
        at=at,
    )
    base, sweeps = measure_over(squares)
    found = sweeps["n"]
    assert [point.bytes for point in found["one"]] == [4 * n**2 for n in values]
    assert [point.bytes for point in found["three"]] == [12 * n**2 for n in values]
    assert found["one"][1].ratio == 1
    assert {name: point.bytes for name, point in base.items()} == {"one": 256, "three": 768}
    _, header, _, *rows = squares.table(base, sweeps).replace("\n\n", "\n").splitlines()
    assert header == "|  | time | least to most | memory | MB | over n |"
    assert [row.split(" | ")[3] for row in rows] == ["1.000", "3.000"]
    assert [row.rpartition(", ")[2] for row in rows] == ["2.00 |", "2.00 |"]


@pytest.mark.parametrize("d", [128, 8192])
def test_fixed_projections_hold_a_sixteenth_of_trained_ones(d: int) -> None:
    trained, fixed = (held_bytes(empty_horde(d, word).moments) for word in ("cascaded", "random"))
    assert 16 * fixed == trained == 16 * 5 * 1024 * d


def test_bytes_are_those_of_adam() -> None:
    module = HighOrderMoments(6, order=3, moment_dim=10)
    optimizer = torch.optim.Adam(module.parameters())
    sum(parameter.sum() for parameter in module.parameters()).backward()
    optimizer.step()
    held = [
        tensor for p in module.parameters() for tensor in (p, p.grad, *optimizer.state[p].values())
    ]
    assert held_bytes(module) == sum(tensor.nbytes for tensor in held if tensor.ndim > 0)


def test_a_row_is_held_against_its_own_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([5.0, 1.0, 2.0, 5.0, 2.0, 6.0])
    monkeypatch.setattr(measuring, "_seconds", lambda run: next(seconds))
    rows = dict.fromkeys(("a", "b", "c"), lambda: None)
    pairs = Comparison("", "Size", rows, rounds=2, against={"b": "b", "c": "b"})
    found = measuring.measure(pairs)
    assert [found[name].ratios for name in rows] == [[1, 1], [1, 1], [2, 3]]
    *_, b, c = pairs.table(found).splitlines()
    assert (b, c) == ("| b | 1.00 | 1.5 s |", "| c | 2.50 | 2.00 to 3.00 |")
