"""What every test shares: its own seed."""

import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.datasets import Glyphs


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
