"""The cases of `python -m speed` at a tiny size; what is wrong fails, and what is found is kept."""

import argparse
import math
import re
from pathlib import Path

import pytest
import torch

from speed import __main__ as program
from speed.case import Case
from speed.cases import CASES, Entry
from speed.page import read_page, run_case

CPU = torch.device("cpu")

SLOW = {
    *("stanford", "in_shop", "correctness", "steps", "glyphs", "float16"),  # much, or processes
    # At a tiny size as methods_photographs, and as each other.
    *("methods_resnet50", "methods_googlenet", "horde_googlenet"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_every_case_runs_at_a_tiny_size(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([name, "--tiny"]) == 0
    text = capsys.readouterr().out
    assert f"python -m speed {name} --tiny`:\n" in text and f"\n`{name}`: passed in" in text
    assert text.count("\n| ") >= 4 and "Left out" not in text


@pytest.mark.parametrize(
    ("found", "expected"),
    [(1.2, 1.0), ([1.0, torch.tensor([4.0, 2.0])], [1.0, torch.tensor([4.0, 3.0])]), (0.0, 0.0)]
    + [(math.nan, 1.0), (math.inf, math.inf)],
)
def test_a_wrong_number_is_a_failure(found: object, expected: object) -> None:
    case = Case(True, CPU)
    case.check("value", found, expected, 0.1)
    case.check("other", 1.0, 1.0, 0.1)
    (failure,) = case.failures
    assert re.match(r"value: tensor . of .*got .*expected ", failure)
    assert re.search(r"\| value \| \*\*\S+\*\* \|", case.results(""))
    assert "| other | 0.0e+00 | 1.0e-01 |" in case.results("")


def test_a_case_fails_goes_on_and_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [2, 1]

    def find(case: Case) -> None:
        """A title."""
        case.check("at first", numbers.pop(0), 1, 0)
        case.check("at last", 1, 1, 0)

    monkeypatch.setitem(CASES, "float16", Entry(find, "cuda", 60))
    page = tmp_path / "gpu.md"

    def run(commit: str = "a") -> tuple[bool, str]:
        options = argparse.Namespace(device="cpu", page=page, commit=commit, tiny=True)
        passed, text = run_case("float16", options), page.read_text()
        origin = text[text.index("Measured") : text.index(".\n\n") + 1]
        assert origin.startswith(f"Measured at `{commit}` by\n")
        return passed, read_page(page, origin)["float16"]

    passed, wrong = run()
    assert not passed and re.match(r"failed after \d+ s: at first: tensor 1 of 1, ", wrong)
    assert "| at first | **1.0e+00** | 0.0e+00 |\n| at last | 0.0e+00 | 0.0e+00 |" in wrong
    assert "## Not run\n\n`correctness`, `steps`, `retrieval`, `glyphs`." in page.read_text()
    passed, right = run()
    assert passed and re.match(r"passed in \d+ s\.\n", right)
    assert run() == (True, right)  # not once more
    numbers.append(1)
    assert run("b")[0] and not numbers  # what passed at another commit says nothing


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(["--device=cuda", f"--page={tmp_path}/gpu.md"])
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    assert "error: --device: torch" in capsys.readouterr().err
