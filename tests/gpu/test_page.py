"""The page of `make gpu`: what is wrong fails, what has passed is kept, and every part is on the page."""

import math
import re
from pathlib import Path

import pytest
import torch

from tests.gpu import conftest
from tests.gpu.part import Part, descriptions, read_page, write_page
from tests.support.processes import ROOT

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("found", "expected"),
    [(1.2, 1.0), ([1.0, torch.tensor([4.0, 2.0])], [1.0, torch.tensor([4.0, 3.0])]), (0.0, 0.0)]
    + [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf)],
)
def test_what_is_wrong(found: object, expected: object) -> None:
    with pytest.raises(AssertionError, match=r"value: tensor . of .*got .*expected"):
        Part(True, CPU).check("value", found, expected, 0.1)


def test_a_page_is_read_as_it_was_written(tmp_path: Path) -> None:
    page, part = tmp_path / "gpu.md", Part(True, CPU)
    part.check("one", 1, 1, 0)
    part.tell("### A table\n\n| a |\n")
    results = {"glyphs": part.results("passed in 1 s"), "processes": "failed: b."}
    write_page(page, "a", results)
    rest = dict.fromkeys(descriptions().keys() - results, "not run yet.")
    assert read_page(page, "a") == results | rest
    assert read_page(page, "of another commit") == read_page(tmp_path / "none", "a") == {}


class Found:
    """Plugin that puts a finding of its own in a part's place."""

    def __init__(self, number: float | None) -> None:
        self.number = number

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for item in items:
            item.obj = self.found

    def found(self, part: Part) -> None:
        assert not part.tiny
        if self.number is None:
            import no_such_package  # noqa: F401
        part.check("at first", 1, 1, 0)
        part.check("at last", self.number, 1, 0)


def test_a_part_fails_goes_on_and_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU is this machine's processor."""
    page = tmp_path / "gpu.md"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(conftest, "current_device", lambda: CPU)
    monkeypatch.setattr(conftest, "origin", lambda command, commit: f"{command} at {commit}")

    def run(number: float | None) -> str:
        words = ["-q", "-p", "no:cacheprovider", f"--page={page}", "--commit=a"]
        part = "tests/gpu/test_parts.py::test_float16"
        status = pytest.main([*words, part], plugins=[Found(number)])
        said = capsys.readouterr().out
        assert (status == 1) == ("1 failed" in said), said
        return said

    assert "got 2, expected 1 to 0.0e+00 of 1" in run(2)
    wrong = read_page(page, "make gpu at a")["float16"]
    assert wrong.startswith("failed: at last: tensor 1 of 1, entry 0: got 2, expected 1 to ")
    assert "| at first | 0.0e+00 | 0.0e+00 |" in wrong
    assert "not run: needs no_such_package" in run(None)
    assert read_page(page, "make gpu at a")["float16"] == "not run: needs no_such_package."
    assert "1 passed" in run(1)
    assert "it has passed" in run(2)
    assert re.match(r"passed in \d+ s\.\n", read_page(page, "make gpu at a")["float16"])


def test_the_committed_page_has_every_part(tmp_path: Path) -> None:
    write_page(tmp_path / "gpu.md", None, {})
    committed = (ROOT / "docs" / "gpu.md").read_text()
    for block in (tmp_path / "gpu.md").read_text().split("\n\n"):
        if "not run yet" not in block and "on a GPU yet" not in block:
            assert block.strip() in committed
