"""`make gpu` without a GPU: its parts run at a tiny size, what is wrong fails, and what is found is kept."""

import math
import re
from pathlib import Path

import pytest
import torch

from tools.gpu import __main__ as driver
from tools.gpu import page
from tools.gpu.page import PARTS, read_page, run_part
from tools.gpu.part import Part

CPU = torch.device("cpu")

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SLOW) for name in ("correctness", "steps", "glyphs")]
    + ["retrieval", "float16"],
)
def test_a_part_runs_at_a_tiny_size(name: str) -> None:
    part = Part(True, CPU)
    PARTS[name](part)
    assert part.failures == part.left_out == []
    assert part.blocks


@pytest.mark.parametrize(
    ("found", "expected"),
    [(1.2, 1.0), ([1.0, torch.tensor([4.0, 2.0])], [1.0, torch.tensor([4.0, 3.0])]), (0.0, 0.0)]
    + [(math.nan, 1.0), (math.inf, math.inf)],
)
def test_a_wrong_number_is_a_failure(found: object, expected: object) -> None:
    part = Part(True, CPU)
    part.check("value", found, expected, 0.1)
    part.check("other", 1.0, 1.0, 0.1)
    (failure,) = part.failures
    assert re.match(r"value: tensor . of .*got .*expected ", failure)
    assert re.search(r"\| value \| \*\*\S+\*\* \|", part.results(""))
    assert "| other | 0.0e+00 | 1.0e-01 |" in part.results("")


def test_an_error_and_the_clock_cost_no_other_step() -> None:
    kept: list[str] = []
    part = Part(True, CPU, 60, keep=lambda part: kept.append(part.results("not ended")))

    def divide() -> None:
        part.tell("a table")
        assert kept[-1].endswith("a table")  # at once
        raise ZeroDivisionError("by\nnothing")

    part.run("division", 0, divide)
    part.run("hour", 3600, divide)
    part.run("last", 0, lambda: part.check("value", 1, 1, 0))
    assert kept[-1].startswith("not ended.\n\na table\n\n| compared")
    assert kept[-1].endswith("| value | 0.0e+00 | 0.0e+00 |\n\nLeft out: hour (no time).")
    assert part.failures == ["division: ZeroDivisionError: by nothing"]


def test_a_part_fails_goes_on_and_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is this machine's processor, and another function has the part's place."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(page, "current_device", lambda: CPU)
    monkeypatch.setattr(page, "origin", lambda command, commit: f"{command} at {commit}")
    path, numbers = tmp_path / "gpu.md", [2, 1]

    def find(part: Part) -> None:
        """A title."""
        part.check("at first", numbers.pop(0), 1, 0)
        part.check("at last", 1, 1, 0)

    monkeypatch.setitem(PARTS, "float16", find)

    def run(commit: str = "a") -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            run_part("float16", path, commit)
        return int(ended.value.code), read_page(path, f"make gpu at {commit}")["float16"]

    status, wrong = run()
    assert status == 1 and re.match(r"failed after \d+ s: at first: tensor 1 of 1, ", wrong)
    assert "| at first | **1.0e+00** | 0.0e+00 |\n| at last | 0.0e+00 | 0.0e+00 |" in wrong
    status, right = run()
    assert status == 0 and re.match(r"passed in \d+ s\.\n", right)
    assert run() == (0, right)  # not once more
    numbers.append(1)
    assert run("b")[0] == 0 and not numbers  # what passed at another commit says nothing


def test_a_part_that_dies_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_apart(name: str, path: Path, commit: str | None) -> int:
        ran.append(name)
        return -11 if len(ran) == 1 else 0

    monkeypatch.setattr(driver, "run_apart", run_apart)
    assert driver.main([]) == -11 and ran == list(PARTS)


@SLOW
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    assert driver.main([f"--page={tmp_path}/gpu.md"]) == page.NO_GPU
    assert not list(tmp_path.iterdir())
