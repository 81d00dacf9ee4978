"""`python -m benchmarks.evaluate` tests a run's network, or an export, on its own images and on others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evaluate import main
from tests.benchmarks.runs import forget

from .conftest import CLASSES, IMAGES


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget()


@pytest.fixture
def tested(tmp_path: Path) -> Any:
    """The record of an evaluation that works."""

    def tested(folder: Path, *words: str) -> Any:
        output = tmp_path / "new" / "result.json"
        forget()
        assert main([str(folder), f"--output={output}", *words]) == 0
        record = json.loads(output.read_text())
        output.unlink()
        return record

    return tested


def table(file: Path, pictures: Path, column: str, value: Callable[[int, int], int]) -> list[str]:
    """Words that name a table of the pictures, with a column of numbers by class and image."""
    names = [(i, j) for i in range(CLASSES) for j in range(IMAGES)]
    lines = [f"class{i}/{j}.png,class{i},{int(value(i, j))}" for i, j in names]
    file.write_text("\n".join([f"path,label,{column}", *lines]))
    return ["--data.dataset=table", f"--data.table={file}", f"--data.root={pictures}"]


def printed(capsys: Any) -> str:
    """Without the breaks between lines."""
    return " ".join(capsys.readouterr().out.split())


def test_a_run_has_its_own_numbers_and_others(trained, pictures, tested, tmp_path, capsys):
    """To the bit, whatever the K, also if its images were moved; the run's folder stays as it is."""
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    (tmp_path / "moved").symlink_to(pictures)
    words = ["--evaluation.recall_at=[1, 3]", "--evaluation.parts=2"]
    found = tested(trained, *words, "--data.root", str(tmp_path / "moved"))
    record = json.loads((trained / "run.json").read_text())
    for name in ("recall_at_1", "mean_average_precision_at_r", "r_precision"):
        assert found["metrics"][name] == record["metrics"][name]
    assert "recall_at_3" in found["metrics"] and "parts" in found["outputs"]
    for name in ("verification", "identification", "per_class"):
        assert found[name] == record[name]
    assert found["data"]["content"] == record["data"]["content"]
    assert before == {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    about = "folder: unseen test classes (4 classes, 16 images, 16 queries), tested with"
    assert f"{about} {trained}" in (output := printed(capsys))
    assert "may have been trained" not in output
    chosen = "settings are chosen on the tested classes"
    for split, reason in (("all", "the tested classes were trained on"), ("validation", chosen)):
        seen = tested(trained, f"--data.split={split}", "--data.folds=2")
        assert "verification" in seen and "identification" not in seen
        assert (said := printed(capsys)).startswith("folder: other images (")
        assert f"Known or unknown? Not measured: {reason}." in said


def test_an_export_gives_the_runs_numbers(trained, exported, pictures, tested, tmp_path, capsys):
    """On some classes of other images: its test view and its weights are those of the run."""
    (tmp_path / "other").mkdir()
    for i in (1, 3, 4):
        (tmp_path / "other" / f"class{i}").symlink_to(pictures / f"class{i}")
    words = ["--data.dataset=folder", f"--data.root={tmp_path / 'other'}"]
    found = [tested(of, *words, "--data.test_classes=0.67") for of in (trained, exported)]
    assert printed(capsys).count("may have been trained on some of these classes") == 2
    for record in found:
        assert (record["data"]["test_classes"], record["data"]["test_images"]) == (2, 2 * IMAGES)
    views = [record["data"].pop("view") for record in found]
    assert views[0] == {**views[1], "resize": None}  # the default, which the export names
    assert found[0]["data"] == found[1]["data"]
    for name, value in found[1]["metrics"].items():
        assert value == pytest.approx(found[0]["metrics"][name], abs=1e-6)
    (again := tmp_path / "again").symlink_to(exported)
    for name in ("again-evaluation.json", "again-evaluation-2.json"):  # none is overwritten
        forget()
        assert main([str(again), *words]) == 0
        assert printed(capsys).endswith(f"Result: {tmp_path / name}")


def test_own_queries_are_searched_in_an_own_gallery(trained, pictures, tested, tmp_path, capsys):
    """The gallery has one image of each class except the first: Recall@8 is 1 for the others' queries."""
    words = table(tmp_path / "t.csv", pictures, "is_query", lambda i, j: j > 0 or i == 0)
    found = tested(trained, *words, "--evaluation.verification=false")
    assert found["metrics"]["recall_at_8"] == 1.0
    answered = (CLASSES - 1) * (IMAGES - 1)
    assert sum(found["per_class"]["queries"]) == answered, "all classes"
    asked = answered + IMAGES
    assert (found["data"]["test_queries"], found["data"]["unanswered_queries"]) == (asked, IMAGES)
    told = f"32 images, {asked} queries, of which {IMAGES} have nothing to find and do not count)"
    assert told in printed(capsys)
    assert not {"verification", "identification"} & found.keys()


def test_images_of_a_querys_camera_leave_its_ranking(trained, pictures, tested, tmp_path, capsys):
    """Of the run's own images: class 0 is of one camera, so that nothing is left of it to find."""
    words = table(tmp_path / "t.csv", pictures, "camera", lambda i, j: j % 2 if i else 0)
    whole = tested(trained, *words)
    for setting, told in (("camera", "class and camera"), ("sequence", "sequence")):
        found = tested(trained, *words, f"--data.{setting}=camera")
        told = f"images of a query's {told} (column camera) leave its ranking)"
        assert f"{IMAGES} have nothing to find and do not count; {told}" in printed(capsys)
        assert found["data"]["unanswered_queries"] == IMAGES
        # Pairs of class 0, and of the others' two cameras.
        leave = IMAGES * (IMAGES - 1) // 2 + (CLASSES - 1) * IMAGES // 2 * (IMAGES // 2 - 1)
        pairs = whole["verification"]["same_pairs"] - leave
        assert found["verification"]["same_pairs"] == pairs
        known = found["identification"]["known_queries"]
        assert known == (CLASSES - 1) * IMAGES == sum(found["per_class"]["queries"])


def test_a_command_that_cannot_be_meant(trained, exported, tmp_path, refused, capsys):
    output, taken = tmp_path / "x.json", tmp_path / "taken.json"
    taken.touch()
    for folder, words, line in (
        (trained, ["--data.dataset=glyphs"], "data.dataset: "),
        (trained, [f"--output={taken}"], f"--output: {taken} exists"),
        (trained, [f"--output={taken / 'below'}"], f"--output: {taken / 'below'}: Not a directory"),
        (tmp_path, [], f"{tmp_path}: holds neither run.json nor model.safetensors"),
        (exported, [], "data.root: "),
    ):
        assert refused(main, folder, f"--output={output}", *words).startswith(line)
        assert not output.exists()
    with pytest.raises(SystemExit, match="2"):
        main([str(trained), "--optimization.steps=3"])
    assert "--optimization.steps=3: is no setting of a test; --help" in capsys.readouterr().err
