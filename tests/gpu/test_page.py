"""What is wrong fails, what is found is kept, and neither the clock nor a dead process costs another part."""

import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.gpu import __main__ as driver
from tests.gpu import conftest, floors
from tests.gpu.networks import Sizes, join
from tests.gpu.page import INTRODUCTION, NO_ORIGIN, descriptions, mark_dead, read_page, write_page
from tests.gpu.part import Part
from tests.gpu.timing import Rates
from tests.support.processes import ROOT

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("found", "expected"),
    [(1.2, 1.0), ([1.0, torch.tensor([4.0, 2.0])], [1.0, torch.tensor([4.0, 3.0])]), (0.0, 0.0)]
    + [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf)],
)
def test_what_is_wrong_fails_at_the_end(found: object, expected: object) -> None:
    part = Part(True, CPU)
    part.check("value", found, expected, 0.1)
    part.check("other", 1.0, 1.0, 0.1)
    assert re.search(r"\| value \| \*\*[\de.+-]+|inf\*\* \|", part.results(""))
    assert "| other | 0.0e+00 | 1.0e-01 |" in part.results("")
    with pytest.raises(AssertionError, match=r"^value: tensor . of .*got .*expected [^;]*$"):
        part.finish()


def test_an_error_or_a_missing_package_costs_no_other_step() -> None:
    kept: list[str] = []
    part = Part(True, CPU, keep=lambda part: kept.append(part.results("not ended")))

    def divide() -> None:
        part.tell("a table")
        assert kept[-1].endswith("a table")  # at once
        raise ZeroDivisionError("by\nnothing")

    def lacking() -> None:
        import no_such_package  # noqa: F401

    part.run("division", 0, divide)
    part.run("package", 0, lacking)
    part.run("last", 0, lambda: part.check("value", 1, 1, 0))
    assert re.fullmatch(
        r"not ended\.\n\na table\n\n(\|.*\n)+\| value \| 0.0e\+00 \| 0.0e\+00 \|\n\n"
        r"Left out: package \(needs no_such_package\)\.",
        kept[-1],
    )
    with pytest.raises(AssertionError, match=r"^division: ZeroDivisionError: by nothing$"):
        part.finish()


def test_a_lost_gpu_ends_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.part.is_lost", lambda device: True)
    part = Part(True, CPU)
    with pytest.raises(ZeroDivisionError):
        part.run("division", 0, lambda: 1 / 0)
    assert part.failures == ["division: ZeroDivisionError: division by zero"]


def test_the_clock_leaves_out_what_does_not_fit() -> None:
    now, done = [100.0], []

    def take(seconds: float) -> None:
        done.append(seconds)
        now[0] += seconds

    part = Part(True, CPU, seconds=10, clock=lambda: now[0])
    part.run("first", 6, lambda: take(6))
    part.run("second", 5, lambda: take(5))
    part.run("third", 4, lambda: take(4))
    part.run("fourth", 1, lambda: take(1))
    assert done == [6, 4]
    assert part.results("passed").endswith("Left out: second (no time); fourth (no time).")
    part.finish()


def test_floors() -> None:
    """Counted by hand: 2 x 3 rows, C = 4, E = 7, K = 2 orders of d = 5."""
    sizes, rates = Sizes(2, 3, 4, 7, 5, 2, 6), Rates({"TF32": 100.0, "bfloat16": 200.0}, 10.0, 0.0)
    trained = floors.projected(sizes, trained=True)
    assert trained.tf32 == 2 * 6 * 4 * 5 * 2 * 3
    assert trained.moved == 4 * (3 * 2 * 6 * 5) + 28 * (2 * 4 * 5 + 5 * 7)
    assert trained.seconds(rates) == trained.tf32 / 100 + trained.moved / 10
    half = floors.projected(sizes, trained=True, half=True)
    assert half.seconds(rates) == trained.tf32 / 200 + (trained.moved - 2 * 3 * 2 * 6 * 5) / 10
    fixed = floors.projected(sizes, trained=False)
    assert fixed.tf32 == 2 * 6 * 4 * 5 * 2 * 2
    assert floors.sketched(sizes).moved == 4 * 6 * (2 * (4 + 4 * 5 + 5 * 7) + 3 * 4)


def test_processes_that_hang_are_ended() -> None:
    processes = mock.Mock(processes=[mock.Mock(), mock.Mock()], join=lambda timeout: False)
    with pytest.raises(TimeoutError, match="have not ended in 0 s"):
        join(processes, 0)
    assert all(process.kill.called for process in processes.processes)


def test_a_page_is_read_as_it_was_written(tmp_path: Path) -> None:
    page, part = tmp_path / "gpu.md", Part(True, CPU)
    part.check("one", 1, 1, 0)
    part.tell("### A table\n\n| a |\n")
    results = {"glyphs": part.results("passed in 1 s"), "steps": "failed: b."}
    write_page(page, "a", results)
    assert read_page(page, "a") == results
    assert read_page(page, "of another commit") == read_page(tmp_path / "none", "a") == {}
    missing = page.read_text().split("## Not run\n\n")[1]
    assert set(re.findall(r"`(\w+)`", missing)) == descriptions().keys() - results


class Found:
    """Plugin that puts a finding of its own in a part's place."""

    def __init__(self, number: float | None) -> None:
        self.number = number

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for item in items:
            item.obj = lambda part: self.find(part)

    def find(self, part: Part) -> None:
        assert not part.tiny
        if self.number is None:
            import no_such_package  # noqa: F401
        part.check("at first", self.number, 1, 0)
        part.check("at last", 1, 1, 0)


@pytest.fixture
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is this machine's processor."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(conftest, "current_device", lambda: CPU)
    monkeypatch.setattr(conftest, "origin", lambda command, commit: f"{command} at {commit}")


def run_part(page: Path, number: float | None) -> int:
    words = ["-q", "-p", "no:cacheprovider", f"--page={page}", "--commit=a"]
    return pytest.main([*words, "tests/gpu/test_parts.py::test_float16"], plugins=[Found(number)])


@pytest.mark.usefixtures("on_this_machine")
def test_a_part_fails_goes_on_and_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "gpu.md"
    assert run_part(page, 2) == 1
    wrong = read_page(page, "make gpu at a")["float16"]
    fault = "at first: tensor 1 of 1, entry 0: got 2, expected 1 to 0.0e+00 of 1"
    assert re.match(rf"failed after \d+ s: {re.escape(fault)}\.\n", wrong)
    assert "| at first | **1.0e+00** | 0.0e+00 |\n| at last | 0.0e+00 | 0.0e+00 |" in wrong
    assert run_part(page, None) == 0
    assert read_page(page, "make gpu at a")["float16"] == "not run: needs no_such_package."
    with monkeypatch.context() as patch:
        patch.setattr(conftest, "is_lost", lambda device: True)
        assert run_part(page, 1) == 3
    assert "\n`float16`: not ended: passed in " in page.read_text()
    assert run_part(page, 1) == 0
    assert re.match(r"passed in \d+ s\.\n", read_page(page, "make gpu at a")["float16"])
    capsys.readouterr()
    assert run_part(page, 2) == 0
    assert "it has passed" in capsys.readouterr().out


def test_the_next_process_goes_on_behind_a_part_that_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, calls = tmp_path / "gpu.md", []
    first, second, *others = descriptions()

    def run_parts(words: list[str]) -> int:
        calls.append([word.partition("::test_")[2] for word in words if "::" in word])
        if len(calls) == 1:
            write_page(page, "a", {first: "passed.", second: "not ended.\n\n| a |"})
            return -11
        write_page(page, "a", read_page(page, "a") | dict.fromkeys(others, "passed."))
        return 0

    monkeypatch.setattr(driver, "run_parts", run_parts)
    assert driver.main([f"--page={page}"]) == -11
    assert calls == [[first, second, *others], others]
    dead = "failed, its process ended with status -11.\n\n| a |"
    assert read_page(page, "a") == {first: "passed.", second: dead} | dict.fromkeys(
        others, "passed."
    )
    assert mark_dead(page, 0) is mark_dead(tmp_path / "none", 0) is None


def test_the_committed_page_has_every_part() -> None:
    committed = (ROOT / "docs" / "gpu.md").read_text()
    before, after = INTRODUCTION.split("{origin}")
    assert committed.startswith(before)
    assert after in committed
    assert conftest.LIMITS.keys() == descriptions().keys()
    assert set(descriptions()) <= set(re.findall(r"`(\w+)`", committed))
    if NO_ORIGIN in committed:
        assert committed.count("\n## ") == 1
