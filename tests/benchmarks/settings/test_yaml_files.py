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
LARGE = "more than 5,000 values, aliases written out"

FILES = {
    "aliases of aliases": (f"{{{BOMB}}}", f"c.yaml: not valid YAML: {LARGE}"),
    "aliases in text": (json.dumps({"miner": f"{{{BOMB}}}"}), LARGE),
    "a list of itself": ("losses: &a [*a]", "not valid YAML: found unconstructable recursive"),
    "deep": (f"losses: {'[' * 3000}{']' * 3000}", "not valid YAML: maximum recursion depth"),
    "large": (
        f"label: {'x' * 2**21}",
        "not valid YAML: expected settings, got more than 1,048,576",
    ),
    "no time": ("label: !!timestamp x", "c.yaml: not valid YAML: "),
    "a call": ("label: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
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
    assert expected in line


def test_what_is_written_reads_back() -> None:
    shared = ["*", "[x", "{a: 1}", "1e5", "a*b"]
    settings = {"a": shared, "b": {"c": shared, "d": 1e-5, "e": None}}
    assert load_yaml(dump(settings)) == settings
    assert load_yaml("1e-5") == 1e-5
