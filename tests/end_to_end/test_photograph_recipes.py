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
    "binomial_pooled": ("losses[1].weight", "binomial"),
    "binomial_energy_confusion": ("losses[1].weight", "binomial"),
    "jrd": ("losses[0].loss.init_args.similarity_weight", "am_softmax"),
    "multi_similarity_horde_sketch": (ORDERS, "multi_similarity"),
    "margin_vem": ("losses[1].weight", None),  # its attention stays
}
"""The weight of each regularizer, and the row of its base loss."""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("photographs")
    write_pictures(root, [f"{name}/{i}.jpg" for name in "abcdefgh" for i in range(4)], different=32)
    return root


def trained(row: str, photographs: Path, folder: Path, **values: Any) -> dict[str, Tensor]:
    """Weights and buffers of the network after two steps, with other values of settings, as a study sets them."""
    settings = {
        **{"data.root": str(photographs), "data.image_size": 32, "data.resize": 36},
        **{"data.batch_size": 8, "model.trunk_args": {}, "optimization.steps": 2},
    }
    config = resolved(parse([f"--recipe={TABLE}/{row}"]).config)
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
