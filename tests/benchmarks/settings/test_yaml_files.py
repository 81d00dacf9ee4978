"""Settings that are none, or that would keep the parser busy, end in one line at once."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.run import main
from benchmarks.settings.yaml_files import dump, load_yaml
from tests.support.counting import calls

LETTERS = "abcdefgh"
BOMB = ", ".join(
    [f"a: &a [{','.join('x' * 9)}]"]
    + [f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in pairwise(LETTERS)]
)
MOST_CALLS = 5_000_000  # the aliases stand for 43 million values
LARGE, NESTED = "more than 5,000 values", "more than 50 levels"

FILES = {
    "aliases of aliases": (f"{{{BOMB}}}", LARGE),
    "aliases in text": (json.dumps({"miner": f"{{{BOMB}}}"}), LARGE),
    "a list of itself": ("losses: &a [*a]", LARGE),
    "deep": (f"losses: {'[' * 3000}{']' * 3000}", NESTED),
    "long list": (f"evaluation: {{recall_at: {[*range(4000)]}}}", "a list of at most 100, got one"),
    "large": (f"label: {'x' * 2**21}", "more than 1,048,576 characters"),
    "a long number": (f"seed: {'9' * 5000}", "expected a number, got one of more than 308 digits"),
    "no such day": ("label: 2024-99-99", "not valid YAML: month"),
    "no time": ("label: !!timestamp x", "not valid YAML"),
    "a call": ("label: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "a list for a key": ("? [a]\n: 1", "unhashable key"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_too_much(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, expected = FILES[name]
    (tmp_path / "c.yaml").write_text(content)
    with calls(MOST_CALLS):
        assert main(["--recipe=glyphs/demo/binomial", f"--config={tmp_path / 'c.yaml'}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "c.yaml: not valid YAML: " in line
    assert expected in line


@pytest.mark.parametrize("option", ["--miner", "--label", "--model.ensemble"])
def test_an_option_that_is_too_much(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([f"{option}={{{BOMB}}}"], [option, f"{{{BOMB}}}"]):
        assert main(arguments) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert LARGE in line


def test_an_endless_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config=/dev/zero"]) == 2
    assert "got more than 1,048,576 characters" in capsys.readouterr().err


def test_what_is_written_reads_back() -> None:
    shared = ["*", "[x", "{a: 1}", "1e5", "a*b"]
    settings = {"a": shared, "b": {"c": shared, "d": 1e-5, "e": None}}
    assert load_yaml(dump(settings)) == settings
    assert load_yaml("1e-5") == 1e-5
