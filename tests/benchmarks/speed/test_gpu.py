"""`make gpu`: every part works at tiny sizes, a wrong number stops it, and it goes on where it was stopped."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pml_regularizers
from benchmarks.speed import gpu, gpu_parts
from benchmarks.speed.gpu_parts import PARTS, Check, check
from tests.support.processes import ROOT

SLOW = ("kernels", "processes", "glyphs", "runner")  # take seconds


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PARTS]
)
def test_every_part_passes_at_tiny_sizes(name: str) -> None:
    found = (gpu.run_apart if name in SLOW else gpu.run_here)(name, tiny=True)
    assert re.fullmatch(r"passed in \d+ s\.\n\n.+", found, re.DOTALL)


def test_a_wrong_number_of_the_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pml_regularizers.variance_attention.variance_loss
    monkeypatch.setattr(
        "pml_regularizers.variance_attention.variance_loss",
        lambda features, *rest, **options: right(
            features, *rest, **options
        ) * (1.01 if features.dtype == torch.float32 else 1),
    )  # fmt: skip
    found = gpu.run_here("losses", tiny=True)
    assert found.startswith("wrong: VEM: tensor 1 of ")
    rows = re.findall(r"^\| ([^|:]+) \|", found, re.MULTILINE)
    assert rows == ["value", "HORDE", "JRS", "energy confusion"]


@pytest.mark.parametrize(
    ("found", "expected"),
    [(1.2, 1.0), ([1.0, torch.tensor([4.0, 2.0])], [1.0, torch.tensor([4.0, 3.0])]), (0.0, 0.0)]
    + [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan")), (1.0, float("inf"))]
    + [(float("nan"), float("nan")), (float("inf"), float("inf"))],
)
def test_what_is_wrong(found: object, expected: object) -> None:
    with pytest.raises(gpu_parts.WrongNumberError, match=r"value: tensor . of .*got .*expected"):
        check("value", found, expected, 0.1)


def test_an_error_is_a_share_of_the_largest_entry() -> None:
    found = check("value", torch.tensor([10.0, 0.1]), torch.tensor([10.0, 0.2]), 0.1)
    assert found == ["value", "1.0e-02", "1.0e-01"]


# ---------------------------------------------------------------------------------------- the command


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three parts of one number each, and those that have run, in this process."""
    calls: list[str] = []

    def made(name: str) -> object:
        def part(tiny: bool, device: torch.device) -> Iterator[Check]:
            """Title.

            About.
            """
            calls.append(name)
            yield check(f"{name} at first", 1, 1, 0)
            yield check(f"{name} at last", values[name], 1, 0)

        return part

    values = {"one": 1, "two": 1, "three": 1}
    monkeypatch.setattr(gpu_parts, "PARTS", {name: made(name) for name in values})
    monkeypatch.setattr(gpu, "run_apart", gpu.run_here)
    monkeypatch.setattr(
        "benchmarks.speed.measuring.origin", lambda *_: os.environ.get("COMMIT", "a")
    )
    monkeypatch.setattr(gpu_parts, "VALUES", values, raising=False)
    return calls


def test_the_first_wrong_number_ends_it_and_it_goes_on_there(
    called: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "gpu.md"
    arguments = ["--tiny", "--output", str(page)]
    gpu_parts.VALUES["two"] = 2  # type: ignore[attr-defined]
    assert gpu.main(arguments) == 1
    assert called == ["one", "two"]
    *_, last = capsys.readouterr().out.splitlines()
    wrong = "wrong: two at last: tensor 1 of 1, entry 0: got 2, expected 1 to 0.0e+00 of 1."
    assert last == f"two: {wrong}"
    text = page.read_text()
    assert "| two at first | 0.0e+00 | 0.0e+00 |" in text and "two at last:" in text
    assert "`--parts three`: not run yet." in text
    gpu_parts.VALUES["two"] = 1  # type: ignore[attr-defined]
    assert gpu.main(arguments) == 0
    assert called == ["one", "two", "two", "three"]
    assert gpu.main(arguments) == 0
    assert len(called) == 4
    assert "two at last:" not in page.read_text()


def test_parts_of_another_commit_run_again(
    called: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--tiny", "--parts", "one", "--output", str(tmp_path / "gpu.md")]
    assert gpu.main(arguments) == gpu.main(arguments) == 0
    assert called == ["one"]
    monkeypatch.setenv("COMMIT", "b")
    assert gpu.main(arguments) == 0
    assert called == ["one", "one"]
    assert (tmp_path / "gpu.md").read_text().startswith("# On a GPU\n\nb\n")


def test_a_page_is_read_as_it_was_written(called: list[str], tmp_path: Path) -> None:
    results = {"one": "passed in 1 s.\n\n### A table\n\n| a |", "three": "wrong: b."}
    gpu.write_page(tmp_path / "gpu.md", "a", results)
    assert gpu.read_page(tmp_path / "gpu.md", "a") == {**results, "two": "not run yet."}


def test_what_needs_a_missing_package_says_so(
    called: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(tiny: bool, device: torch.device) -> Iterator[Check]:
        """Title.

        About."""
        import no_such_package  # type: ignore[import-not-found]

        yield no_such_package

    monkeypatch.setitem(gpu_parts.PARTS, "one", lacking)
    assert gpu.main(["--tiny"]) == 0
    assert called == ["two", "three"]
    assert "one: not run: needs no_such_package.\n" in capsys.readouterr().out


def test_a_part_has_a_limit_and_takes_its_processes_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "LIMIT", 0.2)
    found = gpu.run_apart("kernels", tiny=True)
    assert found == "failed: takes more than 0.2 seconds."


def test_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--output", str(tmp_path / "gpu.md")]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line == f"skipped: torch {torch.__version__} finds no GPU here"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == f"skipped: {sys.executable} has no torch\n"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--tiny", "--parts", "kernel"])
    assert "--parts: expected some of kernels, horde, " in capsys.readouterr().err


def test_the_committed_page_has_every_part(tmp_path: Path) -> None:
    gpu.write_page(tmp_path / "gpu.md", None, {})
    committed = (ROOT / "docs" / "gpu.md").read_text()
    for block in (tmp_path / "gpu.md").read_text().split("\n\n"):
        if "not run yet" not in block and "on a GPU yet" not in block:
            assert block.strip() in committed


@pytest.mark.slow
def test_stopped_it_goes_on(tmp_path: Path) -> None:
    words = ["--tiny", "--parts", "horde", "retrieval", "--output", str(tmp_path / "gpu.md")]
    command = [sys.executable, "-m", "benchmarks.speed.gpu", *words]
    process = subprocess.Popen(command, cwd=ROOT)
    while not (tmp_path / "gpu.md").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert re.fullmatch(r"retrieval: passed in \d+ s\.\n", done.stdout)
