"""The figure of a study: each comparison's difference and interval, beside the paper's gain.

Text stands above its interval, so that a phone shows it large enough. The colours follow the reader's theme, also
where a page shows the file as an image.
"""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from textwrap import wrap
from typing import Literal

from benchmarks.console import printable
from benchmarks.reporting.paired import Paired
from benchmarks.reporting.verdicts import (
    AS_GOOD,
    DIVERGED,
    HARMS,
    HELPS,
    MAIN,
    WORSE,
    WORTH,
    Finding,
    grouped,
    name_of,
    name_of_claim,
    pooled,
)
from benchmarks.settings import CONTROL, StudyFile

WIDTH, EDGE = 440, 8
LETTERS = 40  # of a line of text, with room for a difference beside it
TICKS = 8  # at most

STYLE = """
svg { color-scheme: light dark; }
svg { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
text { fill: #1f2328; }
.soft { fill: #59636e; font-size: 13px; }
.group { font-weight: 600; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.band { fill: #8c959f; fill-opacity: 0.22; }
.rule { stroke: #59636e; stroke-width: 1; }
.seen { fill: #0072b2; stroke: #0072b2; stroke-width: 2.5; }
.gain { fill: #007d5b; stroke: #007d5b; stroke-width: 2.5; }
.harm { fill: #c25500; stroke: #c25500; stroke-width: 2.5; }
.pool { fill: #6e7781; stroke: #6e7781; stroke-width: 1.5; }
.paper { fill: none; stroke: #1f2328; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .soft { fill: #a5aeb8; }
  .band { fill-opacity: 0.34; }
  .rule { stroke: #a5aeb8; }
  .seen { fill: #56b4e9; stroke: #56b4e9; }
  .gain { fill: #2fc79a; stroke: #2fc79a; }
  .harm { fill: #ff8c3a; stroke: #ff8c3a; }
  .pool { fill: #a5aeb8; stroke: #a5aeb8; }
  .paper { stroke: #e6edf3; }
}
"""

GOOD, BAD = (HELPS, WORTH, AS_GOOD), (HARMS, WORSE)

COLOURS = {
    "seen": "here: mean and 95 % interval",
    "gain": ", ".join(GOOD),
    "harm": ", ".join(BAD),
}
"""The words for each colour, for the key."""


def forest(
    study: StudyFile, findings: Sequence[Finding], which: Literal["main", "mechanisms"]
) -> bytes:
    """An SVG file of the main comparisons by method, with their pooled effects, or of all others by family.

    Controls are left out. The axis reaches from the lowest limit to the highest, and to all gains of papers.
    """
    if which == "main":
        drawn = [finding for finding in findings if finding.comparison.family == MAIN]
        pools = {method: pool for method, pool in pooled(study, drawn).items() if pool}
    else:
        drawn = [f for f in findings if f.comparison.family not in (MAIN, CONTROL)]
        pools = {}
    return _Plot(study, drawn, pools).svg().encode()


class _Plot:
    """Draws from the top down; `_y` is the lower edge of what is drawn."""

    def __init__(self, study: StudyFile, drawn: Sequence[Finding], pools: dict[str, Paired]):
        self._study, self._drawn, self._pools = study, drawn, pools
        gains = [finding.comparison.reported_gain() for finding in drawn]
        self._has_gains = any(gain is not None for gain in gains)
        tested = [finding.tested for finding in drawn if finding.tested]
        limits = [
            limit
            for of in (*tested, *pools.values())
            for limit in (of.limits() if of.has_interval else [of.mean])
        ]
        reached = [-study.margin, study.margin, *limits, *(g for g in gains if g is not None)]
        edge = 0.04 * (max(reached) - min(reached))
        self._low, self._high = min(reached) - edge, max(reached) + edge
        self._y, self._parts = 0.0, list[str]()

    def svg(self) -> str:
        self._key()
        for group, findings in grouped(self._drawn).items():
            self._y += 8
            if group:
                self._text(group[:1].upper() + group[1:], "group")
            for finding in findings:
                self._comparison(finding)
            if group in self._pools:
                self._text("pooled, exploratory", "soft", _signed(self._pools[group].points()))
                self._strip(self._pools[group], "pool", 3, half=7)
        self._axis()
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._y:g}" width="{WIDTH}" '
            f'height="{self._y:g}" role="img">\n<title>Paired differences with 95 % intervals</title>\n'
            f"<style>{STYLE}</style>\n" + "\n".join(self._parts) + "\n</svg>\n"
        )

    def _key(self) -> None:
        dot = '<path class="{}" d="M8 {{y}}h28"/><circle class="{}" cx="22" cy="{{y}}" r="4"/>'
        band = '<rect class="band" x="8" y="{top}" width="28" height="16"/>'
        seen = {_colour(finding) for finding in self._drawn} | {"seen"}
        entries = [
            *((dot.format(one, one), words) for one, words in COLOURS.items() if one in seen),
            (band, f"less than {self._study.margin:g} point{'s' * (self._study.margin != 1)}"),
        ]
        if self._has_gains:
            words = "the paper's gain, on its own dataset (Recall@1)"
            entries.append((_diamond("22", "{y}"), words))
        for drawing, words in entries:
            self._y += 22
            middle = self._y - 5
            self._parts.append(
                drawing.replace("{y}", f"{middle:g}").replace("{top}", f"{middle - 8:g}")
            )
            self._parts.append(_text(46, self._y, words, "soft"))

    def _comparison(self, finding: Finding) -> None:
        comparison, tested = finding.comparison, finding.tested
        difference = _signed(tested.points()) if tested else DIVERGED
        self._text(name_of_claim(self._study, comparison), "", difference)
        self._strip(tested, _colour(finding), 4.5, comparison.reported_gain())

    def _text(self, words: str, kind: str, right: str = "") -> None:
        for number, line in enumerate(wrap(words, LETTERS if right else LETTERS + 12)):
            self._y += 20
            self._parts.append(_text(EDGE, self._y, line, kind))
            if right and number == 0:
                self._parts.append(_text(WIDTH - EDGE, self._y, right, "soft right"))

    def _strip(
        self,
        tested: Paired | None,
        colour: str,
        radius: float,
        gain: float | None = None,
        half: int = 11,
    ) -> None:
        """The band, the line at 0 and, between them, the interval and the paper's gain."""
        top, y, bottom = (self._y + 5 + part for part in (0, half, 2 * half))
        left, right = self._x(-self._study.margin), self._x(self._study.margin)
        self._parts += [
            f'<rect class="band" x="{left}" y="{top:g}" width="{right - left:.1f}" height="{2 * half}"/>',
            f'<path class="rule" d="M{self._x(0)} {top:g}V{bottom:g}"/>',
        ]
        if tested is not None:
            if tested.has_interval:
                low, high = map(self._x, tested.limits())
                self._parts.append(f'<path class="{colour}" d="M{low} {y:g}H{high}"/>')
            mean = self._x(tested.mean)
            self._parts.append(f'<circle class="{colour}" cx="{mean}" cy="{y:g}" r="{radius:g}"/>')
        if gain is not None:
            self._parts.append(_diamond(f"{self._x(gain)}", f"{y:g}"))
        self._y = bottom + 4

    def _axis(self) -> None:
        y, step = self._y + 8, _step((self._high - self._low) / TICKS)
        self._parts.append(f'<path class="rule" d="M{EDGE} {y:g}H{WIDTH - EDGE}"/>')
        for number in range(ceil(self._low / step), floor(self._high / step) + 1):
            x = self._x(number * step)
            self._parts.append(f'<path class="rule" d="M{x} {y:g}v5"/>')
            self._parts.append(_text(x, y + 20, _signed(f"{number * step:+g}"), "soft middle"))
        metric = name_of(self._study.primary)
        words = f"percentage points of {metric}, in the claim's direction"
        self._parts.append(_text(WIDTH / 2, y + 42, words, "soft middle"))
        self._y = y + 54

    def _x(self, points: float) -> float:
        """The place of a difference, with a tenth of a pixel."""
        share = (points - self._low) / (self._high - self._low)
        return round(EDGE + share * (WIDTH - 2 * EDGE), 1)


def _colour(finding: Finding) -> str:
    words = set(finding.words)
    return "gain" if words & {*GOOD} else "harm" if words & {*BAD} else "seen"


def _step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... (and 0.5, 0.2, ...) that is not smaller."""
    power = float(10.0 ** floor(log10(least)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)


def _signed(text: str) -> str:
    """The text with signs as wide as each other, and no sign at 0."""
    return "0" if text == "+0" else text.replace("-", "\N{MINUS SIGN}")


def _text(x: float, y: float, words: str, kind: str) -> str:
    written = escape(printable(words))
    return f'<text x="{x:g}" y="{y:g}"{kind and f" class={kind!r}"}>{written}</text>'


def _diamond(x: str, y: str) -> str:
    return f'<path class="paper" d="M{x} {y}m-6.5 0l6.5 -6.5l6.5 6.5l-6.5 6.5z"/>'
