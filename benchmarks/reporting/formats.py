"""Paper tables as text, Markdown and LaTeX."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill

from benchmarks.reporting.table import WIDTH, Table


@dataclass(frozen=True)
class Page:
    """Content in any format: tables under their headings, then lists, then commands."""

    title: str
    sections: list[tuple[str, Table]]
    lists: dict[str, list[str]]
    commands: list[str]

    def terminal(self) -> str:
        parts = [self.title]
        parts += [f"{heading}\n\n{table.terminal()}" for heading, table in self.sections]
        for heading, lines in self.lists.items():
            items = (
                fill(line, WIDTH, initial_indent="* ", subsequent_indent="  ") for line in lines
            )
            parts.append("\n".join([f"{heading}\n", *items]))
        if self.commands:
            parts.append("\n".join(["Rows that are missing\n", *map(_folded, self.commands)]))
        return "\n\n".join(parts) + "\n"

    def markdown(self) -> str:
        parts = [f"## {self.title}"]
        parts += [f"### {heading}\n\n{table.markdown()}" for heading, table in self.sections]
        for heading, lines in self.lists.items():
            parts.append("\n".join([f"### {heading}\n", *(f"* {line}" for line in lines)]))
        if self.commands:
            parts.append("\n".join(["### Rows that are missing\n\n```bash", *self.commands, "```"]))
        return "\n\n".join(parts) + "\n"

    def latex(self) -> str:
        """The tables in LaTeX, with the lists as comments."""
        parts = ["% \\usepackage{booktabs}"]
        for heading, table in self.sections:
            rows = "\n".join(map(_latex_row, table.rows))
            parts.append(
                "\\begin{table}\n\\centering\\footnotesize\n"
                f"\\caption{{{_latex(self.title)} ({_latex(heading)})}}\n"
                f"\\begin{{tabular}}{{{table.alignment()}}}\n\\toprule\n"
                f"{_latex_row(table.header)}\n\\midrule\n{rows}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}"
            )
        notes = [line for heading, lines in self.lists.items() for line in (heading, *lines)]
        parts.append("\n".join(f"% {line}" for line in notes))
        return "\n\n".join(parts) + "\n"


def _folded(command: str) -> str:
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
    return "".join(LATEX.get(character, character) for character in text)


def _latex_row(cells: Iterable[str]) -> str:
    signed = (re.sub(r"^-(?=\d)", "$-$", _latex(cell)) for cell in cells)
    return " & ".join(signed) + r" \\"
