"""Pages as text, Markdown and LaTeX."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill

from benchmarks.reporting.table import WIDTH, Table


@dataclass(frozen=True)
class Page:
    """Content in any format.

    Args:
        blocks: Tables, and other blocks of Markdown: headings, paragraphs, lists and commands.
    """

    title: str
    blocks: list[str | Table]

    def terminal(self) -> str:
        parts = [
            block.terminal() if isinstance(block, Table) else _folded(block)
            for block in (self.title, *self.blocks)
        ]
        return "\n\n".join(parts) + "\n"

    def markdown(self) -> str:
        parts = [block.markdown() if isinstance(block, Table) else block for block in self.blocks]
        return "\n\n".join([f"## {self.title}", *parts]) + "\n"

    def latex(self) -> str:
        """The tables in LaTeX, with all else as comments; the heading of a table goes into its caption."""
        parts, above = ["% \\usepackage{booktabs}"], ""
        for block in self.blocks:
            if isinstance(block, str):
                above = block.lstrip("# ")
                lines = [line for line in block.splitlines() if "```" not in line]
                parts.append("\n".join(f"% {line.lstrip('#* ')}" for line in lines))
                continue
            rows = "\n".join(map(_latex_row, block.rows))
            parts.append(
                "\\begin{table}\n\\centering\\footnotesize\n"
                f"\\caption{{{_latex(self.title)} ({_latex(above)})}}\n"
                f"\\begin{{tabular}}{{{block.alignment()}}}\n\\toprule\n"
                f"{_latex_row(block.header)}\n\\midrule\n{rows}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}"
            )
        return "\n\n".join(parts) + "\n"


def _folded(block: str) -> str:
    """A block without its marks, in lines that fit the terminal."""
    if block.startswith("```"):
        return "\n".join(map(_folded_command, block.splitlines()[1:-1]))
    return "\n".join(
        fill(line, WIDTH, subsequent_indent="  " * line.startswith("* "), break_on_hyphens=False)
        for line in block.lstrip("# ").splitlines()
    )


def _folded_command(command: str) -> str:
    """The same command for a shell, in lines that fit the terminal where its words do."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if len(lines[-1]) + len(word) + 2 >= WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines).strip()


LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"},
    **{"<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}"},
    **{"±": "$\\pm$", "†": "$\\dagger$", "×": "$\\times$"},
}


def _latex(text: str) -> str:
    return text.translate(str.maketrans(LATEX))


def _latex_row(cells: Iterable[str]) -> str:
    signed = (re.sub(r"^-(?=\d)", "$-$", _latex(cell)) for cell in cells)
    return " & ".join(signed) + r" \\"
