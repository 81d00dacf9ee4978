"""The page of `make gpu`: what is wrong fails, what has passed is kept, and every part is on the page."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pml_regularizers
from tests.gpu import test_parts
from tests.gpu.part import Part, descriptions, read_page, write_page
from tests.support.processes import ROOT

CPU = torch.device("cpu")


def test_a_wrong_number_of_the_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pml_regularizers.variance_attention.variance_loss
    monkeypatch.setattr(
        "pml_regularizers.variance_attention.variance_loss",
        lambda features, *rest, **options: right(
            features, *rest, **options
        ) * (1.01 if features.dtype == torch.float32 else 1),
    )  # fmt: skip
    part = Part(True, CPU)
    with pytest.raises(AssertionError, match="VEM: tensor 1 of "):
        test_parts.test_losses(part)
    assert [name for name, *_ in part.checks] == ["HORDE", "JRS", "energy confusion"]


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


# The GPU is this machine's processor, and the part of float16 is one of these.
PLUGIN = """
import os
import pytest, torch
from tests.gpu import part, test_parts

torch.cuda.is_available = lambda: True

def found(part):
    assert not part.tiny
    match os.environ["FOUND"]:
        case "nothing":
            import no_such_package
        case number:
            part.check("at first", 1, 1, 0)
            part.check("at last", float(number), 1, 0)

def pytest_collection_modifyitems(items):
    from tests.gpu import conftest
    conftest.current_device = lambda: torch.device("cpu")
    conftest.origin = lambda command, device, commit: f"{command} at {commit}"
    for item in items:
        item.obj = found
"""


def test_a_part_fails_goes_on_and_has_passed(tmp_path: Path) -> None:
    (tmp_path / "plugged.py").write_text(PLUGIN)
    page = tmp_path / "gpu.md"

    def run(found: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "plugged", "--page", str(page)]
        command += ["--commit=a", "tests/gpu/test_parts.py::test_float16"]
        places = os.pathsep.join([str(tmp_path), str(ROOT)])
        variables = os.environ | {"PYTHONPATH": places, "FOUND": found}
        done = subprocess.run(command, cwd=ROOT, env=variables, text=True, capture_output=True)
        assert (done.returncode == 1) == ("1 failed" in done.stdout), done.stdout + done.stderr
        return done.stdout

    assert "got 2, expected 1 to 0.0e+00 of 1" in run("2")
    wrong = read_page(page, "make gpu at a")["float16"]
    assert wrong.startswith("failed: at last: tensor 1 of 1, entry 0: got 2, expected 1 to ")
    assert "| at first | 0.0e+00 | 0.0e+00 |" in wrong
    assert "not run: needs no_such_package" in run("nothing")
    assert read_page(page, "make gpu at a")["float16"] == "not run: needs no_such_package."
    assert "1 passed" in run("1")
    assert "it has passed" in run("2")
    assert re.match(r"passed in \d+ s\.\n", read_page(page, "make gpu at a")["float16"])


def test_the_committed_page_has_every_part(tmp_path: Path) -> None:
    write_page(tmp_path / "gpu.md", None, {})
    committed = (ROOT / "docs" / "gpu.md").read_text()
    for block in (tmp_path / "gpu.md").read_text().split("\n\n"):
        if "not run yet" not in block and "on a GPU yet" not in block:
            assert block.strip() in committed
