"""The report in Chromium: on a wide screen and on a phone, light and dark, it fits and is not blank."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.report import main
from tests.support.processes import TINY, run

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed"),
]

# The page is shown in a frame of the width that is wanted: a window of Chromium has at least 500 pixels.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><style>body { margin: 0 }
iframe { display: block; border: 0; width: %dpx; height: %dpx }</style>
<script>onmessage = event => document.documentElement.dataset.size = event.data.join(" ")</script>
<iframe src="page.html"></iframe>"""
MEASURE = """<script>onload = () => { const page = document.documentElement;
parent.postMessage([page.clientWidth, page.scrollWidth, page.scrollHeight], "*") }</script></head>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the report of two methods with two seeds each as page.html, which says its size."""
    folder = tmp_path_factory.mktemp("report")
    runs = []
    for method, seed in itertools.product(("binomial", "binomial_horde"), (0, 1)):
        runs.append(str(folder / f"{method}-{seed}"))
        recipe = [f"--recipe=glyphs/demo/{method}", *TINY, "--evaluation.every=10"]
        run([*recipe, f"--seed={seed}", f"--output={runs[-1]}"])
    assert main([*runs, "--output", str(folder / "report.html")]) == 0
    page = (folder / "report.html").read_text()
    # The page forbids scripts, and needs none; this copy has one.
    page, removed = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert removed == 1 and page.count("</head>") == 1
    (folder / "page.html").write_text(page.replace("</head>", MEASURE))
    return folder


def chromium(page: Path, width: int, height: int, *options: str) -> str:
    """The output of Chromium for a page in a window of this size."""
    window = f"--window-size={max(width, 500)},{height}"
    usual = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", window]
    command = ["chromium", *usual, "--virtual-time-budget=5000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def show(folder: Path, width: int, *options: str) -> tuple[list[int], Image.Image]:
    """The page's [width, width of its content, height], and its picture."""
    frame = folder / "frame.html"
    frame.write_text(FRAME % (width, 800))
    printed = chromium(frame, width, 900, "--dump-dom", *options)
    (found,) = re.findall(r'data-size="([\d ]+)"', printed)
    size = [int(number) for number in found.split()]
    frame.write_text(FRAME % (width, size[2]))
    picture = folder / f"{width}{''.join(options)}.png"
    chromium(frame, width, size[2], f"--screenshot={picture}", *options)
    with Image.open(picture) as image:
        return size, image.convert("RGB").crop((0, 0, width, size[2]))


@pytest.mark.parametrize("width", [1280, 400])
def test_the_report_fits_and_is_not_blank(report: Path, width: int) -> None:
    light, dark = (show(report, width, *options) for options in ((), ("--force-dark-mode",)))
    for size, picture in (light, dark):
        assert size[0] == width and size[1] <= width, "it must not scroll sideways"
        assert size[2] > 1000 and picture.size == (width, size[2])
        pixels = np.asarray(picture)
        bands = np.array_split(pixels, size[2] // 400)
        colours = [len(np.unique(band.reshape(-1, 3), axis=0)) for band in bands]
        assert min(colours) > 10, "a part of the page is blank"
    assert light[1].getpixel((2, 2)) == (255, 255, 255) and max(dark[1].getpixel((2, 2))) < 60
