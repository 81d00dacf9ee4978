"""The example that searches a folder with an exported network."""

import base64
import io
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from benchmarks.evaluation import load_network
from benchmarks.export.trained import embed
from benchmarks.records.files import write_json
from tests.benchmarks.export.conftest import CLASSES, IMAGES, views
from tests.support.processes import ROOT

Search = Callable[..., tuple[int, str, str]]


@pytest.fixture
def search(capsys: pytest.CaptureFixture[str]) -> Search:
    """Runs the example; its status, and what it wrote to stdout and stderr."""
    program = runpy.run_path(str(ROOT / "examples" / "search_folder.py"))["main"]

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = program([str(word) for word in words])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


def test_the_example_finds_the_nearest_images(trained, exported, pictures, search):
    queries = ["class5/2.png", "class1/0.png"]
    words = [exported, pictures, *(pictures / name for name in queries), "--neighbours=6"]
    status, printed, _ = search(*words)
    assert status == 0

    network = load_network(trained).network
    seen = views(pictures, network)
    names = list(seen)
    assert len(names) == CLASSES * IMAGES
    unit = normalize(embed(network, torch.stack(list(seen.values()))).double())
    lines = iter(printed.splitlines())
    for query in queries:
        assert next(lines) == str(pictures / query)
        similarities = unit @ unit[names.index(query)]
        similarities[names.index(query)] = -1  # the query itself is no answer
        nearest = similarities.sort(descending=True)
        for expected, index in zip(nearest.values[:6], nearest.indices[:6], strict=True):
            similarity, path = next(lines).split()
            assert path == str(pictures / names[index])
            assert float(similarity) == pytest.approx(expected.item(), abs=1e-4)
    assert next(lines, None) is None


def test_the_search_refuses_in_one_line(trained, exported, pictures, search):
    query, no_image = pictures / "class0" / "0.png", exported / "config.json"
    for words, told in (
        ([exported / "nowhere", pictures, query], "nowhere"),
        ([trained, pictures, query], "export it first"),
        ([exported, exported, query], "holds no images"),
        ([exported, pictures, no_image], no_image),
        ([exported, pictures, query, f"--index={exported}"], "--index"),
    ):
        status, _, errors = search(*words)
        assert status == 2 and str(told) in errors.splitlines()[-1]


def test_the_example_shows_the_images_upright(exported, tmp_path, search):
    """On a page that loads nothing; a photograph on its side is found as the upright one."""
    images, exif = tmp_path / "images", Image.Exif()
    folder, other = images / "a <b>", images / "c"
    folder.mkdir(parents=True)
    other.mkdir()
    upright = Image.new("L", (30, 60))
    upright.paste(255, (0, 0, 30, 20))  # its sky
    upright.save(folder / "0.png")
    exif[0x0112] = 6  # turn it clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(folder / "1.png", exif=exif)
    upright.transpose(Image.Transpose.ROTATE_180).save(other / "2.png")
    page, query = tmp_path / "neighbours.html", folder / "0.png"
    status, printed, _ = search(exported, images, query, f"--html={page}")
    assert status == 0
    assert re.findall(r"(\d)\.png$", printed, re.MULTILINE) == ["0", "1", "2"]
    assert " 1.0000 " in printed.splitlines()[1]
    text = page.read_text()
    pictures = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', text)
    assert len(pictures) == text.count("<img") == 3 and "http" not in text
    assert text.count("<b>a &lt;b&gt;</b>") == 2
    assert re.findall(r'<figure class="(\w+)"', text) == ["query", "same", "other"]
    with Image.open(io.BytesIO(base64.b64decode(pictures[1]))) as shown:
        assert shown.size == (30, 60)
        assert np.asarray(shown)[5].mean() > 200 > 50 > np.asarray(shown)[50].mean()

    before = query.read_bytes()
    status, _, errors = search(exported, folder, query, f"--html={query}")
    assert (status, query.read_bytes()) == (2, before)
    assert f"--html: {query} is there already" in errors


def write_thresholds(exported: Path, thresholds: dict[float, float | None]) -> None:
    rates = [{"false_accepts": rate, "threshold": least} for rate, least in thresholds.items()]
    write_json(exported / "thresholds.json", {"rates": rates})


def test_it_says_same_or_not_sure(exported, pictures, tmp_path, search):
    """By the thresholds of an export that has some."""
    judging = shutil.copytree(exported, tmp_path / "judging")
    write_thresholds(judging, {0.01: -1.0, 0.001: 0.99995, 0.0001: None})
    copy = shutil.copytree(pictures, tmp_path / "images")
    shutil.copy(copy / "class5" / "2.png", copy / "class1" / "copy.png")
    asked, page = [copy, copy / "class5" / "2.png"], tmp_path / "page.html"
    _, printed, errors = search(judging, *asked, f"--html={page}")
    lines = [line.removeprefix("  ").split("  ", 1) for line in printed.splitlines()[1:]]
    verdicts = [rest.startswith("same ") for _, rest in lines]
    assert verdicts == [similarity == "1.0000" for similarity, _ in lines]
    assert len(lines) == 5 and {*verdicts} == {True, False}
    assert "at least 1.000, as for at most 0.1 % of the pairs" in errors
    assert page.read_text().count('<span class="verdict yes">same</span>') == sum(verdicts)
    _, printed, _ = search(judging, *asked, "--false-accepts=0.01")
    assert printed.count("  same  ") == 5
    for rate, export, told in (
        ("0.0001", judging, "has a threshold for 0.01, 0.001, not for 0.0001"),
        ("0.01", exported, "has no thresholds; train with --evaluation.verification=true"),
    ):
        status, _, errors = search(export, *asked, f"--false-accepts={rate}")
        assert status == 2 and told in errors
    write_thresholds(judging, {0.05: 2.0, 0.01: -1.0, 0.001: None})
    _, printed, _ = search(judging, *asked)
    assert printed.count("  same  ") == 5, "the next rate that was measured"


def test_an_index_is_used_again(exported, pictures, tmp_path, search):
    """For the same images and model; a damaged image is named each time, and left out."""
    folder, index = shutil.copytree(pictures, tmp_path / "images"), tmp_path / "index.npz"
    damaged = folder / "class0" / "damaged.png"
    damaged.write_bytes((folder / "class0" / "0.png").read_bytes()[:60])
    model = shutil.copytree(exported, tmp_path / "model")
    words = [model, folder, folder / "class1" / "0.png", f"--index={index}"]

    def searched() -> tuple[str, str]:
        status, printed, errors = search(*words)
        assert status == 0 and f"left out: {damaged}" in errors and "damaged" not in printed
        return printed, errors

    first, told = searched()
    assert str(index) not in told
    again, told = searched()
    assert again == first
    assert f"{index}: embeddings of {CLASSES * IMAGES + 1} images, kept" in told
    (folder / "class3" / "0.png").unlink()
    assert "is of other images, or they have changed; it is made anew" in searched()[1]
    config = model / "config.json"
    config.write_text(config.read_text() + "\n")
    assert "is of another model; it is made anew" in searched()[1]
    index.write_text("mine")
    status, _, errors = search(*words)
    assert (status, index.read_text()) == (2, "mine")
    assert "is no index of this program" in errors
