"""Modules of Python that Linux and macOS have, and Windows has not."""

import importlib
import sys
from typing import Any


def posix_module(name: str) -> Any:
    """Import such a module; elsewhere the command ends with one line and exit status 2."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(
            f"error: the runner needs Linux or macOS (Python's {name}); on Windows use WSL 2 or the library",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
