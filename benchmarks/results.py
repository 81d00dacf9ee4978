"""What reports are made of: the record of a run, a mean with its interval, a table."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

REQUIRED = (
    *("label", "seed", "status", "data", "steps", "metrics"),
    *("wall_time_s", "hardware", "world_size"),
)


@dataclass(frozen=True)
class Run:
    """A run folder and the contents of its run.json."""

    folder: Path
    info: dict[str, Any]

    @property
    def label(self) -> str:
        return self.info["label"]

    @property
    def seed(self) -> int:
        return self.info["seed"]


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` seeds and the half-width of its 95 % interval (None for one seed)."""

    mean: float
    half_width: float | None
    count: int

    def percent(self, sign: str = "") -> str:
        """E.g. "52.04 ± 0.91" for 0.5204 ± 0.0091; `sign="+"` always shows the sign."""
        mean = f"{100 * self.mean:{sign}.2f}"
        return mean if self.half_width is None else f"{mean} ± {100 * self.half_width:.2f}"


@dataclass(frozen=True)
class Table:
    """A header and rows of text; the first column holds names, the others numbers."""

    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        rule = [":--"] + ["--:"] * (len(self.header) - 1)
        cells = ([cell.replace("|", "\\|") for cell in row] for row in [self.header, *self.rows])
        header, *rows = [f"| {' | '.join(row)} |" for row in cells]
        return "\n".join([header, f"| {' | '.join(rule)} |", *rows])

    def html(self) -> str:
        header = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in self.header)
        rows = "".join(
            f'<tr><th scope="row">{html.escape(name)}</th>'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            + "</tr>"
            for name, *cells in self.rows
        )
        return (
            f'<div class="wide"><table><thead><tr>{header}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )


def load_run(folder: Path) -> Run:
    """Reads a run folder.

    Raises:
        ValueError: if its run.json is missing, unreadable or lacks an entry.
    """
    path = folder / "run.json"
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; expected a run folder that benchmarks/run.py wrote"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error}); run that training again") from error
    missing = [key for key in REQUIRED if not isinstance(info, dict) or key not in info]
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(missing)}; run that training again")
    return Run(folder, info)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and its 95 % Student-t interval; at least one value.

    >>> estimate([0.50, 0.52, 0.54]).percent()  # 4.3027 * 0.02 / sqrt(3)
    '52.00 ± 4.97'
    """
    count = len(values)
    half_width = None
    if count > 1:
        half_width = float(
            student_t.ppf(0.975, count - 1) * np.std(values, ddof=1) / np.sqrt(count)
        )
    return Estimate(float(np.mean(values)), half_width, count)
