"""Fixtures of all tests: a seed from the test's name, and objects that are made once."""

import gc
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.pool import Pool

TOGETHER = {
    **dict.fromkeys(
        ("test_distributed", "test_gradient_ratios", "test_rank_accuracy", "test_evaluation")
        + ("test_processes", "test_frozen_stages", "test_upstream_numbers", "test_verification")
        + ("test_closed_form", "test_heads", "test_stops"),
        "pool",
    ),
    **dict.fromkeys(("test_example", "test_export", "test_evaluate"), "trained"),
}
"""Files of tests that share a fixture that takes long: one of pytest-xdist's workers has them all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attacks", type=int, default=5, help="how many attacks of each kind")
    parser.addoption(
        "--kills", type=int, default=1, help="how often a run is killed before it is compared"
    )


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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What the imports make stays: no search for garbage looks at it, neither meanwhile nor later."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, those of one worker before all others."""
    long = {"end_to_end", "studies"}
    items.sort(key=lambda item: (item.path.stem not in TOGETHER, not long & set(item.path.parts)))


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, pytest-xdist's workers take whole files, in this order, and some files together.

    Groups of tests have no effect: pytest-xdist 3.8 cannot tell their names to pytest 9.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return TOGETHER.get(Path(file).stem, file)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Digests of images that tests make are not kept in the user's folder of caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


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
    from benchmarks.settings.trusted import trust

    monkeypatch.setattr("benchmarks.settings.trusted._added", set())
    return lambda *modules: trust(modules)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The only line of a command that is refused, behind "error: "; its exit status is 2."""

    def refused(main: Callable[[list[str]], int], *words: Any) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        said, lines = (text.splitlines() for text in capsys.readouterr())
        assert (said, len(lines)) == ([], 1) and lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")

    return refused


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Three processes that start with the first test of several."""
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="session")
def glyphs_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the rendered Glyphs, for all of pytest-xdist's workers: rendering takes seconds."""
    from benchmarks.datasets.glyphs import Glyphs

    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "glyphs"
    root.mkdir(exist_ok=True)
    Glyphs(root)
    return root
