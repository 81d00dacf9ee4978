"""Names with control characters: none reaches a message unescaped."""

import pickle

import pytest

from benchmarks.console import printable
from benchmarks.datasets import DatasetError
from benchmarks.records import RunFolderError
from benchmarks.settings import ConfigError

HOSTILE = "a\x1b[2Jb\nc\r\x07\x00\x85\u202ed\u2028e\ud800\uffff"
SHOWN = r"a\x1b[2Jb\nc\r\x07\x00\x85\u202ed\u2028e\ud800\uffff"


def test_escapes_stand_for_control_characters() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("Bücher, 本, 👩‍🔬, α±1 %") == "Bücher, 本, 👩‍🔬, α±1 %"


@pytest.mark.parametrize("kind", [ConfigError, DatasetError, RunFolderError])
def test_an_error_is_one_line(kind: type[Exception]) -> None:
    error = kind(f"{HOSTILE}: is missing")
    assert str(error) == f"{SHOWN}: is missing"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
