"""A file that holds no settings is refused in one line."""

from pathlib import Path

import pytest

from benchmarks.run import main
from benchmarks.settings.yaml_files import dump, load_yaml

FILES = {
    "a list of itself": ("losses: &a [*a]", "not valid YAML: found unconstructable recursive"),
    "deep": (f"losses: {'[' * 3000}{']' * 3000}", "not valid YAML: maximum recursion depth"),
    "no time": ("label: !!timestamp x", "c.yaml: not valid YAML: "),
    "a call": ("label: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_settings(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, expected = FILES[name]
    (tmp_path / "c.yaml").write_text(content)
    assert main(["--recipe=glyphs/demo/binomial", f"--config={tmp_path / 'c.yaml'}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert expected in line


def test_what_is_written_reads_back() -> None:
    shared = ["*", "[x", "{a: 1}", "1e5", "a*b"]
    settings = {"a": shared, "b": {"c": shared, "d": 1e-5, "e": None}}
    assert load_yaml(dump(settings)) == settings
    assert load_yaml("1e-5") == 1e-5
