"""List of all recipes: dataset, backbone, the paper's result and the cost of a training.

    python -m benchmarks.reporting.recipe_list

counts the arithmetic of every network in the recipes and stores it beside them, so that the list needs no
network.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.reporting.table import Table
from benchmarks.settings import (
    Data,
    Entry,
    Model,
    Optimization,
    read_table,
    read_yaml,
    table_names,
)

FLOPS = Path(__file__).parents[1] / "recipes" / "flops.yaml"

HEADER = ["PAPER/TABLE: dataset, backbone", "Recall@1", "images", "PFLOP"]

NOTE = """
Recall@1 is the paper's, in percent. The cost is that of one training: the
images it sees, and the arithmetic of the network's forward and backward passes
(three times a forward pass; less where stages are frozen). "= NAME": the row
shares the training of that entry, which is one of the same paper unless NAME
says otherwise."""


def recipe_table() -> str:
    """The text that `benchmarks/run.py --list` prints."""
    flops = {key(row["network"]): row["flop"] for row in read_yaml(FLOPS)["forward"]}
    entries = all_entries()
    rows = Table(HEADER, [_row(entry, flops) for entry in entries]).terminal(width=200)
    header, *rows = rows.splitlines()
    groups: dict[str, list[str]] = {}
    for entry, row in zip(entries, rows, strict=True):
        dataset = entry.settings.get("data", {}).get("dataset", Data.dataset)
        heading = (
            f"{entry.name.rpartition('/')[0]}: {dataset}, {network_of(entry.settings)['trunk']}"
        )
        groups.setdefault(heading, [heading]).append(row)
    return "\n\n".join([header, *map("\n".join, groups.values()), NOTE.strip()])


def all_entries() -> list[Entry]:
    return [entry for name in table_names() for entry in read_table(name).entries]


def _row(entry: Entry, flops: Mapping[str, int]) -> list[str]:
    settings = entry.settings
    data, network = settings.get("data", {}), network_of(settings)
    recall = entry.cells.get("embedding", {}).get("recall_at_1")
    row = [f"  {entry.name.rpartition('/')[2]}", "" if recall is None else f"{recall:.1f}"]
    if entry.training != entry.name:
        same = entry.training.removeprefix(f"{entry.name.partition('/')[0]}/")
        return [f"{row[0]} = {same}", row[1], "", ""]
    steps = settings.get("optimization", {}).get("steps", Optimization.steps)
    images = steps * data.get("batch_size", Data.batch_size)
    forward = flops.get(key(network))
    cost = "not counted" if forward is None else f"{3 * images * forward / 1e15:,.1f}"
    return [*row, f"{images:,}", cost]


def network_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that determine the cost of a forward pass."""
    model, data = settings.get("model", {}), settings.get("data", {})
    arguments = model.get("trunk_args", {})
    found = {
        "trunk": model.get("trunk", Model.trunk),
        "trunk_args": {name: arguments[name] for name in arguments if name != "pretrained"},
        "ensemble": model.get("ensemble"),
        "gray": data.get("dataset", Data.dataset) == "glyphs",
        "image_size": data.get("image_size"),  # None: the dataset's or the trunk's own
    }
    return {name: value for name, value in found.items() if value}


def key(network: Mapping[str, Any]) -> str:
    return json.dumps(network, sort_keys=True)


def count_flops(network: Mapping[str, Any]) -> int:
    """The FLOP of one image's forward pass, counted without computing it."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.building import build_model, image_size
    from benchmarks.settings import Ensemble

    model = Model(network["trunk"], network.get("trunk_args", {}))
    if "ensemble" in network:
        model.ensemble = Ensemble(**network["ensemble"])
    dataset = "glyphs" if "gray" in network else "folder"
    data = Data(dataset, image_size=network.get("image_size"))
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        built = build_model(model, data).eval()
        before = counter.get_total_flops()  # of the image that the model was built with
        built(torch.zeros(1, data.in_chans, *[image_size(data, built.trunk)] * 2))
    return int(counter.get_total_flops() - before)


def write_flops() -> None:
    networks = sorted({key(network_of(entry.settings)) for entry in all_entries()})
    rows = [f"- {{flop: {count_flops(json.loads(of))}, network: {of}}}\n" for of in networks]
    head = "# Written by python -m benchmarks.reporting.recipe_list: one image's forward pass.\n"
    FLOPS.write_text(f"{head}forward:\n{''.join(rows)}", encoding="utf-8")


if __name__ == "__main__":
    write_flops()
