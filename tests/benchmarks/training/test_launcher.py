"""What Accelerate would take from the environment is a setting of the run, without effect, or refused."""

from pathlib import Path

import pytest

from benchmarks.records import describe_launcher
from benchmarks.run import main
from benchmarks.settings import parse
from benchmarks.training import check_launcher
from tests.support.processes import TINY

REFUSED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_OF_A_LATER_VERSION": "x",
}

OF_ACCELERATE_LAUNCH = {
    "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_CPU_AFFINITY": "1",
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in describe_launcher():
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_setting_of_the_run_is_refused(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, REFUSED[name])
    assert main([*TINY, f"--data.root={tmp_path}", f"--output={tmp_path / 'run'}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {name}={REFUSED[name]}: ")
    assert [*tmp_path.iterdir()] == []


def test_what_accelerate_launch_sets_by_itself_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_ACCELERATE_LAUNCH.items():
        monkeypatch.setenv(name, value)
    check_launcher(parse([]).experiment)
    assert describe_launcher() == OF_ACCELERATE_LAUNCH
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    check_launcher(parse(["--precision=bf16"]).experiment)
