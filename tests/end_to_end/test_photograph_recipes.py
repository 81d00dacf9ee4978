"""The recipes for photographs: each trains, and with a weight of zero a regularizer leaves its base loss alone."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.building import resolved
from benchmarks.settings import changed, dump, parse
from benchmarks.settings.recipe_files import read_table
from tests.end_to_end.steps import two_steps
from tests.support.fake_trees import write_pictures

FROZEN, MECHANISM = "photographs/frozen", "photographs/mechanism"
BASES = {
    *(f"{FROZEN}/{name}" for name in ("binomial", "am_softmax", "multi_similarity", "margin")),
    *(f"{MECHANISM}/{name}" for name in ("base", "multi_similarity", "am_softmax", "proxy_anchor")),
}
ORDERS = "losses[0].loss.init_args.order_weights"
POWERS = "losses[0].loss.init_args.power_weight"
SIMILARITY = "losses[0].loss.init_args.similarity_weight"
SECOND, THIRD = "losses[1].weight", "losses[2].weight"
WEIGHTS: dict[str, tuple[list[str], str | None]] = {
    f"{table}/{row}": value
    for table, rows in {
        FROZEN: {
            "binomial_horde_sketch": ([ORDERS], "binomial"),
            "binomial_horde_trained": ([ORDERS], "binomial"),
            "binomial_powers": ([POWERS], "binomial"),
            "binomial_pooled": ([SECOND], "binomial"),
            "binomial_energy_confusion": ([SECOND], "binomial"),
            "jrd": ([SIMILARITY], "am_softmax"),
            "multi_similarity_horde_sketch": ([ORDERS], "multi_similarity"),
            "margin_vem": ([SECOND], None),  # its attention stays
        },
        MECHANISM: {
            **dict.fromkeys(["horde", "one_position"], ([ORDERS], "base")),
            **dict.fromkeys(["power_2", "power_3", "power_4"], ([SECOND], "base")),
            **dict.fromkeys(["threshold", "centred", "order_1"], ([SECOND], "base")),
            **dict.fromkeys(["powers", "centred_powers", "heads"], ([SECOND, THIRD], "base")),
            "multi_similarity_horde": ([ORDERS], "multi_similarity"),
            "jrs": ([SIMILARITY], "am_softmax"),
            **{
                f"{base}_powers": ([SECOND, THIRD], base)
                for base in ("multi_similarity", "proxy_anchor", "am_softmax")
            },
        },
    }.items()
    for row, value in rows.items()
}
"""The weights of each row's regularizers, and the row of its base loss."""

CONTROLS = {
    f"{FROZEN}/binomial": {
        "binomial_again": {"data.batch_draw": 1},
        "binomial_short": {"optimization.steps": 300},
        "binomial_long": {"optimization.steps": 6000},
    },
    f"{MECHANISM}/base": {
        "base_again": {"data.batch_draw": 1},
        "base_triple": {"losses[0].weight": 3},
        "base_wide": {"model.embedding_size": 512},
    },
}
"""What the controls of a row change of it."""

QUICK = {
    *(f"{FROZEN}/{row}" for row in ("binomial_horde_sketch", "binomial_energy_confusion", "jrd")),
    *(f"{MECHANISM}/{row}" for row in ("one_position", "heads")),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights and buffers of a row's network after two steps, without the regularizers of these weights."""
    folder = tmp_path_factory.mktemp("recipes")
    photographs = [f"{name}/{i}.jpg" for name in "abcdefgh" for i in range(4)]
    write_pictures(folder / "photographs", photographs, different=32)
    small = {
        **{"data.root": f"{folder / 'photographs'}", "data.image_size": 32, "data.resize": 36},
        **{"data.batch_size": 8, "model.trunk_args": {}, "optimization.steps": 2},
    }

    @functools.cache
    def trained(row: str, *without: str) -> dict[str, Tensor]:
        config = resolved(parse([f"--recipe={row}"]).config)
        config = changed(config, small | dict.fromkeys(without, 0))
        (folder / "config.yaml").write_text(dump(config))
        model, _, moved = two_steps(parse([f"--config={folder / 'config.yaml'}"]).experiment)
        assert {"head.fc.weight", "trunk.conv_head.weight"} <= moved
        frozen = ("trunk.conv_stem", "trunk.blocks.0.")
        assert not {name for name in moved if name.startswith(frozen)}
        return model.state_dict()

    return trained


@pytest.mark.parametrize("table", [FROZEN, MECHANISM])
def test_every_row_is_a_base_loss_a_control_or_has_a_weight(table: str) -> None:
    controls = {
        f"{base.rpartition('/')[0]}/{row}" for base, rows in CONTROLS.items() for row in rows
    }
    named = {row for row in {*BASES, *WEIGHTS, *controls} if row.startswith(f"{table}/")}
    assert {entry.name for entry in read_table(table).entries} == named


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[] if row in QUICK else pytest.mark.slow) for row in WEIGHTS]
)
def test_a_weight_of_zero_is_the_base_loss_and_each_weight_matters(row: str, trained: Any) -> None:
    weights, base = WEIGHTS[row]
    off = trained(row, *weights)
    if base is not None:
        alone = trained(f"{row.rpartition('/')[0]}/{base}")
        assert alone.keys() == off.keys()
        for name, tensor in alone.items():
            assert torch.equal(off[name], tensor), name
    for weight in weights:
        one = trained(row, *(other for other in weights if other != weight))
        assert not torch.equal(one["trunk.conv_head.weight"], off["trunk.conv_head.weight"])


def test_the_mechanism_has_the_settings_of_the_other_rows() -> None:
    base = parse([f"--recipe={MECHANISM}/base"]).config
    own = {"output": base["output"], "precision": "float32"}
    own |= {"evaluation.descriptor": False, "evaluation.features": 128}
    assert base == changed(parse([f"--recipe={FROZEN}/binomial"]).config, own)
    horde, one = (
        resolved(parse([f"--recipe={MECHANISM}/{row}"]).config)["losses"]
        for row in ("horde", "one_position")
    )
    assert one[0]["loss"].pop("class_path").endswith(".OnePositionHORDELoss")
    assert horde[0]["loss"].pop("class_path") == "pml_regularizers.HORDELoss"
    assert one == horde


@pytest.mark.parametrize("base", CONTROLS)
def test_the_controls_differ_from_the_row_that_they_are_controls_of(base: str) -> None:
    expected = parse([f"--recipe={base}"]).config
    for row, settings in CONTROLS[base].items():
        control = parse([f"--recipe={base.rpartition('/')[0]}/{row}"]).config
        own = {name: control[name] for name in ("label", "output")}
        assert control == changed(expected, settings | own)
        assert own["label"] != expected["label"]
