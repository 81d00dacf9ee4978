"""Parts of a study's figures: SVG whose colours follow the reader's theme, also as an image in a page."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

from benchmarks.console import printable

WIDTH, EDGE = 440, 8  # a phone shows it whole

STYLE = """
svg { color-scheme: light dark; }
svg { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
text { fill: #1f2328; }
.soft { fill: #59636e; font-size: 13px; }
.group { font-weight: 600; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.rule { stroke: #59636e; stroke-width: 1; }
"""

DARK = """
text { fill: #e6edf3; }
.soft { fill: #a5aeb8; }
.rule { stroke: #a5aeb8; }
"""


def svg_file(parts: Sequence[str], height: float, title: str, style: str, dark: str) -> bytes:
    """The file, with further rules of style for both themes and for dark ones."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}{style.lstrip()}@media (prefers-color-scheme: dark) {{{DARK}{dark.lstrip()}}}\n</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    ).encode()


def svg_text(x: float, y: float, words: str, kind: str = "") -> str:
    """Text of a class, in printable characters."""
    written = escape(printable(words))
    return f'<text x="{x:g}" y="{y:g}"{kind and f" class={kind!r}"}>{written}</text>'


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, at most so many steps apart: 1, 2, 5, 10, ... or 0.5, 0.2, ..."""
    least = (high - low) / most
    power = float(10.0 ** floor(log10(least)))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= least)
    return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]
