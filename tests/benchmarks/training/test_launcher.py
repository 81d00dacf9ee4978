"""What Accelerate would take from the environment is a setting of the run, without effect, or refused."""

from pathlib import Path

import pytest

from benchmarks.records import describe_launcher
from benchmarks.run import main
from benchmarks.settings import ConfigError, parse
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


def test_what_is_no_setting_of_the_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in REFUSED.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ConfigError, match=f"^{name}={value}: "):
                check_launcher(parse([]).experiment)
    monkeypatch.setenv(name, value)
    assert main([*TINY, f"--data.root={tmp_path}", f"--output={tmp_path / 'run'}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {name}={value}: ")
    assert [*tmp_path.iterdir()] == []


def test_what_accelerate_launch_sets_by_itself_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_ACCELERATE_LAUNCH.items():
        monkeypatch.setenv(name, value)
    check_launcher(parse([]).experiment)
    assert describe_launcher() == OF_ACCELERATE_LAUNCH
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    check_launcher(parse(["--precision=bf16"]).experiment)
