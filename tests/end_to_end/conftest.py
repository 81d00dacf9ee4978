"""Fixtures of the end-to-end tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_trees import cars, cub, inshop, sop


@pytest.fixture(autouse=True, scope="package")
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield


@pytest.fixture(scope="session")
def data(glyphs_root: Path) -> str:
    return f"--data.root={glyphs_root}"


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The datasets in their layouts, a few images each."""
    root = tmp_path_factory.mktemp("trees")
    return {
        "cub": cub.write(root / "cub"),
        "cars": cars.write(root / "cars", "devkit", cars.few_cars((1, 2, 3, 98, 99, 196))),
        "sop": sop.write(root / "sop"),
        "inshop": inshop.write(root / "inshop"),
    }
