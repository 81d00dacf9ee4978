"""The example that searches a folder with an exported network."""

import base64
import io
import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from benchmarks.datasets import drawn
from benchmarks.evaluation.networks import load_network
from benchmarks.export.trained import embed
from benchmarks.records.files import write_json
from tests.benchmarks.export.conftest import CLASSES, IMAGES, views
from tests.support.processes import ROOT


@pytest.fixture
def search(capsys):
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
        ([exported, pictures, query, "--false-positives=0.1"], "no thresholds for"),
        ([exported, pictures, query, "--false-positives=1.5"], "expected a share"),
    ):
        status, _, errors = search(*words)
        assert status == 2 and str(told) in errors.splitlines()[-1]


def test_one_process_answers_many_queries(exported, pictures, search, monkeypatch, tmp_path):
    """Files, folders and lines of the standard input; what cannot be read is told, and the others go on."""
    empty, folder = tmp_path / "empty", pictures / "class2"
    empty.mkdir()
    asked = [exported / "config.json", folder, empty, tmp_path / "gone", folder / "0.png"]
    status, printed, errors = search(exported, pictures, *asked, "--neighbours=1")
    queries = [line for line in printed.splitlines() if not line.startswith(" ")]
    assert queries == [*(str(folder / f"{i}.png") for i in range(IMAGES)), str(asked[-1])]
    assert status == 1
    told = [line for line in errors.splitlines() if line.startswith("left out: ")]
    assert len(told) == 3 and all(str(path) in "".join(told) for path in (asked[0], *asked[2:4]))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"\n'{folder}'\n{asked[3]}\n {asked[4]}\n"))
    status, again, _ = search(exported, pictures, "--neighbours=1")
    assert (status, again) == (1, printed)


def test_a_file_counts_once(exported, pictures, tmp_path, search):
    """Links to the query and its copies take no neighbour's place, nor do those of an answer."""
    folder = shutil.copytree(pictures, tmp_path / "images")
    query, near = folder / "class1" / "0.png", folder / "class3" / "3.png"
    plain = search(exported, folder, query, near)[1]
    for i in range(6):
        for image in (query, near):
            (folder / f"a{i}-{image.name}").hardlink_to(image)
            (folder / f"b{i}-{image.name}").symlink_to(image)
            shutil.copy(image, folder / f"z{i}-{image.name}")

    def similarities(printed: str) -> list[str]:
        return re.findall(r"^  (\S+)", printed, re.MULTILINE)

    assert similarities(search(exported, folder, query, near)[1]) == similarities(plain)
    outside = shutil.copy(query, tmp_path / "outside.png")
    lines = search(exported, folder, query)[1].splitlines()[1:]
    first, *others = search(exported, folder, outside)[1].splitlines()[1:]
    assert first.startswith("  same file  ") and others[-5:] == lines
    (tmp_path / "link").symlink_to(folder)
    for path in (folder / "class2" / ".." / "class1" / "0.png", tmp_path / "link/class1/0.png"):
        assert search(exported, folder, path)[1].splitlines()[1:] == lines


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
    assert len(pictures) == text.count("<img") == 3 and "://" not in text
    assert text.count("<b>a &lt;b&gt;</b>") == 1 and "in a &lt;b&gt;" in text
    assert re.findall(r"<b>([✓✗])</b> \d", text) == ["✓", "✗"]
    with Image.open(io.BytesIO(base64.b64decode(pictures[1]))) as shown:
        assert shown.size == (30, 60)
        assert np.asarray(shown)[5].mean() > 200 > 50 > np.asarray(shown)[50].mean()

    before = query.read_bytes()
    status, _, errors = search(exported, folder, query, f"--html={query}")
    assert (status, query.read_bytes()) == (2, before)
    assert f"--html: {query} is there already" in errors


def write_thresholds(exported: Path, known: float, unknown: float | None, **more: Any) -> None:
    """Of a test that compared each of 1,000 photographs with 90 others."""
    row = {"false_positives": 0.1, "threshold": known, "true_positives": 0.6, "misnamed": 0.03}
    row |= {"false_positives_half_width": None, "true_positives_half_width": None}
    about = {"compared": 90, "own_images": IMAGES, "unknown_queries": 1000, "unknown_classes": 10}
    about |= {"known_queries": 1000, "known_classes": 10}
    about |= {"unknown": {"missed": 0.1, "threshold": unknown, "rejected": 0.7}}
    write_json(exported / "thresholds.json", {"identification": {**about, "rates": [row], **more}})


def test_it_says_known_not_sure_or_unknown(exported, pictures, tmp_path, search):
    """By the thresholds of an export that has some; the same file is known, whatever they say."""
    judging = shutil.copytree(exported, tmp_path / "judging")
    query, page = pictures / "class5" / "2.png", tmp_path / "page.html"
    nearest = float(search(exported, pictures, query)[1].split()[1])
    for known, unknown, told in (
        (nearest - 0.001, -1, "known: class5"),
        (nearest + 0.001, nearest - 0.001, "not sure, perhaps class5"),
        (1, nearest + 0.001, "unknown"),
        (1, None, "not sure, perhaps class5"),
        (nearest - 0.001, nearest + 0.001, "known: class5"),
    ):
        write_thresholds(judging, known, unknown)
        status, printed, errors = search(judging, pictures, query)
        assert (status, printed.splitlines()[1]) == (0, f"  {told}")
        assert "Of 100 unknown images, 10 are called known" in errors
    write_thresholds(judging, 1.0, 1.0)
    outside = shutil.copy(query, tmp_path / "outside.png")
    _, printed, _ = search(judging, pictures, query, outside, f"--html={page}")
    words = re.findall(r"^  ([a-z].*)$", printed, re.MULTILINE)
    assert words == ["unknown", "known: class5", f"same file  {query}"]
    assert page.read_text().count('<p class="verdict">') == 2
    assert "fewer known photographs" not in errors
    write_thresholds(judging, 0.5, 0.2, own_images=IMAGES + 1)
    assert f"has about {IMAGES} images of a class, so" in search(judging, pictures, query)[2]
    write_thresholds(judging, 0.5, 0.2, compared=5)
    _, printed, errors = search(judging, pictures, query)
    assert "known" not in printed and "the folder is 6.4 times as large as the tested" in errors
    status, _, errors = search(judging, pictures, query, "--false-positives=0.01")
    assert status == 2 and "--false-positives: no threshold is of use" in errors


def test_an_index_embeds_what_is_new(exported, pictures, tmp_path, search):
    """It keeps the rest, drops what is gone, names a damaged image each time, and is of one network and folder."""
    folder, index = shutil.copytree(pictures, tmp_path / "images"), tmp_path / "index.npz"
    damaged = folder / "class0" / "damaged.png"
    damaged.write_bytes((folder / "class0" / "0.png").read_bytes()[:60])
    model = shutil.copytree(exported, tmp_path / "model")
    words = [model, folder, folder / "class1" / "0.png", "--neighbours=99"]

    def searched(told: str) -> dict[str, float]:
        status, printed, errors = search(*words, f"--index={index}")
        assert status == 0 and f"left out: {damaged}" in errors and f"{index}: {told}" in errors
        lines = (line.split() for line in printed.splitlines()[1:])
        return {path: float(similarity) for similarity, path in lines}

    images = CLASSES * IMAGES
    kept, new, gone, changed = (folder / f"class{i}" / "3.png" for i in (4, 5, 6, 7))
    changed.write_bytes(changed.read_bytes() + bytes(9999))
    first = searched(f"0 images kept, {images + 1} new or changed, 0 gone")
    assert searched(f"{images + 1} images kept, 0 new or changed, 0 gone") == first
    with np.load(index) as arrays:
        stored = dict(arrays)
    stored["embeddings"][stored["names"].tolist().index("class4/3.png")] *= -1
    np.savez(index, **stored)
    new = new.with_name("new.png")
    shutil.copy(changed, new)
    gone.unlink()
    state, content = changed.stat(), (folder / "class4" / "0.png").read_bytes()
    changed.write_bytes(content.ljust(state.st_size, b"\0"))  # of the same size and time
    os.utime(changed, ns=(state.st_atime_ns, state.st_mtime_ns))
    now = searched(f"{images - 1} images kept, 2 new or changed, 2 gone or changed")
    index.rename(tmp_path / "old.npz")
    anew = searched(f"0 images kept, {images + 1} new")
    assert now.pop(str(kept)) == -anew.pop(str(kept)) != 0, "it was not embedded again"
    assert now == pytest.approx(anew, abs=2e-4) and str(new) in now and str(gone) not in now

    before, other = index.read_bytes(), tmp_path / "other"
    other.mkdir()
    shutil.copy(kept, other / "x.png")
    config = (model / "config.json").read_text()
    for root, text, content, told in (
        (other, config, before, "is of another folder"),
        (folder, config + "\n", before, "is of another network"),
        (folder, config, b"mine", "is no index of this program"),
    ):
        (model / "config.json").write_text(text)
        index.write_bytes(content)
        status, _, errors = search(model, root, kept, f"--index={index}")
        assert (status, index.read_bytes()) == (2, content) and told in errors


@pytest.mark.slow
def test_the_network_that_is_shipped_finds_characters_that_it_has_not_seen(tmp_path, search):
    images = tmp_path / "images"
    assert drawn.main([str(images), "--classes=20"]) == 0
    assert len(list(images.glob("*/*.png"))) == 20 * 12
    shipped = ROOT / "examples" / "glyphs"
    status, printed, _ = search(shipped, images, images, "--neighbours=1")
    queries = re.findall(r"^/.*/(.+)/.+\.png\n.* /.*/(.+)/.+\.png$", printed, re.MULTILINE)
    right = [query == answer for query, answer in queries]
    assert status == 0 and len(right) == 20 * 12 and np.mean(right) > 0.9
    with pytest.raises(SystemExit) as stop:  # it is not empty any more
        drawn.main([str(images)])
    assert stop.value.code == 2
