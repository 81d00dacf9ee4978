"""The report and the page of a search in Chromium: on a wide screen and on a phone they do not scroll sideways."""

import itertools
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.datasets import drawn
from benchmarks.report import main
from tests.support.processes import ROOT, TINY, run

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed"),
]

# The page is shown in a frame of the width that is wanted: a window of Chromium has at least 500 pixels.
FRAME = """<!doctype html>
<script>onmessage = event => document.documentElement.dataset.size = event.data.join(" ")</script>
<iframe src="page.html" style="border: 0; width: %dpx; height: 800px"></iframe>"""
MEASURE = """<script>onload = () => { const page = document.documentElement;
parent.postMessage([page.clientWidth, page.scrollWidth, page.scrollHeight], "*") }</script></head>"""


def assert_fits(page: str, folder: Path, least: int) -> None:
    """At both widths nothing scrolls sideways, and the page is higher than `least` pixels."""
    # The page forbids scripts, and needs none; this copy has one.
    page, removed = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert removed == 1 and page.count("</head>") == 1
    (folder / "page.html").write_text(page.replace("</head>", MEASURE))
    frame = folder / "frame.html"
    usual = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command = [*usual, "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()]
    for width in (1280, 400):
        frame.write_text(FRAME % width)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        (found,) = re.findall(r'data-size="([\d ]+)"', done.stdout)
        shown, needed, height = map(int, found.split())
        assert shown == width >= needed and height > least


def test_the_report_of_two_methods_with_two_seeds_fits(tmp_path: Path) -> None:
    runs = []
    for method, seed in itertools.product(("binomial", "binomial_horde"), (0, 1)):
        runs.append(str(tmp_path / f"{method}-{seed}"))
        recipe = [f"--recipe=glyphs/demo/{method}", *TINY, "--evaluation.every=10"]
        run([*recipe, f"--seed={seed}", f"--output={runs[-1]}"])
    assert main([*runs, "--output", str(tmp_path / "report.html")]) == 0
    assert_fits((tmp_path / "report.html").read_text(), tmp_path, 1000)


def test_the_page_of_a_search_fits(tmp_path: Path) -> None:
    images, page = tmp_path / "images", tmp_path / "neighbours.html"
    assert drawn.main([str(images), "--classes=3"]) == 0
    search = runpy.run_path(str(ROOT / "examples" / "search_folder.py"))["main"]
    query = next(images.glob("*/*.png"))
    words = [ROOT / "examples" / "glyphs", images, query, f"--html={page}", "--neighbours=9"]
    assert search(list(map(str, words))) == 0
    assert_fits(page.read_text(), tmp_path, 400)
