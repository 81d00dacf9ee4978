"""The list of recipes: the stored costs of networks equal a count on the meta device."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reporting import recipe_list
from benchmarks.reporting.recipe_list import (
    all_entries,
    count_flops,
    key,
    network_of,
    recipe_table,
    write_flops,
)
from benchmarks.settings.recipe_files import read_entry, read_yaml
from tests.support.processes import ROOT

STORED = {key(row["network"]): row for row in read_yaml(recipe_list.FLOPS)["forward"]}


def test_every_network_of_the_recipes_is_stored_and_no_other() -> None:
    assert STORED.keys() == {key(network_of(entry.settings)) for entry in all_entries()}
    assert len(STORED) > 5


@pytest.mark.parametrize("network", STORED)
def test_the_stored_cost_is_that_of_the_network(network: str) -> None:
    assert count_flops(STORED[network]["network"]) == STORED[network]["flop"]


def test_the_cost_of_a_convolution_by_hand() -> None:
    """The first layer of a ResNet sees three channels in colour and one in gray."""
    small = {"trunk": "test_resnet", "image_size": 32}
    # 3 x 3 kernels, 16 filters, 16 x 16 positions, two operations, two channels fewer.
    assert count_flops(small) - count_flops(small | {"gray": True}) == 2 * 2 * 9 * 16 * 16 * 16


def test_an_ensemble_runs_its_body_once_for_each_head() -> None:
    ensemble = network_of(read_entry("horde/table1/cub_abe").settings)
    alone = {name: value for name, value in ensemble.items() if name != "ensemble"}
    assert 4 < STORED[key(ensemble)]["flop"] / STORED[key(alone)]["flop"] < 8


def test_counting_writes_what_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "flops.yaml"
    file.write_text("forward: []")
    written = recipe_list.FLOPS.read_bytes()
    monkeypatch.setattr(recipe_list, "FLOPS", file)
    monkeypatch.setattr(recipe_list, "count_flops", lambda network: STORED[key(network)]["flop"])
    assert "not counted" in recipe_table()
    write_flops()
    assert file.read_bytes() == written
    assert "not counted" not in recipe_table()
    assert max(map(len, recipe_table().splitlines())) <= 80


def test_the_list_needs_no_network() -> None:
    code = (
        "import sys; from benchmarks import reporting; print(reporting.recipe_table())\n"
        "print({'torch', 'timm', 'accelerate', 'numpy', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""
    assert "  cub_abe " in done.stdout
    assert done.stdout.endswith("set()\n")
