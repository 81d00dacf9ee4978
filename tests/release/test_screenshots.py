"""The report in Chromium: on a wide screen and on a phone it does not scroll sideways."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.report import main
from tests.support.processes import TINY, run

pytestmark = pytest.mark.release

# The page is shown in a frame of the width that is wanted: a window of Chromium has at least 500 pixels.
FRAME = """<!doctype html>
<script>onmessage = event => document.documentElement.dataset.size = event.data.join(" ")</script>
<iframe src="page.html" style="border: 0; width: %dpx; height: 800px"></iframe>"""
MEASURE = """<script>onload = () => { const page = document.documentElement;
parent.postMessage([page.clientWidth, page.scrollWidth, page.scrollHeight], "*") }</script></head>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_report_of_two_methods_with_two_seeds_fits(tmp_path: Path) -> None:
    runs = []
    for method, seed in itertools.product(("binomial", "binomial_horde"), (0, 1)):
        runs.append(str(tmp_path / f"{method}-{seed}"))
        recipe = [f"--recipe=glyphs/demo/{method}", *TINY, "--evaluation.every=10"]
        run([*recipe, f"--seed={seed}", f"--output={runs[-1]}"])
    assert main([*runs, "--output", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    # The page forbids scripts, and needs none; this copy has one.
    page, removed = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert removed == 1 and page.count("</head>") == 1
    (tmp_path / "page.html").write_text(page.replace("</head>", MEASURE))
    frame = tmp_path / "frame.html"
    usual = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command = [*usual, "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()]
    for width in (1280, 400):
        frame.write_text(FRAME % width)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        (found,) = re.findall(r'data-size="([\d ]+)"', done.stdout)
        shown, needed, height = map(int, found.split())
        assert shown == width >= needed and height > 1000
