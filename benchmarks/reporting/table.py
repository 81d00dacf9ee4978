"""A mean with its interval, and a table of text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size

from benchmarks.console import columns

WIDTH = get_terminal_size().columns
"""Columns of the terminal; 80 if there is none."""

UNIT = " (%)"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the half-width of its 95 % interval (None for one seed)."""

    mean: float
    half_width: float | None

    def percent(self, sign: str = "") -> str:
        """E.g. "52.04 ± 0.91" for 0.5204 ± 0.0091; `sign="+"` always shows the sign."""
        mean = f"{100 * self.mean:{sign}.2f}"
        return mean if self.half_width is None else f"{mean} ± {100 * self.half_width:.2f}"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and its 95 % Student-t interval; at least one value.

    >>> estimate([0.50, 0.52, 0.54]).percent()  # 4.3027 * 0.02 / sqrt(3)
    '52.00 ± 4.97'
    """
    if len(values) == 1:
        return Estimate(values[0], None)
    from pml_regularizers import mean_interval  # imports torch, which --help does without

    return Estimate(*mean_interval(values, student=True))


def count_of_seeds(finished: int, diverged: Iterable[int]) -> str:
    """The number of seeds, with those that diverged.

    >>> count_of_seeds(4, [3])
    '4 (diverged: seed 3)'
    """
    lost = sorted(diverged)
    return f"{finished} (diverged: {named('seed', lost)})" if lost else f"{finished}"


def named(kind: str, numbers: Sequence[int]) -> str:
    """E.g. "seed 3" or "seeds 0, 3"."""
    return f"{kind}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


@dataclass(frozen=True)
class Table:
    """A header and rows of text; the first columns hold names, the others numbers.

    Args:
        names: Number of columns that hold names.
        best: (row, column) of the cells to mark.

    >>> print(Table(["method", "Recall@1"], [["triplets", "52.0"]]).terminal())
    method    Recall@1
    triplets      52.0
    """

    header: list[str]
    rows: list[list[str]]
    names: int = 1
    best: frozenset[tuple[int, int]] = frozenset()

    def markdown(self) -> str:
        rule = [":--" if side == "l" else "--:" for side in self.alignment()]
        table = [self.header, *self._marked("**{}**", "{}")]
        cells = ([cell.replace("|", "\\|") for cell in row] for row in table)
        header, *rows = [f"| {' | '.join(row)} |" for row in cells]
        return "\n".join([header, f"| {' | '.join(rule)} |", *rows])

    def terminal(self, width: int = WIDTH) -> str:
        """Aligned columns; those that do not fit the width follow below, with the names repeated."""
        mark = "*" if self.best else ""
        header = [cell.removesuffix(UNIT) + " " * len(mark) for cell in self.header]
        units = [UNIT.strip() + " " * len(mark) if UNIT in cell else "" for cell in self.header]
        rows = self._marked("{}" + mark, "{}" + " " * len(mark))
        table = [header, *([units] if any(units) else []), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        names, used = list(range(self.names)), width
        blocks: list[list[int]] = []
        for column in range(self.names, len(widths)):
            if used + 2 + widths[column] > width:
                blocks.append(names[:])
                used = sum(widths[: self.names]) + 2 * (self.names - 1)
            blocks[-1].append(column)
            used += 2 + widths[column]
        return "\n\n".join(
            columns(
                [
                    [row[c] if c < self.names else row[c].rjust(widths[c]) for c in block]
                    for row in table
                    if any(row[c] for c in block)
                ]
            )
            for block in blocks or [names]
        )

    def _marked(self, best: str, other: str) -> list[list[str]]:
        return [
            [
                cell if j < self.names else (best if (i, j) in self.best else other).format(cell)
                for j, cell in enumerate(row)
            ]
            for i, row in enumerate(self.rows)
        ]

    def alignment(self) -> str:
        """A letter for each column, "l" or "r", as LaTeX writes it."""
        return "l" * self.names + "r" * (len(self.header) - self.names)
