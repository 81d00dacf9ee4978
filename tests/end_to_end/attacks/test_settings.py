"""Wrong settings of all kinds, drawn from their schema: they train a step, or one line names the fault.

None of them starts a process, opens a connection, or touches a file elsewhere.
"""

import functools
import json
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import timm.optim  # noqa: F401  its classes are drawn
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.console.printing import printable
from benchmarks.settings.class_paths import DESCRIBED
from benchmarks.settings.command import parse
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Experiment
from benchmarks.training.parts import try_one_step
from tests.support.processes import TIMEOUT

PACKAGES = ("benchmarks", "pml_regularizers", "pytorch_metric_learning", "timm", "torch")
HARMS = {
    *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"),
    *("os.kill", "pty.spawn", "socket.connect", "socket.bind", "urllib.Request"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree"),
}


class Watch:
    """Record of the events while a folder is allowed; Python cannot remove an audit hook. What hangs fails."""

    def __init__(self) -> None:
        self.allowed: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        mode = arguments[1] if event == "open" else ""
        if event in HARMS or (isinstance(mode, str) and set(mode) & set("wax+")):
            place = str(arguments[0]) if arguments else ""
            if not place.startswith((str(self.allowed), "/dev/")) and "__pycache__" not in place:
                self.seen.append(f"{event} {arguments}")

    @contextmanager
    def on(self, allowed: Path) -> Iterator[None]:
        self.allowed, self.seen = allowed, []
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"not done after {TIMEOUT} s"))
        signal.alarm(TIMEOUT)
        try:
            yield
        finally:
            signal.alarm(0)
            self.allowed = None
        assert not self.seen


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def places(described: Any = Experiment, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every setting and every group of them."""
    for entry in fields(described):
        yield (path := (*prefix, entry.name))
        for kind in (entry.type, *get_args(entry.type)):
            if is_dataclass(kind) and entry.name != "losses":
                yield from places(kind, path)


PLACES = sorted({*places(), *(tuple(key.split(".")) for key in DESCRIBED)})

PLAIN: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 2**63, 10**400, 0.5, -0.0, float("nan"), float("inf"), 1e308),
    *("", "x", "a\x1b[2J\nb", "null", "1e5", "-", "/dev/zero", "../x"),
    *("a" * 10**4, "\u202e", "ünï"),
    *([], {}, [[]], [None], {"": {}}, {"a": {"b": [1, {"c": 2}]}}, [{}], list(range(200))),
    *("os.system", "{class_path: os.system}", "[" * 99, "&a [*a]", "!!python/name:os.system"),
    "2024-99-99",
)


@functools.cache
def loaded(trusted: bool) -> list[str]:
    """The paths of everything that is loaded: of the packages that may be imported, or of all others."""
    return sorted(
        f"{name}.{attribute}"
        for name, module in sys.modules.items()
        if (name.partition(".")[0] in PACKAGES) == trusted
        for attribute, value in getattr(module, "__dict__", {}).items()
        if issubclass(type(value), type) or not trusted  # never asks the value itself
    )


def drawn_description(draw: random.Random, base: Any = None) -> Any:
    """A description of a class: any, or one that was right with an argument that is not."""
    if base is not None and draw.random() < 0.5:
        arguments = dict(base.get("init_args") or {})
        name = draw.choice([*arguments, "num_classes", "distance"])
        return {**base, "init_args": arguments | {name: drawn_value(draw)}}
    names = draw.choices(("args", "loss", "x"), k=draw.randrange(3))
    arguments = {name: drawn_value(draw) for name in names}
    return {"class_path": draw.choice(loaded(draw.random() < 0.8)), "init_args": arguments}


def drawn_value(draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.6:
        return draw.choice(PLAIN)
    if kind < 0.8:
        return drawn_description(draw)
    return draw.choice([[drawn_value(draw)], {"a": drawn_value(draw)}, [[drawn_description(draw)]]])


def drawn_settings(draw: random.Random, base: dict[str, Any]) -> dict[str, Any]:
    """One to three settings with values that are mostly wrong."""
    settings: dict[str, Any] = {}
    for _ in range(draw.randint(1, 3)):
        *groups, name = draw.choice(PLACES)
        inner, old = settings, base
        for group in groups:
            inner = inner.setdefault(group, {})
            inner, old = (inner if isinstance(inner, dict) else {}), (old or {}).get(group) or {}
        was = old.get(name)
        value, right = drawn_value(draw), draw.random() < 0.8
        if name == "losses" and right:
            term = draw.choice(was)
            other = {"loss": drawn_description(draw, term["loss"])}
            value = [draw.choice((other, {**term, "weight": drawn_value(draw)}))]
        elif isinstance(was, dict | None) and ".".join((*groups, name)) in DESCRIBED and right:
            value = drawn_description(draw, was)
        inner[name] = value
    return settings


def written(settings: dict[str, Any], draw: random.Random) -> str:
    """Settings as YAML, sometimes with a few wrong letters."""
    text = yaml.safe_dump(settings) if draw.random() < 0.5 else json.dumps(settings)
    for _ in range(draw.choice((0, 0, 0, 0, 0, 0, 0, 1, 3))):
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice("[]{}:&*!|>'\"%@`\n\t\0-?,#") + text[at + 1 :]
    return text


RECIPE = "--recipe=glyphs/finetune/binomial_energy_confusion"


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    return parse([RECIPE]).resolved().config


@given(draw=st.randoms(use_true_random=False))
def test_wrong_settings(watch, base, tmp_path, draw):
    text = written(drawn_settings(draw, base), draw)
    (tmp_path / "c.yaml").write_text(text)
    try:
        with watch.on(tmp_path):
            words = [RECIPE, f"--config={tmp_path / 'c.yaml'}", f"--data.root={tmp_path}"]
            command = parse(words)
            command.resolved()
            try_one_step(command.experiment)
    except ConfigError as error:
        assert all(printable(line) == line for line in str(error).splitlines())
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]
