"""Names with control characters: none reaches a message unescaped."""

import pickle

from benchmarks.console import printable
from benchmarks.settings import ConfigError

HOSTILE = "a\x1b[2Jb\nc\r\x07\x00\x85\u202ed\u2028e\ud800\uffff"
SHOWN = r"a\x1b[2Jb\nc\r\x07\x00\x85\u202ed\u2028e\ud800\uffff"


def test_escapes_stand_for_control_characters():
    assert printable(HOSTILE) == SHOWN
    assert printable("Bücher, 本, 👩‍🔬, α±1 %") == "Bücher, 本, 👩‍🔬, α±1 %"


def test_an_error_is_one_line():
    error = ConfigError(f"{HOSTILE}: is missing")
    assert str(error) == f"{SHOWN}: is missing"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
