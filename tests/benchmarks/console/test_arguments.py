"""The help of all commands fits a terminal of 80 columns."""

import importlib

import pytest

COMMANDS = (
    *("report", "run", "sweep", "tables", "study", "fair", "fair search"),
    *("export.__main__", "datasets.__main__", "datasets.__main__ verify", "speed.__main__"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name, *words = command.split()
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{name}").main([*words, "--help"])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: ") and max(map(len, lines)) <= 80
    assert lines.index("") < 15, "the usage is short"
