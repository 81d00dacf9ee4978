"""The command that tests the papers' claims, and the file of its results."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from benchmarks.reporting.kept import Results

from benchmarks import claims
from benchmarks.records import load_run
from benchmarks.records.files import write_json
from benchmarks.settings import recipe_files
from benchmarks.studies.jobs import Job
from benchmarks.studies.planning import plan
from tests.benchmarks.made import DIVERGED, write_record
from tests.support.processes import ROOT, TIMEOUT, environment
from tests.support.processes import command as command_line

# ---------------------------------------------------------------------------------------- the command


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three rows, four claims on them, and an empty working folder."""
    (tmp_path / "recipes" / "toy").mkdir(parents=True)
    loss = {"losses": [{"loss": {"class_path": "pml_regularizers.BinomialDevianceLoss"}}]}
    trainings = {"base": {"label": "base", **loss}, "new": {"label": "new", "seed": 7, **loss}}
    trainings["third"] = {"label": "third", **loss}
    (tmp_path / "recipes" / "toy" / "table.yaml").write_text(
        yaml.safe_dump({"trainings": trainings})
    )
    sides = {"paper": "Table 1", "better": "new", "than": "base"}
    content = {
        **{"recipes": "toy/table", "margin": 1.0, "settings": {}},
        **{"draws": 2, "first": 2, "tuned": {}, "takes": {}},
        "claims": {
            "1": {"claim": "new is better", **sides},
            "4": {"claim": "the third is better", "paper": "none", "better": "third", "than": "base"},
            "2": {"claim": "new is as good", "equivalent": True, **sides},
            "3": {"claim": "its curve is higher", **sides, "better": "new:curve", "than": "base:curve",
                  "metric": "seen_recall_at_1"},
        },
    }  # fmt: skip
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(recipe_files, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(claims, "CLAIMS", Path("claims.yaml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def make(toy: Path) -> Callable[..., None]:
    """A finished run of the settings that the command asks for."""

    def build(row: str, seed: int, recall: float, processor: str = "A") -> None:
        [job] = plan([f"toy/table/{row}"], [seed], Path("runs/claims"), ["--report=false"])
        finish(job, recall, processor)

    return build


def diverge(job: Job) -> None:
    finish(job, 0.0, **DIVERGED)


def finish(job: Job, recall: float, processor: str = "A", **changes: Any) -> None:
    (job.folder / "records").mkdir(parents=True)
    (job.folder / "records" / "evaluation.csv").write_text(
        f"~iteration~,seen_recall_at_1\n10,0.1\n20,{recall}\n"
    )
    about = {"label": job.training.rpartition("/")[2], "seed": job.seed, "config": job.config}
    metrics = {"recall_at_1": recall, "mean_average_precision_at_r": recall / 2}
    measured = {"metrics": metrics, "hardware": {"processor": processor}, "wall_time_s": 3600.0}
    write_record(job.folder, **about | measured | changes)


@pytest.fixture
def trained_by(monkeypatch):
    """Let a function of the jobs stand for the sweep."""

    def replace(train: Callable[[list[Job]], None]) -> None:
        class Trained:
            def __init__(self, jobs, launcher, *, redo_stale):
                assert redo_stale  # or a choice that came out otherwise could not be trained
                self.jobs = jobs

            def run(self):
                train(self.jobs)

        monkeypatch.setattr("benchmarks.studies.Queue", Trained)

    return replace


def change_claims(**changes: Any) -> None:
    content = yaml.safe_load(Path("claims.yaml").read_text())
    Path("claims.yaml").write_text(yaml.safe_dump(content | changes))


def command(*options: str) -> int:
    return claims.main(["--output=claims.md", *options])


def test_what_is_not_run_yet_is_named(make, capsys):
    for seed in (0, 1):
        make("base", seed, 0.5)
    assert command("--page-only") == 2
    assert "no claim has both rows finished at 10 seeds, neither in" in capsys.readouterr().err
    make("new", 0, 0.6)
    assert command("--page-only", "--seeds=2") == 2  # no word before all seeds are there
    make("new", 1, 0.6)
    assert command("--page-only", "--seeds=2") == 0
    assert "was not committed" not in Path("claims.md").read_text()
    assert "Not measured yet: 4." in Path("claims.md").read_text()


def test_results_outlive_their_folders_and_no_change_of_settings(make, trained_by):
    for seed in range(3):
        make("base", seed, 0.5)
        make("new", seed, 0.6 + seed / 100)
        make("third", seed, 0.5 + seed / 100)
    assert command("--page-only", "--seeds=3") == 0
    page = Path("claims.md").read_text()
    shutil.rmtree("runs")
    started = []
    trained_by(lambda jobs: started.extend(job.name for job in jobs))
    assert command("--seeds=3") == 0
    assert Path("claims.md").read_text() == page
    assert started == []
    assert command("--seeds=3", "--", "--optimization.steps=7") == 2
    assert started == [
        f"toy/table/{row}, seed {seed}" for row in ("new", "base", "third") for seed in range(3)
    ]
    kept = json.loads(Path("claims.json").read_text())
    next(iter(kept["results"].values()))["metrics"]["recall_at_1"] = 0.9
    Path("claims.json").write_text(json.dumps(kept))
    assert command("--page-only", "--seeds=3") == 2


RATE = "optimization.learning_rate"
BETA = "losses[0].loss.init_args.beta"


def quality(job: Job) -> float:
    """Best at a rate of 0.02 and, beside it, a beta of 3, although one draw of two likes 2 better."""
    config = job.config
    rate, beta = (
        config["optimization"]["learning_rate"],
        config["losses"][0]["loss"]["init_args"]["beta"],
    )
    if rate != 0.02:
        return 0.5
    return {2.0: 0.51 + 0.2 * config["data"]["fold"], 3.0: 0.8}.get(beta, 0.6)


ADDING = """
import sys
from pathlib import Path
from types import SimpleNamespace
from benchmarks.records import load_run
from benchmarks.reporting import Results

results, runs = Results(Path("claims.json")), []
for folder in map(Path, sys.argv[1:]):
    info = load_run(folder).info
    runs.append(SimpleNamespace(
        folder=folder, training=info["label"], seed=info["seed"], config=info["config"], weights=None
    ))
print(1, flush=True)
input()  # until all are ready
for run in runs:
    results.add([run])
"""


def test_commands_that_add_at_once_lose_nothing(make):
    """Real processes, each with runs of its own."""
    rows, pipes = ("base", "new", "third"), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    [make(row, seed, 0.5) for row in rows for seed in range(12)]
    environ = environment() | {"PYTHONPATH": str(ROOT)}
    started = []
    for row in rows:
        folders = [str(path) for path in Path("runs/claims").glob(f"toy-table-{row}-*")]
        command_of = [sys.executable, "-c", ADDING, *folders]
        started.append(subprocess.Popen(command_of, env=environ, **pipes))
    for process in started:
        assert process.stdout.readline() == b"1\n"
    for process in started:
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in started:
        process.communicate(timeout=TIMEOUT)  # closes the pipes
        assert process.returncode == 0
    kept = json.loads(Path("claims.json").read_text())["results"]
    assert len(kept) == 3 * 12
    assert not list(Path().glob(".claims*"))


def test_settings_are_chosen_on_validation_classes_and_taken_by_others(
    toy, trained_by, monkeypatch, capsys
):
    tuned = {"base": {RATE: [0.01, 0.02]}, "new": {BETA: [2.0, 3.0]}}
    change_claims(tuned=tuned, takes={"new": ["base"], "third": ["new"]})
    sweeps = []

    def train(jobs: list[Job]) -> None:
        sweeps.append(jobs)
        for job in jobs:
            finish(job, quality(job))

    trained_by(train)
    monkeypatch.setattr("benchmarks.studies.summary", lambda jobs: "")
    assert command("--seeds=2") == 0
    told = [
        [
            (
                *(job.training.rpartition("/")[2], job.config["data"]["split"], job.seed),
                *(job.config["data"]["fold"], job.config["optimization"]["learning_rate"]),
                job.config["losses"][0]["loss"]["init_args"]["beta"],
            )
            for job in jobs
        ]
        for jobs in sweeps
    ]
    default = told[0][0][-1]
    validation = [
        ("base", "validation", 0, draw, rate, default) for rate in (0.01, 0.02) for draw in (0, 1)
    ]
    assert told[0] == validation
    validation = [
        ("new", "validation", 0, draw, 0.02, beta) for beta in (2.0, 3.0) for draw in (0, 1)
    ]
    assert sorted(told[1]) == sorted(
        [*validation, *(("base", "test", s, 0, 0.02, default) for s in (0, 1))]
    )
    assert sorted(told[2]) == [
        (row, "test", seed, 0, 0.02, 3.0) for row in ("new", "third") for seed in (0, 1)
    ]
    page = Path("claims.md").read_text()
    assert f"| `base` |  | {RATE} | 0.02: 30.00 | 0.01: 25.00 |" in page
    assert f"| `new` | `base` | {BETA} | 3: 40.00 | 2: 30.50 |" in page
    assert "| `third` | `new` | none |  |  |" in page
    shutil.rmtree("runs")
    assert command("--page-only", "--seeds=2") == 0
    assert Path("claims.md").read_text() == page


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (3, [2, 3, 4]),
        (6, [3, 4, 5, 6]),
        (1, [1, 2, 3, 4]),
    ],
)
def test_values_are_tried_outwards_until_the_best_lies_inside(toy, trained_by, best, tried, capsys):
    change_claims(tuned={"base": {RATE: [1, 2, 3, 4, 5, 6]}})
    started = []

    def train(jobs: list[Job]) -> None:
        for job in jobs:
            rate = job.config["optimization"]["learning_rate"]
            if job.config["data"]["split"] == "validation":
                started.append(rate)
            finish(job, 1 / (1 + abs(rate - best)))

    trained_by(train)
    assert command("--seeds=2") == 0
    assert sorted(started) == [rate for rate in tried for _ in range(2)]
    assert f"| {RATE} | {best}: 50.00 |" in Path("claims.md").read_text()


def test_a_value_that_diverges_is_not_chosen_and_stops_nothing(toy, trained_by, capsys):
    change_claims(tuned={"base": {RATE: [0.01, 0.02]}, "third": {RATE: [3.0, 4.0]}})
    started = []

    def train(jobs: list[Job]) -> None:
        for job in jobs:
            started.append(job.name)
            rate = job.config["optimization"]["learning_rate"]
            if rate > 1 or (rate, job.config["data"]["fold"]) == (0.02, 1):
                diverge(job)
            else:
                finish(job, rate)

    trained_by(train)
    assert command("--seeds=2") == 0
    page = Path("claims.md").read_text()
    assert f"| `base` |  | {RATE} | 0.01: 0.50 | 0.02: diverged (draw 1) |" in page
    assert (
        f"| `third` |  | {RATE} |  | 3: diverged (draws 0, 1), 4: diverged (draws 0, 1) |" in page
    )
    assert "Not measured yet: 4 (all settings of `third` diverged)." in page
    assert command("--seeds=2") == 0
    assert len(started) == 2 * 2 + 2 * 2 + 2 + 2  # nothing twice


def test_a_run_that_fails_holds_up_only_its_own_row(toy, trained_by, capsys):
    change_claims(tuned={row: {RATE: [0.01, 0.02]} for row in ("base", "third")})
    trained_by(lambda jobs: [finish(job, 0.5) for job in jobs if "third" not in job.name])
    assert command("--seeds=2") == 1
    assert "Not measured yet: 4." in Path("claims.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": 0}, "draws"),
        ({"takes": {"new": "base"}}, "takes"),
        (
            {"claims": {"1": {"claim": "", "paper": "", "better": "a", "than": "b", "beter": "a"}}},
            "expected the keys described at the top of",
        ),
    ],
)
def test_a_file_of_claims_that_is_not_as_described_is_one_line(toy, capsys, change, message):
    change_claims(**change)
    assert command("--page-only") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: claims.yaml: ")
    assert message in line


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--data.split=test", "data.split: 'validation' of new is set by this command"),
        ("--data={fold: 1}", "data.fold: 0 of new is set by this command"),
        ("--seed=3", "--seed=3: is set by this command"),
        (f"--{RATE}=0.5", f"{RATE}: 0.1 of new is set by this command"),
    ],
)
def test_no_setting_behind_the_dashes_chooses_by_the_test(toy, capsys, setting, message):
    change_claims(tuned={"new": {RATE: [0.1, 0.2]}})
    assert command("--page-only", "--", setting) == 2
    assert message in capsys.readouterr().err


def test_the_page_takes_not_the_place_of_the_results(toy, capsys):
    assert command("--page-only", "--output=claims.json") == 2
    assert "--output: expected a .md file, got claims.json" in capsys.readouterr().err


def test_kept_results_of_another_form_are_named(toy, capsys):
    result = {"metrics": {"recall_at_1": "high"}, "outputs": {}, "curve": {}, "wall_time_s": 1}
    for results in ([], {"toy/table/new, seed 1": result}):
        write_json(Path("claims.json"), {"results": results})
        before = Path("claims.json").read_bytes()
        assert command("--page-only") == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: claims.json: is damaged (ValueError: results.")
        assert Path("claims.json").read_bytes() == before
        assert not Path("claims.md").exists()


# ------------------------------------------------------------------------------------ what is kept

PLATFORM = {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "167", "stepping": "1"}
"""The processor that measured the rows below; others round sums differently."""


def processor() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    found = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    return {key: found.get(key, "") for key in PLATFORM}


@pytest.mark.slow
@pytest.mark.parametrize("row", ["binomial", "binomial_horde"])
def test_a_kept_result_is_found_again(row, glyphs_root, tmp_path):
    results = Results(claims.CLAIMS.parents[2] / "docs" / "claims.json")
    settings = [f"--data.root={glyphs_root}"]
    study = claims.Study(
        claims.reporting.read_claims(claims.CLAIMS), results, tmp_path, 10, settings
    )
    job = study.tests(row)[0]
    kept = results.of(job)
    arguments = command_line([*job.settings, f"--output={job.folder}"])
    subprocess.run(arguments, env=environment(), timeout=900, check=True)
    found = load_run(job.folder).info
    exact = processor() == PLATFORM and torch.__version__.startswith("2.14.1")
    for metric, value in kept["metrics"].items():
        assert found["metrics"][metric] == pytest.approx(value, abs=1e-12 if exact else 0.02), (
            metric
        )
