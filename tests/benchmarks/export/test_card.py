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


def told(plain: Path, info: dict[str, Any], **model: Any) -> str:
    """The card of a run whose run.json and model say something else."""
    trained = load_trained(plain)
    run = replace(trained.run, info=trained.run.info | info)
    experiment = replace(trained.experiment, model=replace(trained.experiment.model, **model))
    return card(replace(trained, run=run, experiment=experiment), 0.0)


def test_the_card_tells_what_was_measured(trained, exported):
    text = (exported / "README.md").read_text()
    info = json.loads((trained / "run.json").read_text())
    front = yaml.safe_load(text.split("---\n", 2)[1])
    assert (front["library_name"], front["license"]) == ("timm", "unknown")
    assert info["outputs"]["descriptor"]
    assert "†" not in text, "HORDE's descriptor is not exported"
    [row] = re.findall(r"^\| binomial deviance \|(.*)\|$", text, re.MULTILINE)
    percents = [float(cell) for cell in row.split("|")[:-1]]
    assert percents == [round(100 * value, 2) for value in info["metrics"].values()]
    assert f" at commit {info['commit']}." in text


def test_a_card_names_ones_own_folder_and_no_path_to_it(plain):
    trained = load_trained(plain)
    data = replace(trained.experiment.data, dataset="folder", root=Path("/home/me/my shoes"))
    paths = {"root": "/home/me/my= shoes", "weights": "/home/me,/a b.pt", "url": "https://x.org/a"}
    words = ["run.py", f"--data={json.dumps(paths)}", "--output=/home/me/out", "../me/y"]
    info = {"command": shlex.join(words), "config": {"data": {**paths, "stage": "a/b"}}}
    run = replace(trained.run, info=trained.run.info | info)
    experiment = replace(trained.experiment, data=data)
    text = card(replace(trained, run=run, experiment=experiment), 0.0)
    assert " on my shoes\n" in text
    shown = json.dumps({"root": "my= shoes", "weights": "a b.pt", "url": "https://x.org/a"})
    assert f"--data={shown}" in text and "--output=out y" in text
    assert "root: my= shoes" in text and "stage: a/b" in text
    assert "/home" not in text


def test_the_card_of_an_unfinished_run_has_no_results(plain):
    text = told(plain, {"status": "stopped", "steps": 7000})
    assert "this is the checkpoint of step 3 of a run that is stopped" in text
    assert "Recall" not in text
    assert "Recall" in told(plain, {})
    assert "Recall" not in told(plain, {"steps": 4}), "measured at another checkpoint"


def test_a_setting_writes_no_lines_into_the_card(plain):
    lines = "x\n\n# Mine\n\n```\n\n````\n# Mine"
    card, settings = told(plain, {"config": {"label": lines}}).split("<summary>")
    assert "# Mine" not in card
    block = settings.partition("</summary>\n")[2].partition("</details>")[0]
    assert all(line.startswith("    ") for line in block.splitlines() if line)
    assert yaml.safe_load(block)["label"] == lines


def test_the_card_imports_the_trunks_that_timm_lacks(plain):
    for trunk, ours in (("test_resnet", False), ("googlenet", True)):
        assert ("\nregister()" in told(plain, {}, trunk=trunk)) == ours
