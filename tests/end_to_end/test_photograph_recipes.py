"""The recipes for photographs: each trains, and with a weight of zero a regularizer leaves its base loss alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.building import resolved
from benchmarks.settings import changed, dump, parse
from benchmarks.settings.recipe_files import read_table
from tests.end_to_end.steps import two_steps
from tests.support.fake_trees import write_pictures

TABLE = "photographs/frozen"
BASES = ("binomial", "am_softmax", "multi_similarity", "margin")
ALONE = ("binomial_short", "binomial_long", "binomial_again")
ORDERS = "losses[0].loss.init_args.order_weights"
WEIGHTS = {
    "binomial_horde_sketch": (ORDERS, "binomial"),
    "binomial_horde_trained": (ORDERS, "binomial"),
    "binomial_powers": ("losses[0].loss.init_args.power_weight", "binomial"),
    "binomial_pooled": ("losses[1].weight", "binomial"),
    "binomial_energy_confusion": ("losses[1].weight", "binomial"),
    "jrd": ("losses[0].loss.init_args.similarity_weight", "am_softmax"),
    "multi_similarity_horde_sketch": (ORDERS, "multi_similarity"),
    "margin_vem": ("losses[1].weight", None),  # its attention stays
}
"""The weight of each regularizer, and the row of its base loss."""

MECHANISM = "photographs/mechanism"
SECOND, THIRD = "losses[1].weight", "losses[2].weight"
MECHANISM_WEIGHTS = {
    **dict.fromkeys(["horde", "one_position"], ([ORDERS], "base")),
    **dict.fromkeys(["power_2", "power_3", "power_4"], ([SECOND], "base")),
    **dict.fromkeys(["threshold", "centred", "order_1"], ([SECOND], "base")),
    **dict.fromkeys(["powers", "centred_powers", "heads"], ([SECOND, THIRD], "base")),
    "multi_similarity_horde": ([ORDERS], "multi_similarity"),
    "jrs": (["losses[0].loss.init_args.similarity_weight"], "am_softmax"),
    **{
        f"{base}_powers": ([SECOND, THIRD], base)
        for base in ("multi_similarity", "proxy_anchor", "am_softmax")
    },
}
"""The same of the rows of HORDE's mechanism."""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("photographs")
    write_pictures(root, [f"{name}/{i}.jpg" for name in "abcdefgh" for i in range(4)], different=32)
    return root


def trained(
    row: str, photographs: Path, folder: Path, table: str = TABLE, **values: Any
) -> dict[str, Tensor]:
    """Weights and buffers of the network after two steps, with other values of settings, as a study sets them."""
    settings = {
        **{"data.root": str(photographs), "data.image_size": 32, "data.resize": 36},
        **{"data.batch_size": 8, "model.trunk_args": {}, "optimization.steps": 2},
    }
    config = resolved(parse([f"--recipe={table}/{row}"]).config)
    (folder / "config.yaml").write_text(dump(changed(config, settings | values)))
    experiment = parse([f"--config={folder / 'config.yaml'}"]).experiment
    model, _, moved = two_steps(experiment)
    assert "head.fc.weight" in moved and "trunk.conv_head.weight" in moved
    assert not {name for name in moved if name.startswith(("trunk.conv_stem", "trunk.blocks.0."))}
    return model.state_dict()


def test_every_row_is_a_base_loss_a_control_or_has_a_weight() -> None:
    rows = {entry.name.removeprefix(f"{TABLE}/") for entry in read_table(TABLE).entries}
    assert rows == {*BASES, *ALONE, *WEIGHTS}


@pytest.mark.parametrize("row", WEIGHTS)
def test_a_weight_of_zero_is_the_base_loss(row: str, photographs: Path, tmp_path: Path) -> None:
    weight, base = WEIGHTS[row]
    as_written, off = (
        trained(row, photographs, tmp_path, **values) for values in ({}, {weight: 0})
    )
    assert not torch.equal(as_written["head.fc.weight"], off["head.fc.weight"])
    if base is not None:
        alone = trained(base, photographs, tmp_path)
        assert alone.keys() == off.keys()
        for name, tensor in alone.items():
            assert torch.equal(off[name], tensor), name


def test_every_row_of_the_mechanism_is_one_of_these() -> None:
    rows = {entry.name.removeprefix(f"{MECHANISM}/") for entry in read_table(MECHANISM).entries}
    bases = {base for _, base in MECHANISM_WEIGHTS.values()}
    assert rows == {*bases, *MECHANISM_WEIGHTS, *(f"base_{of}" for of in BASE_CONTROLS)}


@pytest.mark.parametrize("row", MECHANISM_WEIGHTS)
def test_a_row_of_the_mechanism_adds_to_its_base_loss(
    row: str, photographs: Path, tmp_path: Path
) -> None:
    weights, base = MECHANISM_WEIGHTS[row]
    own = (photographs, tmp_path, MECHANISM)
    alone = trained(base, *own)
    for name, tensor in trained(row, *own, **dict.fromkeys(weights, 0)).items():
        assert torch.equal(tensor, alone[name]), name
    for weight in weights:  # each term matters
        one = trained(row, *own, **dict.fromkeys({*weights} - {weight}, 0))
        assert not torch.equal(one["trunk.conv_head.weight"], alone["trunk.conv_head.weight"])


BASE_CONTROLS = {
    "again": {"data.batch_draw": 1},
    "triple": {"losses[0].weight": 3},
    "wide": {"model.embedding_size": 512},
}


def test_the_mechanism_has_the_settings_of_the_other_rows() -> None:
    frozen = parse([f"--recipe={TABLE}/binomial"]).config
    base = parse([f"--recipe={MECHANISM}/base"]).config
    own = {"output": base["output"], "precision": "float32"}
    own |= {"evaluation.descriptor": False, "evaluation.features": 128}
    assert base == changed(frozen, own)
    for control, settings in BASE_CONTROLS.items():
        row = parse([f"--recipe={MECHANISM}/base_{control}"]).config
        assert row == changed(base, settings | {name: row[name] for name in ("label", "output")})
    horde = resolved(parse([f"--recipe={MECHANISM}/horde"]).config)["losses"]
    one = resolved(parse([f"--recipe={MECHANISM}/one_position"]).config)["losses"]
    assert one[0]["loss"].pop("class_path").endswith(".OnePositionHORDELoss")
    assert horde[0]["loss"].pop("class_path") == "pml_regularizers.HORDELoss"
    assert one == horde


def test_the_controls_differ_from_the_row_that_they_are_controls_of() -> None:
    base = parse([f"--recipe={TABLE}/binomial"]).config
    for row, settings in {
        "binomial_again": {"data.batch_draw": 1},
        "binomial_short": {"optimization.steps": 300},
        "binomial_long": {"optimization.steps": 6000},
    }.items():
        control = parse([f"--recipe={TABLE}/{row}"]).config
        own = {"label": control["label"], "output": control["output"]}
        assert control == changed(base, settings | own)
        assert own["label"] != base["label"]
