"""`python -m benchmarks.datasets`: lists, fetches and checks; on complete trees, and on each kind of broken one."""

import functools
import hashlib
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.datasets import IMAGE_DATASETS, __main__, fetch
from benchmarks.datasets.listing import Archive, DatasetError, Listing, load
from benchmarks.datasets.verify import Check, verify
from tests.support.fake_trees import cars, cub, inshop, sop
from tests.support.processes import ROOT, TIMEOUT, environment
from tests.support.server import serving

SMALL_CUB = {"train": (33, 8), "test": (20, 5)}
LAYOUTS: dict[tuple[str, str], Callable[[Path], Path]] = {
    ("cub", "CUB_200_2011"): cub.write,
    ("sop", "Stanford_Online_Products"): sop.write,
    **{("cars", layout): functools.partial(cars.write, layout=layout) for layout in cars.LAYOUTS},
    **{
        ("inshop", images): functools.partial(inshop.write, images=[images])
        for images in ("img", "img_highres")
    },
}


@pytest.fixture
def command(capsys):
    """Runs the command; its status, and what it wrote to stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        try:
            status = __main__.main([str(argument) for argument in argv])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def small_cub(tmp_path, monkeypatch) -> Path:
    """A small CUB-200-2011 that counts as the published one; its folder is in `tmp_path / "data"`."""
    publish(monkeypatch, "cub", counts=SMALL_CUB)
    return cub.write(tmp_path / "data")


def publish(monkeypatch, name: str, **changes: object) -> None:
    monkeypatch.setitem(IMAGE_DATASETS, name, replace(IMAGE_DATASETS[name], **changes))


def table(output: str) -> dict[str, str]:
    """The rest of the line of each check, after its name."""
    _, *lines = output.partition("\n\n")[0].splitlines()
    return {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in lines}


def failed(output: str) -> list[str]:
    return [name for name, rest in table(output).items() if rest.startswith("FAILED")]


# ------------------------------------------------------------------------------------------- list


def test_list_shows_what_there_is(command):
    status, output, _ = command("list")
    assert status == 0
    assert max(map(len, output.splitlines())) <= 80
    one_line = " ".join(output.split())
    for info in IMAGE_DATASETS.values():
        texts = (info.title, info.licence, info.citation, *info.layouts)
        for text in (*texts, *(f"{i:,} / {c:,}" for i, c in info.counts.values())):
            assert text in one_line
    downloads = [line.split(maxsplit=1)[1] for line in output.splitlines() if "  download" in line]
    assert downloads[1:] == ["1.15 GB", "by hand", "3.08 GB", "by hand"]


# ------------------------------------------------------------------------------- verify: complete


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_complete_dataset_passes(command, tmp_path, monkeypatch, name, layout):
    LAYOUTS[name, layout](tmp_path)
    publish(monkeypatch, name, counts=IMAGE_DATASETS[name].read(tmp_path).counts())
    status, output, _ = command("verify", name, "--data.root", tmp_path)
    assert status == 0, output
    assert table(output)["listed"].endswith(f"layout {layout}")


def test_the_table_says_what_there_is(command, small_cub):
    listing = IMAGE_DATASETS["cub"].read(small_cub)
    status, output, _ = command("verify", "cub", "--data.root", small_cub, "--num_workers", 3)
    assert status == 0
    assert table(output) == {
        "listed": "53 images, layout CUB_200_2011",
        "counts": "ok      train 33 / 8, test 20 / 5",
        "listed once": "ok      0 images are listed more than once",
        "disjoint": "ok      0 classes both train and test",
        "files": "ok      0 of 53 are missing or unreadable",
        "images": "ok      0 of 53 cannot be decoded to RGB",
        "boxes": "ok      0 are empty or outside their image; 0 reach over the edge",
        "smallest": f"48 x 40, {listing.paths[0]}",
        "largest": f"48 x 40, {listing.paths[0]}",
        "grayscale": "4 images",  # one of 16 pictures, in turns
        "rotated": "0 images by their EXIF orientation, read as stored",
        # The 16 pictures train; they come again from the 17th image on, and the last 20 test.
        "same content": f"33 images both train and test, the first is {listing.paths[0]} = {listing.paths[48]}",
        "not listed": "1 files beside the images",  # macOS's
        "fingerprint": listing.fingerprint,
    }


def test_all_of_a_full_size_dataset_is_looked_at(command, tmp_path):
    cub.write(tmp_path, cub.FULL)
    status, output, _ = command("verify", "cub", "--data.root", tmp_path, "--fast")
    assert status == 0, output
    assert "0 of 11,788 cannot be opened" in table(output)["images"]
    assert "same content" not in table(output)  # contents are not read


def test_sizes_and_boxes_and_files_beside_are_found(command, small_cub):
    listing = IMAGE_DATASETS["cub"].read(small_cub)
    for path, size in ((listing.paths[20], (60, 24)), (listing.paths[30], (40, 200))):
        (small_cub / path).unlink()
        Image.new("RGB", size).save(small_cub / path)
    (small_cub / "images" / "more").mkdir()
    for name in ("a.jpg", "b.txt"):
        (small_cub / "images" / "more" / name).write_text("")
    status, output, _ = command("verify", "cub", "--data.root", small_cub)
    assert status == 0
    assert table(output)["smallest"] == f"60 x 24, {listing.paths[20]}"
    assert table(output)["largest"] == f"40 x 200, {listing.paths[30]}"
    assert table(output)["boxes"].endswith("; 1 reach over the edge")
    assert table(output)["not listed"] == "3 files beside the images"


# --------------------------------------------------------------------------------- verify: broken


def remove(path: Path) -> None:
    path.unlink()


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def forbid(path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may read everything")
    rewrite(path, path.read_bytes())
    path.chmod(0)


def rewrite(path: Path, content: bytes) -> None:
    """Into a file of its own, since the pictures are hard links."""
    path.unlink()
    path.write_bytes(content)


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def truncate(path: Path) -> None:
    content = path.read_bytes()
    rewrite(path, content[: len(content) * 2 // 3])


def huge(path: Path) -> None:
    """The head of an image of 60,000 x 60,000 pixels, which Pillow refuses to open."""
    rewrite(
        path,
        b"BM"
        + bytes(8)
        + b"\x36\0\0\0\x28\0\0\0"
        + b"\x60\xea\0\0" * 2
        + b"\1\0\x18\0"
        + bytes(24),
    )


@pytest.mark.parametrize(
    ("breaks", "check", "message"),
    [
        (remove, "files", "cannot be read (No such file or directory)"),
        (
            put_folder,
            "files",
            "cannot be read (it is a folder, a pipe or a device); restore the file",
        ),
        (put_pipe, "files", "cannot be read (it is a folder, a pipe or a device); restore"),
        (put_device, "files", "cannot be read (it is a folder, a pipe or a device); restore"),
        (forbid, "files", "cannot be read (Permission denied)"),
        (truncate, "images", "cannot be decoded (image file is truncated"),
        (lambda path: rewrite(path, b""), "images", "cannot be opened (cannot identify image"),
        (
            lambda path: rewrite(path, b"not found\n"),
            "images",
            "cannot be opened (cannot identify image",
        ),
        (huge, "images", "cannot be opened (Image size (3600000000 pixels) exceeds"),
    ],
    ids=["missing", "folder", "pipe", "device", "unreadable", "truncated", "empty", "text", "huge"],
)
def test_a_broken_file_is_named(command, small_cub, breaks, check, message):
    path = small_cub / IMAGE_DATASETS["cub"].read(small_cub).paths[40]
    breaks(path)
    status, output, _ = command("verify", "cub", "--data.root", small_cub)
    assert status == 1
    assert failed(output) == [check]
    assert table(output)[check].startswith("FAILED  1 of 5")
    assert f"\n{path}: {message}" in output
    status, _, _ = command("verify", "cub", "--data.root", small_cub, "--fast")
    assert status == (breaks is not truncate)


def test_what_the_loader_would_not_take_fails(command, small_cub):
    path = small_cub / IMAGE_DATASETS["cub"].read(small_cub).paths[0]
    path.unlink()
    Image.new("F", (48, 40)).save(path, "TIFF")
    status, output, _ = command("verify", "cub", "--data.root", small_cub)
    assert (status, failed(output)) == (1, ["images"])


def test_all_that_is_wrong_is_told_at_once(command, tmp_path, monkeypatch):
    publish(monkeypatch, "cub", counts={"train": (34, 8), "test": (20, 5)})
    folder = cub.write(tmp_path)
    paths = IMAGE_DATASETS["cub"].read(tmp_path).paths
    remove(folder / paths[3])
    truncate(folder / paths[4])
    status, output, _ = command("verify", "cub", "--data.root", tmp_path)
    assert status == 1
    assert failed(output) == ["counts", "files", "images"]
    assert "train 33 / 8, test 20 / 5; published: train 34 / 8, test 20 / 5" in output
    assert "1 of 52 cannot be decoded" in output
    assert "fingerprint" not in table(output)  # of half a dataset


def listing_of(root: Path, **changes: object) -> Listing:
    """Two images of 4 x 3 pixels."""
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 3)).save(root / name)
    listing = Listing("two", root, "flat", ["a.png", "b.png"], ["a", "b"], ["train", "test"])
    return replace(listing, **changes)


@pytest.mark.parametrize(
    ("changes", "name", "detail"),
    [
        ({"paths": ["b.png"] * 2}, "listed once", "1 images .* the first is b.png"),
        ({"classes": ["a", "a"]}, "disjoint", "1 classes .* the first is a"),
        *(
            ({"boxes": [(0, 0, 4, 3), box]}, "boxes", "1 are empty .* the first is b.png; 0 reach")
            for box in [(4, 0, 9, 3), (-2, 0, 0, 3), (0, 3, 4, 4), (2, 1, 2, 3), (1, 1, 1.4, 3)]
        ),
    ],
)
def test_a_wrong_list_fails(tmp_path, changes, name, detail):
    checks, _ = verify(listing_of(tmp_path, **changes), num_workers=1)
    [check] = [check for check in checks if check.passed is False]
    assert check.name == name
    assert re.search(detail, check.detail)


def test_a_broken_file_that_is_listed_twice_is_reported_once(tmp_path):
    listing = listing_of(tmp_path, paths=["c.png", "c.png"])
    assert len(verify(listing, num_workers=1)[1]) == 1


def test_equal_images_of_one_part_are_no_leak(tmp_path):
    checks, _ = verify(listing_of(tmp_path, parts=["train", "train"]), num_workers=1)
    assert Check("same content", None, "0 images both train and test") in checks


def test_nothing_to_look_at_is_no_error(tmp_path):
    empty = Listing("none", tmp_path, "flat", [], [], [])
    checks, broken = verify(empty, {}, num_workers=1)
    assert Check("counts", True, "") in checks
    assert all(check.passed is not False for check in checks)
    assert not broken


def test_the_report_has_all_broken_files(command, small_cub, tmp_path):
    listing = IMAGE_DATASETS["cub"].read(small_cub)
    broken = [small_cub / path for path in listing.paths[10:35]]
    for path in broken:
        remove(path)
    status, output, _ = command("verify", "cub", "--data.root", small_cub)
    assert status == 1
    assert sum("cannot be read" in line for line in output.splitlines()) == 20
    assert output.endswith("... and 5 more; --report FILE lists all\n")

    report = tmp_path / "report.txt"
    _, output, _ = command("verify", "cub", "--data.root", small_cub, "--report", report)
    assert [line.partition(": ")[0] for line in report.read_text().splitlines()] == [
        *map(str, broken)
    ]
    assert output.endswith(f"25 broken files are listed in {report}\n")


@pytest.mark.parametrize("kind", ["image", "index file", "linked image", "pipe"])
def test_the_report_overwrites_nothing(command, small_cub, tmp_path, kind):
    listing = IMAGE_DATASETS["cub"].read(small_cub)
    remove(small_cub / listing.paths[1])
    path = small_cub / ("images.txt" if kind == "index file" else listing.paths[0])
    if kind == "linked image":
        path = tmp_path / "report"
        path.symlink_to(small_cub / listing.paths[0])
    if kind == "pipe":
        path = tmp_path / "report"
        os.mkfifo(path)
    before = None if kind == "pipe" else path.read_bytes()
    arguments = ("verify", "cub", "--data.root", small_cub, "--report", path)
    status, output, errors = command(*arguments)
    assert (status, output) == (2, "")
    assert errors.endswith(f"--report: {path} is there already; name a new file, or remove it\n")
    inside = small_cub / "report.jpg"
    status, _, errors = command(*arguments[:-1], inside)
    assert (status, inside.exists()) == (2, False)
    assert "would lie among the images; name a file elsewhere" in errors
    assert before is None or path.read_bytes() == before


def test_a_reader_error_is_one_sentence(command, small_cub):
    (small_cub / "images.txt").write_text("1 a b\n")
    status, output, errors = command("verify", "cub", "--data.root", small_cub)
    with pytest.raises(DatasetError) as caught:
        IMAGE_DATASETS["cub"].read(small_cub)
    assert (status, output, errors) == (1, "", f"error: {caught.value}\n")


# ---------------------------------------------------------------------------------- verify: usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: command"),
        (["fetch"], "invalid choice: 'fetch'"),
        (["verify", "cup", "--data.root", "."], "invalid choice: 'cup'"),
        (["download", "folder", "--data.root", "."], "invalid choice: 'folder'"),
        (["verify", "cub"], "arguments are required: --data.root"),
        (["verify", "cub", "--data.root", "nowhere"], "--data.root: nowhere is not a folder"),
        (["verify", "cub", "--data.root", "a_file"], "--data.root: a_file is not a folder"),
        (["verify", "cub", "--data.root", ".", "--num_workers", "0"], "expected 1 to 256, got 0"),
        (["verify", "cub", "--data.root", ".", "--num_workers", "100000"], "to 256, got 100000"),
        (
            ["verify", "cub", "--data.root", ".", "--report", "no/where"],
            "--report: no/where cannot be a file",
        ),
        (["verify", "cub", "--data.root", ".", "--report", "."], "--report: . cannot be a file"),
        (
            ["verify", "cub", "--data.root", ".", "--data.test_classes", "0.5"],
            "--data.test_classes: cub has its published split",
        ),
        (
            ["verify", "cub", "--data.root", ".", "--data.class_level", "1"],
            "--data.class_level: cub has its published classes",
        ),
        (["verify", "folder", "--data.root", ".", "--data.class_level", "0"], "at least 1, got 0"),
    ],
)
def test_a_usage_error_is_told(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("")
    status, _, errors = command(*arguments)
    assert status == 2
    assert message in errors


def test_ctrl_c_ends_with_its_own_status(command, tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "check", interrupted)
    status, _, errors = command("verify", "cub", "--data.root", tmp_path)
    assert status == 130
    assert "stopped" in errors


def test_it_runs_as_a_module(small_cub, tmp_path):
    images = small_cub / "images"
    truncate(next(images.glob("*/Species_1_0000.jpg")))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.datasets", "verify", "folder"),
            *("--data.root", images, "--data.test_classes", "0.3"),
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert failed(done.stdout) == ["images"]


# --------------------------------------------------------------------------------- verify: folder


@pytest.mark.parametrize("named", [False, True], ids=["fraction", "file"])
def test_a_folder_of_ones_own_is_checked(command, small_cub, tmp_path, named):
    names = tmp_path / "names.txt"
    names.write_text("101.Species_101\n")
    status, output, _ = command(
        *("verify", "folder", "--data.root", small_cub / "images"),
        *("--data.test_classes", names if named else 3 / 13),
    )
    assert status == 0
    assert f"/ {1 if named else 3}" in table(output)["counts"].partition("test")[2]
    assert not table(output)["counts"].startswith("ok")  # nothing is published to compare with


def test_the_first_folders_of_a_tree_can_be_the_classes(command, tmp_path):
    for name in ("Fruit/Apple/Gala", "Fruit/Kiwi", "Milk/Oat"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (4, 3)).save(tmp_path / name / "1.png")
    arguments = ("verify", "folder", "--data.root", tmp_path, "--fast")
    status, output, _ = command(*arguments)
    assert status == 0
    said = "2 first-level folders; classes: 2 at depth 2, 1 at depth 3"
    assert table(output)["classes"] == said
    (tmp_path / "Fruit" / "Oat").mkdir()
    Image.new("RGB", (4, 3)).save(tmp_path / "Fruit" / "Oat" / "2.png")
    _, output, _ = command(*arguments)
    assert "names that several classes share: 1, such as 'Oat'; merge" in table(output)["classes"]
    status, output, _ = command(*arguments, "--data.class_level", 1)
    assert status == 0
    assert table(output)["classes"] == "2 first-level folders; classes: 2 at depth 1"


@pytest.mark.parametrize("wrong", ["0", "1.5", "names.txt"])
def test_impossible_test_classes_are_a_usage_error(
    command, small_cub, monkeypatch, tmp_path, wrong
):
    monkeypatch.chdir(tmp_path)
    Path("names.txt").write_text("no such class\n")
    status, _, errors = command(
        *("verify", "folder", "--data.root", small_cub / "images", "--data.test_classes", wrong)
    )
    assert status == 2
    assert "error: --data.test_classes: " in errors


def test_a_folder_without_classes_is_told(command, tmp_path):
    status, _, errors = command("verify", "folder", "--data.root", tmp_path)
    assert status == 1
    assert str(tmp_path) in errors


# --------------------------------------------------------------------------------------- download


@pytest.fixture
def served(tmp_path, monkeypatch):
    """CUB-200-2011 as an archive on a local server; the paths that were asked for."""
    folder = cub.write(tmp_path / "server")
    path = tmp_path / "server" / "CUB_200_2011.tgz"
    with tarfile.open(path, "w:gz", dereference=True) as archive:
        archive.add(folder, folder.name)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetch, "RETRIES", 0)
    content = path.read_bytes()
    with serving(path.parent) as server:
        digest = hashlib.sha256(content).hexdigest()
        archive = Archive(server.url(path.name), path.name, len(content), digest)
        publish(monkeypatch, "cub", counts=SMALL_CUB, archive=archive)
        yield server.requests


@pytest.mark.parametrize("keep", [True, False])
def test_download_fetches_and_unpacks_once(command, tmp_path, served, keep):
    root = tmp_path / "new" / "data"
    arguments = ["download", "cub", "--data.root", root, *([] if keep else ["--no-keep_archive"])]
    status, output, _ = command(*arguments)
    assert status == 0
    listing = load(IMAGE_DATASETS["cub"], root)
    assert output == (
        f"cub: all 53 images are in {listing.root}, fingerprint {listing.fingerprint}\n"
    )
    assert listing.root == root / "CUB_200_2011" / "CUB_200_2011"
    assert (root / "CUB_200_2011.tgz").exists() == keep
    assert len(served) == 1
    assert command(*arguments)[:2] == (0, output)
    assert len(served) == 1


def test_an_incomplete_folder_is_not_fetched_in_vain(command, tmp_path, served):
    root = tmp_path / "data"
    folder = cub.write(root)
    remove(folder / IMAGE_DATASETS["cub"].read(root).paths[7])
    status, _, errors = command("download", "cub", "--data.root", root)
    assert status == 1
    assert "1 of 53 images are missing, the first is" in errors
    assert f"or move {folder} away" in errors
    assert not served


@pytest.mark.parametrize("wrong", [{"size": 5}, {"sha256": 64 * "0"}, {"url": "nowhere"}])
def test_a_failed_download_leaves_no_dataset(command, tmp_path, served, monkeypatch, wrong):
    archive = replace(IMAGE_DATASETS["cub"].archive, **wrong)
    publish(monkeypatch, "cub", archive=archive)
    status, output, errors = command("download", "cub", "--data.root", tmp_path / "data")
    assert (status, output) == (1, "")
    assert "error: " in errors
    assert not (tmp_path / "data" / "CUB_200_2011").exists()


def test_a_download_of_another_dataset_is_told(command, tmp_path, served, monkeypatch):
    publish(monkeypatch, "cub", counts={"train": (5_864, 100), "test": (5_924, 100)})
    status, _, errors = command("download", "cub", "--data.root", tmp_path / "data")
    assert status == 1
    assert "lists train 33 / 8, test 20 / 5, but cub has" in errors


def test_without_a_link_it_says_where_to_get_the_files(command, tmp_path, monkeypatch):
    arguments = ("download", "cars", "--data.root", tmp_path)
    status, _, errors = command(*arguments)
    assert status == 2
    assert IMAGE_DATASETS["cars"].by_hand in errors
    cars.write(tmp_path, "combined")
    publish(monkeypatch, "cars", counts=IMAGE_DATASETS["cars"].read(tmp_path).counts())
    assert command(*arguments)[0] == 0
