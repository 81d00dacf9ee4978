"""Fixtures of all tests: a seed from the test's name, and objects that are made once."""

import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.pool import Pool

LONG = ("pool", "trained")
"""Fixtures of a session whose tests all run in one of pytest-xdist's workers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attacks", type=int, default=5, help="how many attacks of each kind")
    parser.addoption(
        "--kills", type=int, default=1, help="how often a run is killed before it is compared"
    )
    parser.addoption("--page", type=Path, help="of tests/gpu at full size: docs/gpu.md")
    parser.addoption("--commit", help="of these files, for --page, if git does not know it")


def pytest_configure(config: pytest.Config) -> None:
    """A test that Hypothesis gives what it is attacked with takes `--attacks` of each kind, always the same."""
    settings.register_profile(
        "attacks",
        max_examples=config.getoption("--attacks"),
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("attacks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """pytest-xdist's workers take whole files, or all tests of a long fixture; the longest come first."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            slow = [name for name in LONG if name in getattr(item, "fixturenames", ())]
            item.add_marker(pytest.mark.xdist_group([*slow, item.path.stem][0]))
    items.sort(key=lambda item: not {"end_to_end", "studies"} & set(item.path.parts))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed all generators from the test's name: no test depends on those that ran before it."""
    value = zlib.crc32(request.node.name.encode())
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002  PML and scikit-learn draw from the global generator
    torch.manual_seed(value)
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        # Kept for a process's life: the next run may ask for another precision.
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
    return value


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Trusts these modules, and none besides, as `--trust` of one command would."""
    from benchmarks.settings import trust

    monkeypatch.setattr("benchmarks.settings.trusted._added", set())
    return lambda *modules: trust(modules)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Three processes that start with the first test of several."""
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="session")
def glyphs_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the rendered Glyphs, for all of pytest-xdist's workers: rendering takes seconds."""
    from benchmarks.datasets import Glyphs

    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "glyphs"
    root.mkdir(exist_ok=True)
    Glyphs(root)  # one process renders, the others wait
    return root
