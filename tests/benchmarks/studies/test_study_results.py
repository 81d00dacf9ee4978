"""Results that a study keeps, those that are not its own, and what it refuses before the first run."""

import json
import os
import shutil
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image

from benchmarks.building.images import build_datasets
from benchmarks.console.writing import alone
from benchmarks.records.files import read_json, write_json
from benchmarks.records.results import load_run
from benchmarks.reporting import study_page
from benchmarks.reporting.forest import study_figures
from benchmarks.settings.study_reading import read_study
from benchmarks.studies.jobs import Job, plan
from benchmarks.studies.kept import Results
from benchmarks.studies.launching import Launcher
from benchmarks.studies.queue import Queue
from benchmarks.studies.study import Study
from benchmarks.training import parts
from benchmarks.training.parts import build_parts
from tests.benchmarks.made import RECORD
from tests.benchmarks.studies.toy import RATE, change, command, finish, kept_study
from tests.support.fake_trees import write_pictures
from tests.support.processes import ROOT


@pytest.fixture
def folders(toy):
    """Two folders of images, and rows that are trained on a folder."""
    for place, numbers in (("a", "123"), ("b", "456")):
        write_pictures(Path(place), [f"class{name}/{i}.jpg" for name in range(4) for i in numbers])
    table = Path("recipes/toy/table.yaml")
    table.write_text(f"shared: {{data: {{dataset: folder}}}}\n{table.read_text()}")


@pytest.fixture
def told(capsys):
    """What the study's command says that is refused."""

    def told(*options: str) -> str:
        capsys.readouterr()
        assert command(*options) == 2
        return str(capsys.readouterr().err).removeprefix("error: ")

    return told


def test_what_does_not_fit_is_told_before_the_first_run(folders, told, monkeypatch):
    monkeypatch.setattr(parts, "build_parts", build_parts)
    sizes = ["--data.batch_size=4", "--data.samples_per_class=2", "--evaluation.parts=3"]
    line = told("--data.root=a", "--", *sizes)
    assert "toy/table/third: evaluation.parts: each of 3 parts needs two images" in line
    assert not Path("runs").exists()
    assert not Path("toy.json").exists()


def on_its_images(job: Job) -> None:
    test = build_datasets(job.experiment.data, seed=0).test
    data = {"fingerprint": test.fingerprint, "content": test.content}
    finish(job, 0.5, data=RECORD["data"] | data)


def test_a_replaced_image_is_seen_before_anything_is_trained(folders, trained_by, told):
    """Of a file that has the same size; a copy of the folder is the same images."""
    one, other = (Image.new("RGB", (24, 24), colour) for colour in ("red", "blue"))
    one.save("a/class0/0.png", compress_level=0)
    queues = trained_by(on_its_images)
    assert command("--data.root=a") == 0
    shutil.copytree("a", "copy")
    assert command("--data.root=copy") == 0 and len(queues) == 1
    assert "data.root: test of new, seed 0 was measured on other" in told("--data.root=b")
    other.save("copy/class0/0.png", compress_level=0)
    assert Path("copy/class0/0.png").stat().st_size == Path("a/class0/0.png").stat().st_size
    assert "was measured on other images (content" in told("--data.root=copy")


def test_rows_may_have_test_classes_of_their_own(folders, trained_by, told):
    """Two comparisons, each on a draw of test classes of its own."""
    rows = {}
    for draw in (1, 2):
        Path(f"draw{draw}.txt").write_text(f"class{draw}\nclass{draw + 1}\n")
        for row in ("base", "new"):
            own = [f"--data.test_classes=draw{draw}.txt"]
            rows[f"{row}{draw}"] = {"recipe": f"toy/table/{row}", "settings": own}
    compared = {f"{i}": {"claim": "new", "better": f"new{i}", "than": f"base{i}"} for i in (1, 2)}
    change(rows=rows, comparisons=compared)
    queues = trained_by(on_its_images)
    assert command("--data.root=a") == 0
    assert command("--data.root=a") == 0 and len(queues) == 1
    assert kept_study().labels()["new2"] == "new, new2", "another row has its label"
    Path("draw1.txt").write_text("class0\nclass3\n")
    assert "was measured on other images" in told("--data.root=a")


def test_batches_fit_a_folder_of_few_classes(folders, trained_by, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    queues = trained_by(on_its_images)
    assert command("--data.root=a") == 0
    assert os.environ["OMP_NUM_THREADS"] == "1", "of each run"
    assert "few classes: runs get --data.batch_size=8." in capsys.readouterr().out
    assert command("--data.root=a", "--page-only") == 0  # the same plan
    assert command("--data.root=a", "--output=b.md", "--runs=b", "--", "--data.batch_size=4") == 0
    sizes = [{job.experiment.data.batch_size for job in jobs} for jobs in queues]
    assert sizes == [{8}, {4}]  # two classes, four images of each
    wide = ["--output=c.md", "--runs=c", "--", "--model.replace_layer=pca"]
    assert command("--data.root=a", *wide) == 0
    assert "few images: runs get --model.embedding_size=5." in capsys.readouterr().out, "of six"


def test_a_folder_of_too_few_classes_to_choose_on_is_refused(folders, told):
    change(**CHOOSING)
    line = "data.root: a: you have 4 classes, and this study needs 16: 8 to train on, two in"
    assert line in told("--data.root=a")
    assert not Path("runs").exists()


CHOOSING = {"rows": {"base": {}, "new": {"choose": {RATE: [0.1, 0.2]}}, "third": {}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"primary": "recall_at_one"}, "comparisons.1: new does not measure 'recall_at_one'"),
        (
            {"settings": ["--model.hed=pca"]},
            "study toy: rows.new: unrecognized arguments: --model.hed",
        ),
        (CHOOSING | {"choice": {"metric": "loss", "equal_budget": False}}, "choice.metric: new "),
        (
            {"comparisons": {"1": {"claim": "c", "better": "new:parts", "than": "base"}}},
            "new has no output 'parts'; measures: --evaluation.parts of the row asks for it",
        ),
    ],
)
def test_what_no_run_will_measure_is_refused_before_the_first(toy, told, changes, message):
    change(**changes)
    [line] = told().splitlines()
    assert message in line
    assert sorted(path.name for path in Path().iterdir()) == ["recipes", "toy.yaml"]


def test_commands_that_add_at_once_lose_nothing(toy):
    """Each waits for the other, and keeps what that has added since it read the file."""
    path, both = Path("toy.json"), [Results(Path("toy.json")) for _ in range(2)]
    jobs = plan(["toy/table/base"], range(2), Path("runs"), ["--report=false"])
    for job in jobs:
        finish(job, 0.5)
    with alone(path):
        pairs = zip(both, jobs, strict=True)
        adding = [Thread(target=results.add, args=([job],)) for results, job in pairs]
        for thread in adding:
            thread.start()
        adding[0].join(0.3)
        assert adding[0].is_alive() and not path.exists()
    for thread in adding:
        thread.join()
    assert len(json.loads(path.read_text())["results"]) == 2
    assert not list(Path().glob(".toy*"))


def test_a_result_that_another_command_replaces_counts(toy):
    change(**CHOOSING)
    study, path = kept_study(), Path("toy.json")
    jobs = [job for draws in study.candidates("new").values() for job in draws]
    for job, recall in zip(jobs, (0.6, 0.6, 0.5, 0.5), strict=True):
        finish(job, recall)
    study.results.add(jobs)
    assert study.chosen("new") == ((RATE, 0.1),)
    content = read_json(path)
    for job in jobs[2:]:
        content["results"][study.results.name(job)]["metrics"]["mean_average_precision_at_r"] = 0.9
    write_json(path, content)
    study.results.add([])
    assert study.chosen("new") == ((RATE, 0.2),)


def test_tests_keep_their_curves_which_the_page_shows(toy, trained_by, monkeypatch):
    def train(job):
        finish(job, 0.5)
        (job.folder / "records").mkdir()
        curve = "~iteration~,seen_recall_at_1\n10,0.1\n20,0.5\n"
        (job.folder / "records" / "evaluation.csv").write_text(curve)

    trained_by(train)
    monkeypatch.setattr(study_page, "study_figures", study_figures)
    assert command() == 0
    for result in json.loads(Path("toy.json").read_text())["results"].values():
        assert result["curves"] == {"step": [10, 20], "seen_recall_at_1": [0.1, 0.5]}
    assert "](toy_curves.svg)" in Path("toy.md").read_text()
    assert "Recall@1 (%) on training classes" in Path("toy_curves.svg").read_text()


def test_damaged_results_are_named_and_kept(toy, trained_by, told):
    trained_by(lambda job: finish(job, 0.5))
    assert command() == 0
    damaged = Path("toy.json").read_text().replace("0.5", "0.6", 1)
    Path("toy.json").write_text(damaged)
    assert told("--page-only").startswith("toy.json: is damaged (")
    assert Path("toy.json").read_text() == damaged
    line = "--output: expected a .md file, got toy.json"
    assert line in told("--page-only", "--output=toy.json")


def test_a_page_needs_a_comparison_with_results(toy, told):
    assert "no comparison has both rows finished at 2 seeds" in told("--page-only")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--data.split=test", "--data.split=test: is set by this command"),
        ("--data={split: validation}", "data.split: 'test' of new is set by this command"),
        ("--seed=3", "--seed=3: is set by this command"),
        (f"--{RATE}=0.5", f"{RATE}: 0.1 of new is set by this command"),
    ],
)
def test_no_setting_behind_the_dashes_chooses_by_the_test(toy, told, setting, message):
    change(**CHOOSING)
    assert message in told("--page-only", "--", setting)
    assert not Path("runs").exists()


def test_a_study_waits_for_runs_of_another_command(toy, trained_by, monkeypatch, capsys):
    def train(job):
        if job is queues[0][0]:
            job.status = "in use"
        else:
            finish(job, 0.5)

    def in_use(job: Job) -> bool:
        finish(job, 0.7)  # by the other command
        return False

    queues = trained_by(train)
    monkeypatch.setattr(Job, "in_use", in_use)
    assert command() == 0
    assert "Waiting for 1 runs of another command" in capsys.readouterr().out
    assert kept_study().results.of(queues[0][0])["metrics"]["recall_at_1"] == 0.7


@pytest.mark.slow
@pytest.mark.parametrize("row", ["binomial", "binomial_horde"])
def test_a_published_result_is_found_and_measured_again(row, glyphs_root, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = Results(ROOT / "results" / "claims.json")
    made = Study(read_study("glyphs"), results, tmp_path, [f"--data.root={glyphs_root}"])
    job = made.tests(row)[0]
    published = results.of(job)
    assert Queue(lambda: [job], 1, Launcher()).run() == 0
    found = load_run(job.folder).info["metrics"]
    for metric, value in published["metrics"].items():  # other processors round sums differently
        assert found[metric] == pytest.approx(value, abs=0.02), metric
