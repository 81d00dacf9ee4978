"""The example that searches a folder with an exported network."""

import base64
import io
import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from benchmarks.export.__main__ import main
from benchmarks.export.writing import example_query
from benchmarks.records import write_json
from tests.benchmarks.export.conftest import CLASSES, IMAGES, embed, make_run, views
from tests.support.fake_trees import cub
from tests.support.processes import ROOT

PRINTED = 1e-4  # similarities have four decimals

Search = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def program() -> Any:
    return runpy.run_path(str(ROOT / "examples" / "search_folder.py"))["main"]


@pytest.fixture
def search(program: Any, capsys: pytest.CaptureFixture[str]) -> Search:
    """Runs the example; its status, and what it wrote to stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = program([str(word) for word in words])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def searchable(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("searchable") / "out"
    assert main([str(plain), f"--output={output}"]) == 0
    return output


def test_the_example_finds_the_nearest_images(
    trained: Path, pictures: Path, tmp_path: Path, search: Search
) -> None:
    run, output = tmp_path / "run", tmp_path / "exported"
    network = make_run(trained, run)
    assert main([str(run), f"--output={output}"]) == 0
    queries = ["class5/2.png", "class1/0.png"]
    words = [output, pictures, *(pictures / name for name in queries), "--neighbours=6"]
    status, printed, _ = search(*words)
    assert status == 0

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
            assert float(similarity) == pytest.approx(expected.item(), abs=PRINTED)
    assert next(lines, None) is None


def test_the_search_refuses_in_one_line(
    searchable: Path, pictures: Path, tmp_path: Path, search: Search
) -> None:
    query, bomb = pictures / "class0" / "0.png", tmp_path / "bomb.png"
    Image.new("1", (20_000, 10_000)).save(bomb)
    nowhere, undecodable = searchable / "nowhere", searchable / "config.json"
    for words, named in (
        ([nowhere, pictures, query], nowhere),
        ([searchable, searchable, query], searchable),
        ([searchable, pictures, undecodable], undecodable),
        ([searchable, pictures, bomb], bomb),
        ([searchable, pictures, query, "--neighbours=0"], "--neighbours"),
    ):
        status, _, errors = search(*words)
        assert status == 2 and str(named) in errors.splitlines()[-1]


def test_the_example_shows_the_images_upright(
    searchable: Path, tmp_path: Path, search: Search
) -> None:
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
    status, printed, _ = search(searchable, images, query, f"--html={page}")
    nearest, other_one = map(str.split, printed.splitlines()[1:])
    assert (status, nearest[0], Path(nearest[-1]).name) == (0, "1.0000", "1.png")
    assert Path(other_one[-1]).name == "2.png"
    text = page.read_text()
    pictures = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', text)
    assert len(pictures) == text.count("<img") == 3 and "http" not in text
    assert text.count("<b>a &lt;b&gt;</b>") == 2 and text.count("<b>c</b>") == 1
    assert re.findall(r'<figure class="(\w+)"', text) == ["query", "same", "other"]
    for picture in pictures[:2]:
        with Image.open(io.BytesIO(base64.b64decode(picture))) as shown:
            assert shown.size == (30, 60)
            assert np.asarray(shown)[5].mean() > 200 > 50 > np.asarray(shown)[50].mean()

    before = query.read_bytes()
    status, _, errors = search(searchable, folder, query, f"--html={query}")
    assert (status, query.read_bytes()) == (2, before)
    assert f"--html: {query} is there already" in errors


def test_the_search_reads_images_as_a_training_does(
    searchable: Path, tmp_path: Path, search: Search
) -> None:
    """All suffixes, 16 bits and linked folders; no hidden file; a damaged image is named and left out."""
    linked, folder = tmp_path / "elsewhere", tmp_path / "a folder"
    for place in (linked, folder):
        place.mkdir()
    (folder / "linked").symlink_to(linked)
    gray = np.tile(np.linspace(0, 200, 64).astype(np.uint8), (64, 1))
    for name in ("a.png", "a.gif", "a.jfif", "a.jp2", "a.TIFF"):
        Image.fromarray(gray).save(folder / name)
    Image.fromarray(gray.astype(np.uint16) << 8).save(linked / "16.png")
    Image.fromarray(gray.T.copy()).save(linked / "other.png")
    (folder / "._a.png").write_bytes(b"of a Mac")
    (folder / "damaged.png").write_bytes((folder / "a.png").read_bytes()[:60])
    Image.new("1", (20_000, 10_000)).save(folder / "bomb.png")
    status, printed, errors = search(searchable, folder, folder / "a.png", "--neighbours=9")
    assert status == 0
    rows = (line.split(maxsplit=1) for line in printed.splitlines()[1:])
    found = {Path(path).relative_to(folder).as_posix(): float(value) for value, path in rows}
    assert set(found) == {"a.gif", "a.jfif", "a.jp2", "a.TIFF", "linked/16.png", "linked/other.png"}
    assert found["linked/16.png"] == found["a.gif"] == found["a.TIFF"] == pytest.approx(1, abs=1e-3)
    assert found["linked/other.png"] == min(found.values()) < 1
    for name in ("damaged.png", "bomb.png"):
        assert re.search(f"^left out: .*{name}", errors, re.MULTILINE)


def test_the_search_that_an_export_prints_can_be_pasted(
    plain: Path, tmp_path: Path, search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "an export; it's new"
    assert main([str(plain), f"--output={output}"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].partition(": ")[2]
    words = subprocess.run(
        ["bash", "-c", f"python() {{ printf '%s\\n' \"$@\"; }}; {command}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert words[:2] == ["examples/search_folder.py", str(output)]
    status, printed, _ = search(*words[1:])
    assert (status, len(printed.splitlines())) == (0, 1 + 5)


def test_no_search_is_printed_without_images(run: Path, tmp_path: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    record["config"]["data"]["root"] = str(tmp_path / "gone")
    write_json(run / "run.json", record)
    assert example_query(run) == []
    record["config"]["data"] = {"dataset": "cub", "root": str(cub.write(tmp_path / "cub"))}
    write_json(run / "run.json", record)
    root, query = map(Path, example_query(run))
    assert query.is_file() and query.is_relative_to(root) and root.is_relative_to(tmp_path / "cub")
    table = tmp_path / "table.csv"
    table.write_text(f"path,label\n{query.relative_to(root)},a\nother.jpg,b")
    record["config"]["data"] = {"dataset": "table", "root": str(root), "table": str(table)}
    write_json(run / "run.json", record)
    assert example_query(run) == [str(root), str(query)]


def test_it_says_same_or_not_sure(
    searchable: Path, pictures: Path, tmp_path: Path, search: Search
) -> None:
    """By the thresholds of an export that has some."""
    judging = shutil.copytree(searchable, tmp_path / "judging")
    thresholds = {0.01: -1.0, 0.001: 0.99995, 0.0001: None}
    rates = [{"false_accepts": rate, "threshold": least} for rate, least in thresholds.items()]
    write_json(judging / "thresholds.json", {"rates": rates})
    copy = shutil.copytree(pictures, tmp_path / "images")
    shutil.copy(copy / "class5" / "2.png", copy / "class1" / "copy.png")
    asked, page = [copy, copy / "class5" / "2.png"], tmp_path / "page.html"
    _, printed, errors = search(judging, *asked, f"--html={page}")
    lines = [line.removeprefix("  ").split("  ", 1) for line in printed.splitlines()[1:]]
    verdicts = [rest.startswith("same ") for _, rest in lines]
    assert verdicts == [similarity == "1.0000" for similarity, _ in lines]
    assert len(lines) == 5 and {*verdicts} == {True, False}
    assert str(copy / "class1" / "copy.png") in printed
    assert "at least 1.000, as for at most 0.1 % of the pairs" in errors
    text = page.read_text()
    assert text.count('<span class="verdict yes">same</span><br><b>class') == sum(verdicts)
    assert text.count('<span class="verdict">not sure</span><br><b>class') == 5 - sum(verdicts)
    assert text.count("at most 0.1 % of the pairs") == 1
    _, printed, _ = search(judging, *asked, "--false-accepts=0.01")
    assert printed.count("  same  ") == 5
    for rate, export, told in (
        ("0.0001", judging, "has a threshold for 0.01, 0.001, not for 0.0001"),
        ("0.01", searchable, "has no thresholds; train with --evaluation.verification=true"),
    ):
        status, _, errors = search(export, *asked, f"--false-accepts={rate}")
        assert status == 2 and told in errors
    assert "train with --evaluation.verification=true" in search(searchable, *asked)[2]


def test_the_usual_rate_is_the_next_that_was_measured(program: Any, tmp_path: Path) -> None:
    chosen = program.__globals__["threshold"]
    for thresholds, expected in (
        ({0.01: 0.3, 0.001: 0.5, 0.0001: 0.7}, (0.001, 0.5)),
        ({0.05: 0.2, 0.01: 0.3, 0.001: None}, (0.01, 0.3)),
        ({0.0001: 0.7}, (0.0001, 0.7)),
        ({0.01: None}, None),
    ):
        rates = [{"false_accepts": rate, "threshold": least} for rate, least in thresholds.items()]
        write_json(tmp_path / "thresholds.json", {"rates": rates})
        assert chosen(tmp_path, None) == expected


def test_an_index_is_used_again_for_the_same_images_and_model(
    searchable: Path,
    pictures: Path,
    tmp_path: Path,
    program: Any,
    search: Search,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, index = shutil.copytree(pictures, tmp_path / "images"), tmp_path / "index.npz"
    damaged = folder / "class0" / "damaged.png"
    damaged.write_bytes((folder / "class0" / "0.png").read_bytes()[:60])
    model = shutil.copytree(searchable, tmp_path / "model")
    words = [model, folder, folder / "class1" / "0.png", f"--index={index}"]
    read: list[Path] = []
    read_image = program.__globals__["read_image"]

    def reading(path: Path, **options: Any) -> Any:
        read.append(path)
        return read_image(path, **options)

    monkeypatch.setitem(program.__globals__, "read_image", reading)

    def searched() -> tuple[str, str, int]:
        read.clear()
        status, printed, errors = search(*words)
        assert status == 0 and f"left out: {damaged}" in errors and "damaged" not in printed
        return printed, errors, len(read)

    first, told, count = searched()
    assert str(index) not in told and count == CLASSES * IMAGES + 1 + 7
    again, told, count = searched()
    assert again == first and count == 7, "the query, and the images that are shown"
    assert f"{index}: embeddings of {CLASSES * IMAGES + 1} images" in told
    (folder / "class3" / "0.png").unlink()
    _, told, count = searched()
    assert "is of other images, or they have changed; it is made anew" in told and count > 7
    config = model / "config.json"
    config.write_text(config.read_text() + "\n")
    _, told, count = searched()
    assert "is of another model; it is made anew" in told and count > 7
    index.write_text("mine")
    status, _, errors = search(*words)
    assert (status, index.read_text()) == (2, "mine")
    assert "is no index of this program" in errors
