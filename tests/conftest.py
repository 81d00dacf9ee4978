"""What every test shares: its own seed."""

import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.datasets import Glyphs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=2, help="how often a run is killed before it is compared"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files are shared out among pytest-xdist's workers, the longest first, and one of them in two parts."""
    for item in items:
        part = "resume" if "settings" in getattr(item, "fixturenames", ()) else "rest"
        group = f"{item.path.stem} {part}" if item.path.stem == "test_run" else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.path.stem not in {"test_run", "test_distributed"})


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed all generators from the test's name: no test depends on those that ran before it."""
    value = zlib.crc32(request.node.name.encode())
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002  PML and scikit-learn draw from the global generator
    torch.manual_seed(value)
    return value


@pytest.fixture(scope="session")
def glyphs_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the rendered Glyphs: rendering takes longer than most tests."""
    root = tmp_path_factory.mktemp("glyphs")
    Glyphs(root)
    return root
