"""A part runs at full size only for a page, which keeps what it finds."""

import faulthandler
import functools
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speed.measuring import current_device, origin
from tests.gpu.page import NOT_ENDED, read_page, write_page
from tests.gpu.part import Part, describe, free_memory, is_lost

LIMITS = {"correctness": 60, "steps": 90, "retrieval": 30, "float16": 15, "glyphs": 45}
"""Seconds of the parts on a machine with one H100."""

GRACE = 30
"""Seconds beyond its limit after which a part's process is ended: it hangs."""


@pytest.fixture
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Part]:
    """Skipped if the page says that it has passed, at this commit on this machine."""
    page: Path | None = request.config.option.page
    # As for matrix products; bfloat16 stays as fast.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.set_float32_matmul_precision("highest")
    if page is None:
        yield Part(True, current_device())
        return
    if not torch.cuda.is_available():
        pytest.exit(f"torch {torch.__version__} finds no GPU here", returncode=2)
    name = _name(request.node)
    if read_page(page, _origin(request.config)).get(name, "").startswith("passed"):
        pytest.skip("it has passed")
    limit = LIMITS[name]

    def keep(part: Part) -> None:
        _keep(request.config, name, part.results(NOT_ENDED))

    gc.collect()
    gc.freeze()  # what is there already need not be looked through again and again
    faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=sys.__stderr__)
    part = Part(False, current_device(), limit, keep)
    keep(part)
    yield part
    faulthandler.cancel_dump_traceback_later()
    free_memory()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    result = yield
    if (part := pyfuncitem.funcargs.get("part")) is not None:
        part.finish()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    part = item.funcargs.get("part") if item.config.option.page else None
    if call.when != "call" or part is None:
        return report
    outcome = f"passed in {call.duration:.0f} s"
    if call.excinfo is not None:
        error = call.excinfo.value
        if isinstance(error, ModuleNotFoundError):
            outcome = f"not run: needs {error.name}"
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, outcome)
        else:
            said = describe(error)
            if isinstance(error, AssertionError):
                said = " ".join(str(error).split())
            outcome = f"failed after {call.duration:.0f} s: {said}"
    if is_lost(part.device):  # the page says not ended: the next process goes on behind this part
        _keep(item.config, _name(item), part.results(f"{NOT_ENDED}: {outcome}"))
        pytest.exit("the GPU is lost to this process", returncode=3)
    _keep(item.config, _name(item), part.results(outcome))
    return report


def _name(item: pytest.Function) -> str:
    return item.name.removeprefix("test_")


def _keep(config: pytest.Config, name: str, results: str) -> None:
    page, measured = config.option.page, _origin(config)
    write_page(page, measured, read_page(page, measured) | {name: results})


@functools.cache
def _origin(config: pytest.Config) -> str:
    return origin("make gpu", config.option.commit)
