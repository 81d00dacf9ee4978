"""Settings that would keep the parser busy, or lead it astray, end in one line at once."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.run import main
from tests.support.counting import calls

LETTERS = "abcdefgh"
BOMB = ", ".join(
    [f"a: &a [{','.join('x' * 9)}]"]
    + [f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in pairwise(LETTERS)]
)
MOST_CALLS = 5_000_000  # the aliases stand for 43 million values
DEEP = "[" * 3000 + "]" * 3000
MANY = ",".join(map(str, range(1, 4000)))
LARGE, NESTED = "more than 5,000 values", "more than 50 levels"

FILES = {
    "aliases of aliases": (f"{{{BOMB}}}", LARGE),
    "aliases in a class": (f"miner: {{class_path: x.Y, init_args: {{{BOMB}}}}}", LARGE),
    "aliases in text": (json.dumps({"miner": f"{{{BOMB}}}"}), LARGE),
    "aliases in a label": (json.dumps({"label": f"{{{BOMB}}}"}), LARGE),
    "aliases in an argument": (json.dumps({"model": {"trunk_args": {"a": f"{{{BOMB}}}"}}}), LARGE),
    "a list of itself": ("losses: &a [*a]", LARGE),
    "a mapping of itself": ("model: &a {trunk_args: *a}", LARGE),
    "deep": (f"losses: {DEEP}", NESTED),
    "deep mappings": (f"model: {'{a: ' * 3000}{'}' * 3000}", NESTED),
    "deep in text": (json.dumps({"losses": DEEP}), NESTED),
    "long": (f"model: {{trunk_args: {{a: [{MANY},{MANY}]}}}}", LARGE),
    "long list": (
        f"evaluation: {{recall_at: [{MANY}]}}",
        "recall_at: expected a list of at most 100",
    ),
    "large": (f"label: {'x' * 2**21}", "more than 1,048,576 characters"),
    "a long number": (f"seed: {'9' * 5000}", "c.yaml: not valid YAML"),
    "no such day": ("label: 2024-99-99", "c.yaml: not valid YAML: month"),
    "no number": ("label: !!int abc", "c.yaml: not valid YAML"),
    "no truth": ("label: !!bool x", "c.yaml: not valid YAML"),
    "no time": ("label: !!timestamp x", "c.yaml: not valid YAML"),
    "a call": ("label: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "a list for a key": ("? [a]\n: 1", "unhashable key"),
    "a number for a group": ("evaluation: 3", "evaluation: expected a mapping of settings, got 3"),
    "a list for a group": ("optimization: [null]", "optimization: expected a mapping of settings"),
    "another file": (f"data: {__file__}", "data: expected a mapping of settings"),
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


@pytest.mark.parametrize(
    "option", ["miner", "model", "label", "model.trunk_args", "model.ensemble"]
)
def test_an_option_that_is_too_much(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--{option}={{{BOMB}}}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --{option}: {LARGE}")
    assert main([f"--{option}", f"{{{BOMB}}}"]) == 2
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_file_of_a_group_that_is_too_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(f"{{{BOMB}}}")
    assert main([f"--data={tmp_path / 'c.yaml'}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'c.yaml'}: not valid YAML: {LARGE}")


@pytest.mark.parametrize(
    "text", ["!!int abc", "!!timestamp x", "!!bool x", "9" * 5000, "\0", "\udfff", "3", "[1]"]
)
def test_text_that_is_no_settings(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--model={text}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_endless_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config=/dev/zero"]) == 2
    assert (
        "/dev/zero: not valid YAML: expected settings, got more than 1,048,576 char"
        in capsys.readouterr().err
    )
