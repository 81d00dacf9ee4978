"""The figure of a study: each comparison's difference and interval, beside the paper's gain.

Text stands above its interval, so that a phone shows it large enough.
"""

from collections.abc import Sequence
from textwrap import wrap
from typing import Literal

from benchmarks.reporting.paired import Paired
from benchmarks.reporting.svg import EDGE, WIDTH, svg_file, svg_text, ticks
from benchmarks.reporting.verdicts import (
    MAIN,
    PAPERS,
    Finding,
    Word,
    grouped,
    name_of,
    name_of_claim,
    pooled,
)
from benchmarks.settings import CONTROL, StudyFile

LETTERS = 40  # of a line of text, with room for a difference beside it
TICKS = 8  # at most

STYLE = """
.band { fill: #8c959f; fill-opacity: 0.22; }
.seen { fill: #0072b2; stroke: #0072b2; stroke-width: 2.5; }
.gain { fill: #007d5b; stroke: #007d5b; stroke-width: 2.5; }
.harm { fill: #c25500; stroke: #c25500; stroke-width: 2.5; }
.pool { fill: #6e7781; stroke: #6e7781; stroke-width: 1.5; }
.paper { fill: none; stroke: #1f2328; stroke-width: 1.5; }
"""
DARK = """
.band { fill-opacity: 0.34; }
.seen { fill: #56b4e9; stroke: #56b4e9; }
.gain { fill: #2fc79a; stroke: #2fc79a; }
.harm { fill: #ff8c3a; stroke: #ff8c3a; }
.pool { fill: #a5aeb8; stroke: #a5aeb8; }
.paper { stroke: #e6edf3; }
"""

GOOD, BAD = (Word.HELPS, Word.WORTH, Word.AS_GOOD), (Word.HARMS, Word.WORSE)

COLOURS = {
    "seen": "here: mean and 95 % interval",
    "gain": "a gain, or as good as claimed",
    "harm": "a harm, or worse than claimed",
}
"""The meaning of each colour, for the key."""


def forest(
    study: StudyFile, findings: Sequence[Finding], which: Literal["main", "mechanisms"]
) -> bytes | None:
    """An SVG file of the main comparisons by method, with their pooled effects, or of all others by family.

    Controls are left out; None if no comparison was measured. The axis reaches from the lowest limit to the
    highest, and to the papers' gains, which are drawn where the metric is theirs.
    """
    if which == "main":
        drawn = [finding for finding in findings if finding.comparison.family == MAIN]
        pools = {method: pool for method, pool in pooled(study, drawn).items() if pool}
    else:
        drawn = [f for f in findings if f.comparison.family not in (MAIN, CONTROL)]
        pools = {}
    return _Plot(study, drawn, pools).svg() if any(of.tested for of in drawn) else None


class _Plot:
    """Draws from the top down; `_y` is the lower edge of what is drawn."""

    def __init__(self, study: StudyFile, drawn: Sequence[Finding], pools: dict[str, Paired]):
        self._study, self._drawn, self._pools = study, drawn, pools
        gains = [self._gain(finding) for finding in drawn]
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

    def svg(self) -> bytes:
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
        title = "Paired differences with 95 % intervals"
        return svg_file(self._parts, self._y, title, STYLE, DARK)

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
            self._parts.append(svg_text(46, self._y, words, "soft"))

    def _comparison(self, finding: Finding) -> None:
        comparison, tested = finding.comparison, finding.tested
        difference = _signed(tested.points()) if tested else Word.DIVERGED
        self._text(name_of_claim(self._study, comparison), "", difference)
        self._strip(tested, _colour(finding), 4.5, self._gain(finding))

    def _gain(self, finding: Finding) -> float | None:
        """The paper's gain, if its metric is that of the axis."""
        comparison = finding.comparison
        same = self._study.metric(comparison) == PAPERS
        return comparison.reported_gain() if same else None

    def _text(self, words: str, kind: str, right: str = "") -> None:
        for number, line in enumerate(wrap(words, LETTERS if right else LETTERS + 12)):
            self._y += 20
            self._parts.append(svg_text(EDGE, self._y, line, kind))
            if right and number == 0:
                self._parts.append(svg_text(WIDTH - EDGE, self._y, right, "soft right"))

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
        y = self._y + 8
        self._parts.append(f'<path class="rule" d="M{EDGE} {y:g}H{WIDTH - EDGE}"/>')
        for number in ticks(self._low, self._high, TICKS):
            x = self._x(number)
            self._parts.append(f'<path class="rule" d="M{x} {y:g}v5"/>')
            self._parts.append(svg_text(x, y + 20, _signed(f"{number:+g}"), "soft middle"))
        metric = name_of(self._study.primary)
        words = f"percentage points of {metric}; right of 0: as claimed"
        self._parts.append(svg_text(WIDTH / 2, y + 42, words, "soft middle"))
        self._y = y + 54

    def _x(self, points: float) -> float:
        """The place of a difference, with a tenth of a pixel."""
        share = (points - self._low) / (self._high - self._low)
        return round(EDGE + share * (WIDTH - 2 * EDGE), 1)


def _colour(finding: Finding) -> str:
    words = set(finding.words)
    return "gain" if words & {*GOOD} else "harm" if words & {*BAD} else "seen"


def _signed(text: str) -> str:
    """The text with signs as wide as each other, and no sign at 0."""
    return "0" if text == "+0" else text.replace("-", "\N{MINUS SIGN}")


def _diamond(x: str, y: str) -> str:
    return f'<path class="paper" d="M{x} {y}m-6.5 0l6.5 -6.5l6.5 6.5l-6.5 6.5z"/>'
