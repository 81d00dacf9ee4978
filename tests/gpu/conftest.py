"""A part runs at full size only for a page, which keeps what it found."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speed.measuring import current_device, origin
from tests.gpu.part import Part, read_page, write_page


@pytest.fixture
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Part:
    """Skipped if the page says that it has passed, at this commit on this machine."""
    page: Path | None = request.config.option.page
    if page is not None:
        if not torch.cuda.is_available():
            pytest.exit(f"torch {torch.__version__} finds no GPU here", returncode=1)
        before = read_page(page, _origin(request.config))
        if before.get(request.node.name.removeprefix("test_"), "").startswith("passed"):
            pytest.skip("it has passed")
    # As for matrix products; bfloat16 stays as fast.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return Part(page is None, current_device())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    page: Path | None = item.config.option.page
    if call.when != "call" or page is None:
        return report
    said = f"passed in {call.duration:.0f} s"
    if call.excinfo is not None:
        error = call.excinfo.value
        said = f"failed: {' '.join(str(error).split())}"
        if isinstance(error, ModuleNotFoundError):
            said = f"not run: needs {error.name}"
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, said)
    measured = _origin(item.config)
    found = {item.name.removeprefix("test_"): item.funcargs["part"].results(said)}
    write_page(page, measured, read_page(page, measured) | found)
    return report


def _origin(config: pytest.Config) -> str:
    return origin("make gpu", config.option.commit)
