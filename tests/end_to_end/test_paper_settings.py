"""Every training, built as the runner builds it, has the facts that its paper states.

`references/settings.yaml` was written from the papers' texts alone. Where a training differs from it, PAPER.yaml
says so under `differs`; what the paper leaves open stands there under `not_given`; and nothing else does. Values
that stand there are those that are built.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.building.images import build_datasets, show_to
from benchmarks.building.network import EmbeddingModel, build_model
from benchmarks.building.objective import build_loss, build_optimizer
from benchmarks.datasets import IMAGE_DATASETS
from benchmarks.settings.recipe_files import Entry
from tests.end_to_end.paper_facts import Training
from tests.end_to_end.test_recipes import EACH_TRAINING, ENTRIES, experiment_of

NOT_GIVEN = "not given"
SHEET = yaml.safe_load((Path(__file__).parents[1] / "references" / "settings.yaml").read_text())
ONLY_EVER_LEFT_OPEN = {
    *("bandwidth_gradient", "bandwidth_pairs", "confusion_drawn", "ensemble", "epoch_end"),
    *("labelled_parts", "pair_weights", "pca_fitted_on", "small_classes"),
    *("shown", "start_distributions"),
}
"""Facts on which the papers are silent, and that nothing reads."""

ONLY_SOMETIMES_STATED = {
    *("box_crop", "curve_steps", "framework", "h_divergence", "ideal_error", "kmeans_clusters"),
    *("kmeans_restarts", "parts", "query_gallery", "test_classes", "test_images"),
    *("train_classes", "train_images"),
}
"""Facts that are read of each training, and that the sheet has where a paper's table asks for them."""

NETWORKS: dict[str, EmbeddingModel] = {}


def about(entry: Entry) -> str:
    """TABLE DATASET LABEL."""
    table = entry.name.split("/")[1]
    return f"{table} {entry.settings['data']['dataset']} {entry.label}"


def filled(value: Any, match: re.Match[str]) -> Any:
    """A value of the sheet, with the groups of its regular expression."""
    if isinstance(value, Mapping):
        return {key: filled(inner, match) for key, inner in value.items()}
    if isinstance(value, str) and "\\" in value:
        return yaml.safe_load(match.expand(value))
    return value


def stated(entry: Entry) -> dict[str, Any]:
    """Statements of the paper about an entry, by fact."""
    found: dict[str, Any] = {}
    for line in SHEET[entry.name.split("/")[0]]:
        match = re.search(line.get("of", ""), about(entry))
        for fact in [line["fact"]] if isinstance(line["fact"], str) else line["fact"]:
            if match is not None and fact not in found:
                found[fact] = filled(line["value"], match)
    return found


def training(entry: Entry, trees: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> Training:
    """A training as the runner builds it, on a few images in place of the dataset's."""
    experiment = experiment_of(entry)
    data = experiment.data
    info = IMAGE_DATASETS[data.dataset]
    key = f"{experiment.model}"
    if key not in NETWORKS:
        NETWORKS[key] = build_model(experiment.model, data)
    network = copy.deepcopy(NETWORKS[key])
    with monkeypatch.context() as few:
        counts = info.read(trees[data.dataset]).counts()
        few.setitem(IMAGE_DATASETS, data.dataset, replace(info, counts=counts))
        datasets = build_datasets(replace(data, root=trees[data.dataset]))
        show_to(network.trunk, datasets, data)
    loss = build_loss(experiment, network, info.counts["train"][1])
    optimizer, scheduler = build_optimizer(experiment.optimization, network, loss)
    pretrained = entry.settings["model"]["trunk_args"]["pretrained"]
    return Training(experiment, network, loss, optimizer, scheduler, datasets, pretrained)


def differences(said: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, set[str]]:
    """The facts that differ, and those that the paper leaves open."""
    left_open = {fact for fact, value in said.items() if value == NOT_GIVEN}
    assert said.keys() - built.keys() <= left_open & ONLY_EVER_LEFT_OPEN
    assert built.keys() - said.keys() <= ONLY_SOMETIMES_STATED
    differ = {fact for fact in said.keys() - left_open if built[fact] != said[fact]}
    return {"differs": differ, "not_given": left_open}


@EACH_TRAINING
def test_what_is_built_is_what_the_paper_says_or_declared(
    entry: Entry, trees: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = training(entry, trees, monkeypatch).facts()
    for same in (other for other in ENTRIES if other.training == entry.name):
        for key, facts in differences(stated(same), built).items():
            declared = [fact for remark in same.remarks[key] for fact in remark.facts.items()]
            assert {fact for fact, _ in declared} == facts, (same.name, key)
            for fact, value in declared:
                assert value is None or built[fact] == value, (same.name, fact)
