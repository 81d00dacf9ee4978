"""The model card: what was measured, and code for the trunk at hand."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.export.card import card
from benchmarks.export.trained import load_trained
from benchmarks.records.files import write_json
from benchmarks.settings.recipe_files import read_yaml


def test_the_card_tells_what_was_measured(trained: Path, exported: Path) -> None:
    text = (exported / "README.md").read_text()
    info = json.loads((trained / "run.json").read_text())
    front = yaml.safe_load(text.split("---\n", 2)[1])
    assert (front["library_name"], front["license"]) == ("timm", "unknown")
    assert "timm" in front["tags"]
    assert info["outputs"]["descriptor"]
    assert "†" not in text, "HORDE's descriptor is not exported"
    [row] = re.findall(r"^\| binomial deviance \|(.*)\|$", text, re.MULTILINE)
    percents = [float(cell) for cell in row.split("|")[:-1]]
    assert percents == [round(100 * value, 2) for value in info["metrics"].values()]
    assert f" at commit {info['commit']}." in text
    assert "\nTrained by `" in text
    assert str(trained.parent) not in text, "whole paths are private"


def test_a_card_names_ones_own_folder_and_no_path_to_it(plain: Path) -> None:
    trained = load_trained(plain)
    data = replace(trained.experiment.data, dataset="folder", root=Path("/home/me/my shoes"))
    paths = {"root": "/home/me/my= shoes", "weights": "/home/me,/a b.pt", "url": "https://x.org/a"}
    words = ["run.py", f"--data={json.dumps(paths)}", "--output=/home/me/out", "--x", "../me/y"]
    config = {"data": {**paths, "stage": "a/b"}}
    info = trained.run.info | {"command": shlex.join(words), "config": config}
    trained = replace(trained, experiment=replace(trained.experiment, data=data))
    text = card(replace(trained, run=replace(trained.run, info=info)), 0.0)
    assert f"# {info['label']} on my shoes\n" in text
    shown = json.dumps({"root": "my= shoes", "weights": "a b.pt", "url": "https://x.org/a"})
    assert f"--data={shown}" in text and "--output=out --x y" in text
    assert "root: my= shoes" in text and "stage: a/b" in text
    assert "/home" not in text


def told(plain: Path, info: dict[str, Any], **model: Any) -> str:
    """The card of a run whose run.json and model say something else."""
    trained = load_trained(plain)
    run = replace(trained.run, info=trained.run.info | info)
    experiment = replace(trained.experiment, model=replace(trained.experiment.model, **model))
    return card(replace(trained, run=run, experiment=experiment), 0.0)


def test_the_card_of_an_unfinished_run_has_no_results(plain: Path) -> None:
    text = told(plain, {"status": "stopped", "steps": 7000})
    assert "this is the checkpoint of step 3 of a run that is stopped" in text
    assert "Recall" not in text
    assert "Recall" in told(plain, {})
    assert "Recall" not in told(plain, {"steps": 4}), "measured at another checkpoint"


def test_a_setting_writes_no_lines_into_the_card(run: Path) -> None:
    lines = "x\n\n# Mine\n\n```\n\n````\n# Mine"
    info = json.loads((run / "run.json").read_text())
    info["config"]["label"] = lines
    write_json(run / "run.json", info)
    text = told(run, {})
    card, settings = text.split("<summary>")
    assert not re.search(r"^# Mine", card, re.MULTILINE)
    block = settings.partition("</summary>\n")[2].partition("</details>")[0]
    assert all(line.startswith("    ") for line in block.splitlines() if line)
    assert yaml.safe_load(block)["label"] == lines


def test_an_export_needs_neither_the_loss_nor_the_weights(run: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    config = read_yaml(run / "config.yaml")
    config["losses"] = [{"loss": {}}]
    config["model"]["weights"] = str(tmp_path / "weights")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    trained = load_trained(run)
    assert trained.step == trained.run.info["steps"]


def test_the_card_imports_the_trunks_that_timm_lacks(plain: Path) -> None:
    for trunk, ours in (("test_resnet", False), ("googlenet", True)):
        assert ("\nregister()" in told(plain, {}, trunk=trunk)) == ours
