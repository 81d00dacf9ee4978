"""Progress bars of the runner."""

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(iterable: Any = None, *, shown: bool = True, **options: Any) -> Any:
    """A tqdm bar that updates often on a terminal and writes few lines to a log file."""
    shown &= sys.stderr is not None  # closed, as by 2>&-
    interval = 0.1 if shown and sys.stderr.isatty() else 10
    return tqdm(iterable, disable=not shown, mininterval=interval, dynamic_ncols=True, **options)
