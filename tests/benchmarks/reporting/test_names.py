"""Names with control characters: none reaches a terminal, a picture or a message unescaped."""

import pickle
import re
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.console import printable
from benchmarks.datasets import DatasetError
from benchmarks.records import RunFolderError
from benchmarks.report import main
from benchmarks.settings import ConfigError
from tests.benchmarks.reporting.made_runs import add_curves_and_images, write_run

HOSTILE = "a\x1b[2Jb\nc\r\x07\x00\x85\u202ed\u2028e\ud800\uffff"
SHOWN = r"a\x1b[2Jb\nc\r\x07\x00\x85\u202ed\u2028e\ud800\uffff"


def test_escapes_stand_for_control_characters() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("Bücher, 本, 👩‍🔬, α±1 %") == "Bücher, 本, 👩‍🔬, α±1 %"
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    for code in range(0x110000):
        if unicodedata.category(chr(code)) in ("Cc", "Cs", "Zl", "Zp"):
            assert printable(chr(code)).isascii()


@pytest.mark.parametrize("kind", [ConfigError, DatasetError, RunFolderError])
def test_an_error_is_one_line(kind: type[Exception]) -> None:
    error = kind(f"{HOSTILE}: is missing")
    assert str(error) == f"{SHOWN}: is missing"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_report_of_hostile_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = HOSTILE.replace("\ud800", "")  # which no file of UTF-8 holds
    folders = []
    for number, label in enumerate((hostile, "plain")):
        folder = write_run(tmp_path, str(number), 0, 0.4, label=label)
        add_curves_and_images(folder)
        folders.append(str(folder))
    assert main(folders) == 0
    printed = capsys.readouterr().out
    shown = printable(hostile)
    assert shown in printed
    assert printable(printed, keep="\n") == printed
    page = (tmp_path / "0-0" / "comparison.html").read_text()
    assert printable(page, keep="\n") == page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert pictures
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert any(shown in picture for picture in pictures)
