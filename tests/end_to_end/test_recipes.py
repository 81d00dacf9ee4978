"""The papers' recipes: each number is a cell, each setting is the paper's or said not to be, each training trains.

`references/papers.json` holds the rows of all result tables of the four papers, in percent, and
`references/settings.yaml` what their texts say of the settings. Where a training differs from it, PAPER.yaml says
so under `differs`; what the paper leaves open stands there under `not_given`.
"""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.building.network import EmbeddingModel, build_model
from benchmarks.building.objective import build_loss, build_optimizer
from benchmarks.datasets.catalogue import IMAGE_DATASETS
from benchmarks.settings.command import parse
from benchmarks.settings.experiment import Experiment, WeightedLoss
from benchmarks.settings.recipe_files import Entry, read_entry, read_table, table_names
from benchmarks.settings.types import ClassSpec
from benchmarks.training.parts import try_one_step
from tests.end_to_end.paper_facts import facts

REFERENCES = Path(__file__).parents[1] / "references"
ROWS = json.loads((REFERENCES / "papers.json").read_text())
QUICK = {"ecaml/table4", "horde/table3", "jrd/table4", "second_order_attention/table1"}
"""One of each paper; `make test-all` takes them all."""
PAPERS = {name.split("/")[0] for name in QUICK}
TABLES = [name for name in table_names() if name.split("/")[0] in PAPERS]
PHOTOGRAPHS = [name for name in table_names() if name.startswith("photographs/")]


@functools.cache
def sheet() -> Any:
    """The settings in the papers' texts. Reading them takes long, so that only the tests that need them do."""
    found = yaml.safe_load((REFERENCES / "settings.yaml").read_text())
    assert found.keys() == PAPERS
    return found


@functools.cache
def entries(table: str) -> list[Entry]:
    return read_table(table).entries


def is_of(entry: Entry, output: str, row: dict[str, Any]) -> bool:
    """True if an output of an entry holds a row's numbers, under its name, of its dataset."""
    return (
        (entry.name.rpartition("/")[0], output) == (row["table"], row["output"])
        and entry.settings["data"]["dataset"] == row["dataset"]
        and entry.label.startswith(row["row"])
        and entry.cells[output] == row["percent"]
        and entry.half_widths.get(output) == row.get("half_widths")
    )


def cells(*tables: str) -> list[tuple[Entry, str]]:
    found = (entry for table in tables for entry in entries(table))
    return [(entry, output) for entry in found for output in entry.cells]


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_one_cell_and_every_quoted_one_is_listed(name: str) -> None:
    rows = [row for row in ROWS if row["table"] == name]
    own = [row for row in rows if row["kind"] != "quoted"]
    listed = cells(name)
    found = [[f"{e.name} {output}" for e, output in listed if is_of(e, output, row)] for row in own]
    assert [row for row, of in zip(own, found, strict=True) if len(of) != 1] == []
    assert len({cell for [cell] in found}) == len(listed) == len(own)
    about = ("row", "dataset", "backbone", "embedding_dim")
    quoted = (row for row in rows if row["kind"] == "quoted")
    expected = [{key: row[key] for key in about if key in row} | row["percent"] for row in quoted]
    assert read_table(name).quoted == expected


def test_a_training_measures_what_its_cells_need() -> None:
    for entry, output in cells(*TABLES):
        evaluation = entry.settings["evaluation"]
        measured = ["embedding", *["descriptor"] * bool(evaluation.get("descriptor"))]
        measured += ["parts"] * (evaluation.get("parts") == 10)
        if evaluation.get("orders"):
            order = entry.settings["losses"][0]["loss"]["init_args"]["order"]
            measured += [f"order_{k}" for k in range(2, order + 1)]
        metrics = [f"recall_at_{k}" for k in evaluation["recall_at"]]
        if output == "embedding" and evaluation.get("clustering"):
            metrics += ["NMI", "F1"]
        if output == "parts" and evaluation.get("divergence"):
            metrics += ["ideal_joint_error", "h_divergence"]
        assert output in measured, entry.name
        assert {*entry.cells[output]} <= {*metrics}, entry.name


PARSED: dict[str, Experiment] = {}
NETWORKS: dict[str, EmbeddingModel] = {}


def experiment_of(entry: Entry) -> Experiment:
    """Experiment as `--recipe` gives it, except for the weights of ImageNet.

    The parser does not look into losses: entries that differ in them alone share what it made of the others.
    """
    rest = {key: value for key, value in entry.settings.items() if key not in ("label", "losses")}
    key = json.dumps(rest, sort_keys=True)
    if key not in PARSED:
        PARSED[key] = parse([f"--recipe={entry.name}", "--model.trunk_args={}"]).experiment
    losses = ((ClassSpec(term["loss"]), term.get("weight", 1)) for term in entry.settings["losses"])
    terms = [WeightedLoss(loss, float(weight)) for loss, weight in losses]
    return replace(PARSED[key], losses=terms)


@functools.cache
def built(name: str) -> dict[str, Any]:
    """The facts of what the runner builds."""
    entry = read_entry(name)
    experiment = experiment_of(entry)
    key = f"{experiment.model}"
    with torch.device("meta"):
        if key not in NETWORKS:
            NETWORKS[key] = build_model(experiment.network, experiment.data)
    network = NETWORKS[key]
    classes = IMAGE_DATASETS[experiment.data.dataset].counts["train"][1]
    with torch.device("cpu" if "MarginLoss" in str(entry.settings["losses"]) else "meta"):
        loss = build_loss(experiment, network, classes)  # the start of MarginLoss's beta is read
    optimizer, scheduler = build_optimizer(experiment.optimization, network, loss)
    pretrained = entry.settings["model"]["trunk_args"]["pretrained"]
    found = facts(experiment, network, loss, optimizer, scheduler)
    return found | {"pretrained": "ImageNet" if pretrained else "nothing"}


def filled(value: Any, match: re.Match[str]) -> Any:
    """A value of the sheet, with the groups of its regular expression."""
    if isinstance(value, dict):
        return {key: filled(inner, match) for key, inner in value.items()}
    if isinstance(value, str) and "\\" in value:
        return yaml.safe_load(match.expand(value))
    return value


def stated(entry: Entry) -> dict[str, Any]:
    """Statements of the paper about an entry, by fact."""
    paper, table, _ = entry.name.split("/")
    about = f"{table} {entry.settings['data']['dataset']} {entry.label}"
    found: dict[str, Any] = {}
    for line in sheet()[paper]:
        if (match := re.search(line.get("of", ""), about)) is not None:
            for fact in [line["fact"]] if isinstance(line["fact"], str) else line["fact"]:
                found.setdefault(fact, filled(line["value"], match))
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in TABLES]
)
def test_what_is_built_is_what_the_paper_says_or_declared(name: str) -> None:
    for entry in entries(name):
        said, found = stated(entry), built(entry.training)
        differs, not_given = (
            {fact: value for remark in entry.remarks[key] for fact, value in remark.facts.items()}
            for key in ("differs", "not_given")
        )
        left_open = {fact for fact, value in said.items() if value == "not given"}
        read = said.keys() & found.keys() - left_open
        assert not_given.keys() == left_open, entry.name
        assert {f for f in read if found[f] != said[f]} == differs.keys() & found.keys(), entry.name
        for fact, value in (differs | not_given).items():
            assert value is None or found.get(fact, value) == value, (entry.name, fact)


@pytest.mark.slow
@pytest.mark.parametrize("table", [*TABLES, *PHOTOGRAPHS])
def test_every_training_takes_a_step(table: str) -> None:
    """On small images, and of a tiny trunk unless an ensemble cuts it by the names of its modules."""
    for entry in entries(table):
        if table in TABLES and entry.training != entry.name:
            continue
        print(entry.name)
        experiment = experiment_of(entry)
        model = experiment.model
        if model.ensemble is None:
            model = replace(model, trunk="test_resnet", batch_norm="train", frozen_stages=None)
        data = replace(experiment.data, image_size=64, resize=None, cached_views=None)
        try_one_step(replace(experiment, model=model, data=data))
