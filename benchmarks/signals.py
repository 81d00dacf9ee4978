"""Requests to stop, where something has to be saved first."""

import signal
from types import FrameType
from typing import Any, Self


class StopHandler:
    """Takes SIGINT and SIGTERM, from entering to leaving the context; subclasses say what becomes of them."""

    def __init__(self) -> None:
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError
