"""Tables, and pages of them: on the terminal and in Markdown."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from textwrap import fill

from tabulate import tabulate

from benchmarks.console.printing import printable

WIDTH = get_terminal_size().columns  # 80 if there is no terminal
NARROWEST = 20  # to which names are folded so that all columns fit


@dataclass(frozen=True)
class Table:
    """A header and rows of text; the first columns hold names, the others numbers.

    >>> print(Table(["method", "Recall@1"], [["triplets", "52.0"]]).terminal())
    method    Recall@1
    triplets      52.0
    """

    header: list[str]
    rows: list[list[str]]
    names: int = 1  # so many columns hold names

    def markdown(self) -> str:
        """Compact, as our pages have it: `tabulate` fills the cells up."""
        rule = [":--"] * self.names + ["--:"] * (len(self.header) - self.names)
        table = [self.header, rule, *self.rows]
        cells = ([cell.replace("|", "\\|") for cell in row] for row in table)
        return "\n".join(f"| {' | '.join(row)} |" for row in cells)

    def terminal(self, width: int = WIDTH) -> str:
        """Aligned columns; names are folded to fit the width, and columns that do not follow below."""

        def aligned(columns: list[tuple[str, ...]]) -> str:
            sides = ["left"] * self.names + ["right"] * (len(columns) - self.names)
            rows = zip(*columns, strict=True)
            how = {"disable_numparse": True, "preserve_whitespace": True, "tablefmt": "plain"}
            return str(tabulate(rows, colalign=sides, **how))

        header = [re.sub(r"^Recall(@\d+) \(%\)", r"Recall\n\1 %", cell) for cell in self.header]
        header = [cell.replace(" (%)", "\n(%)") for cell in header]
        columns = list(zip(header, *self.rows, strict=True))
        first, *others = columns
        spare = width - len(aligned([("",) * len(first), *others]).split("\n")[0]) - 1
        if max(map(len, first)) > spare >= NARROWEST:
            columns[0] = tuple(fill(name, spare, break_on_hyphens=False) for name in first)
        parts: list[list[tuple[str, ...]]] = []
        for column in columns[self.names :]:
            if parts and len(aligned([*parts[-1], column]).split("\n")[0]) <= width:
                parts[-1].append(column)
            else:
                parts.append([*columns[: self.names], column])
        return "\n\n".join(map(aligned, parts))


def plain(text: str) -> str:
    """A name as text of Markdown, which shows it as it is.

    >>> plain("a*b <c>")
    'a\\\\*b &lt;c>'
    """
    return re.sub(r"([\\`*_\[\]])", r"\\\1", printable(text)).replace("<", "&lt;")


@dataclass(frozen=True)
class Page:
    """Content in any format."""

    title: str
    blocks: list[str | Table]  # text: headings, paragraphs, lists and indented code in Markdown

    def terminal(self) -> str:
        parts = [
            block.terminal() if isinstance(block, Table) else _folded(block)
            for block in (self.title, *self.blocks)
        ]
        return "\n\n".join(parts) + "\n"

    def parts(self) -> list[str]:
        """The blocks in Markdown."""
        return [block.markdown() if isinstance(block, Table) else block for block in self.blocks]

    def markdown(self) -> str:
        return "\n\n".join([f"## {self.title}", *self.parts()]) + "\n"


def _folded(block: str) -> str:
    """A block without its marks, in lines that fit the terminal; a command in code, indented, stays whole."""
    if block.startswith("    "):
        return block
    return "\n".join(
        fill(line, WIDTH, subsequent_indent="  " * line.startswith("* "), break_on_hyphens=False)
        for line in block.lstrip("# ").splitlines()
    )


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
