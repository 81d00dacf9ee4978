"""Handling of requests to stop: save first, then stop."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from accelerate import Accelerator


STOPPING = (signal.SIGINT, signal.SIGTERM)

TOGETHER = 2
"""Seconds: a batch system signals all processes, and a launcher passes its own signal on."""


def handle_signals(handler: Any) -> dict[int, Any]:
    """Send SIGINT and SIGTERM to a handler from now on, and return their former handlers."""
    return {number: signal.signal(number, handler) for number in STOPPING}


@contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Send SIGINT and SIGTERM to a handler within the context."""
    old = handle_signals(handler)
    try:
        yield
    finally:
        for number in STOPPING:
            signal.signal(number, old[number])


def leave(number: int, frame: FrameType | None) -> None:
    """Handler for the time before there is anything to save: ends the process at once.

    Imports would turn an exception into another error, and a destructor would lose it.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" and multiprocessing.parent_process() is None:
        os.write(2, b"\nstopped\n")
    os._exit(128 + number)


class StopRequest:
    """Context that turns SIGINT and SIGTERM into a flag.

    `accelerate launch` with one process passes no signal on when it is stopped: its end counts as SIGTERM.

    Args:
        patient: Catch all signals. If False, only the first one and those that come together with it; a later one
            has its former effect.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.signal: int | None = None  # the first one
        self.requests = 0  # signals so far
        self._patient = patient
        self._old: dict[int, Any] = {}
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ  # set by accelerate launch
        self._launcher = os.getppid() if launched else None

    def __enter__(self) -> Self:
        self._old = handle_signals(self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.requests += 1
        if self.requests == 1:
            self._first = time.monotonic()
        elif not self._patient and time.monotonic() > self._first + TOGETHER:
            self.__exit__()
            signal.raise_signal(number)

    def agreed(self, accelerator: "Accelerator") -> bool:
        """True if any process was asked to stop."""
        if self._launcher not in (None, os.getppid()) and self.signal is None:
            self.signal = signal.SIGTERM
        if accelerator.num_processes > 1:
            import torch

            asked = torch.tensor([float(self.signal or 0)], device=accelerator.device)
            self.signal = int(accelerator.gather(asked).max()) or None
        return self.signal is not None


def ignore_signals(worker: int) -> None:
    """For `DataLoader(worker_init_fn=...)`: let workers survive Ctrl-C until the run stops them."""
    handle_signals(signal.SIG_IGN)


@contextmanager
def workers_dismissed() -> Iterator[None]:
    """End the data-loader workers that an error left behind.

    They ignore SIGTERM, and Python would wait for them at its exit.
    """
    others = set(multiprocessing.active_children())
    try:
        yield
    finally:
        left = set(multiprocessing.active_children()) - others
        if left:  # torch's handler raises when a worker ends
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in left:
            worker.kill()
