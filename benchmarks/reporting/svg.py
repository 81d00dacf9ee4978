"""The figures of a study: SVG whose colours follow the reader's theme, also as an image in a page.

Text stands above what it tells about, so that a phone shows it large enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from textwrap import wrap
from typing import Any

from benchmarks.console.printing import printable
from benchmarks.reporting.curves import COLOURS, COSINES, RANKS, RECALLS, curves_svg
from benchmarks.reporting.names import metric_name
from benchmarks.reporting.paired import Paired
from benchmarks.reporting.verdicts import (
    MAIN,
    PAPERS,
    Finding,
    Results,
    Word,
    by_method,
    name_of_claim,
    pooled,
)
from benchmarks.settings.recipe_files import read_entry
from benchmarks.settings.study_files import CONTROL, StudyFile

WIDTH, EDGE = 440, 8  # a phone shows it whole
LETTERS = 40  # of a line of text, with room for a difference beside it

STYLE = """
svg { color-scheme: light dark; }
svg { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
text { fill: #1f2328; }
.soft { fill: #59636e; font-size: 13px; }
.group { font-weight: 600; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.rule { stroke: #59636e; stroke-width: 1; }
.band { fill: #8c959f; fill-opacity: 0.22; }
.seen { fill: #0072b2; stroke: #0072b2; stroke-width: 2.5; }
.gain { fill: #007d5b; stroke: #007d5b; stroke-width: 2.5; }
.harm { fill: #c25500; stroke: #c25500; stroke-width: 2.5; }
.pool { fill: #6e7781; stroke: #6e7781; stroke-width: 1.5; }
.paper { fill: none; stroke: #1f2328; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.soft { fill: #a5aeb8; }
.rule { stroke: #a5aeb8; }
.band { fill-opacity: 0.34; }
.seen { fill: #56b4e9; stroke: #56b4e9; }
.gain { fill: #2fc79a; stroke: #2fc79a; }
.harm { fill: #ff8c3a; stroke: #ff8c3a; }
.pool { fill: #a5aeb8; stroke: #a5aeb8; }
.paper { stroke: #e6edf3; }
}
"""

KEY = {  # colours of intervals
    "seen": "here: mean and 95 % interval",
    "gain": "a gain, or as good as claimed",
    "harm": "a harm, or worse than claimed",
}

DIAMOND = "m-6.5 0l6.5 -6.5l6.5 6.5l-6.5 6.5z"


def study_figures(
    study: StudyFile, findings: Sequence[Finding], results: Results
) -> dict[str, bytes]:
    """The SVG files that have something to show.

    Besides `forests`, "_curves" has the compared rows over the steps of a training, "_cosines" and "_ranks"
    likewise the cosines of features and the effective ranks.
    """
    judged = [of for part in _parts(findings).values() for of in part]
    drawn = {
        "_curves": curves(study, judged, results, RECALLS),
        "_cosines": curves(study, judged, results, COSINES),
        "_ranks": curves(study, judged, results, RANKS),
    }
    return forests(study, findings) | {name: figure for name, figure in drawn.items() if figure}


def forests(
    study: StudyFile, findings: Sequence[Finding], right: str = "as claimed"
) -> dict[str, bytes]:
    """The files of differences; `right` says what one right of 0 means.

    "" has the main comparisons by method, with their pooled effects, "_mechanisms" all others by family except
    controls.
    """
    drawn = {name: forest(study, of, right) for name, of in _parts(findings).items()}
    return {name: figure for name, figure in drawn.items() if figure}


def _parts(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """The findings of each file of `forests`."""
    return {
        "": [of for of in findings if of.comparison.family == MAIN],
        "_mechanisms": [of for of in findings if of.comparison.family not in (MAIN, CONTROL)],
    }


class Drawing:
    """Parts of an SVG file from the top down; `y` is the lower edge of what is drawn."""

    def __init__(self) -> None:
        self.y, self.parts = 0.0, list[str]()

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        about = f'x="{x:g}" y="{y:g}"{kind and f" class={kind!r}"}'
        self.parts.append(f"<text {about}>{escape(printable(words))}</text>")

    def path(self, kind: str, points: str) -> None:
        self.parts.append(f'<path class="{kind}" d="{points}"/>')

    def line(self, words: str, kind: str, right: str = "") -> None:
        """Text from edge to edge, with more at its right."""
        for number, part in enumerate(wrap(words, LETTERS if right else LETTERS + 12)):
            self.y += 20
            self.text(EDGE, self.y, part, kind)
            if right and number == 0:
                self.text(WIDTH - EDGE, self.y, right, "soft right")

    def key(self, mark: str, words: str) -> None:
        """An entry of the key, whose mark has {y} as its middle and {top} as its upper edge."""
        self.y += 22
        self.parts.append(mark.format(y=f"{self.y - 5:g}", top=f"{self.y - 13:g}"))
        self.text(46, self.y, words, "soft")

    def file(self, title: str) -> bytes:
        size = f'viewBox="0 0 {WIDTH} {self.y:g}" width="{WIDTH}" height="{self.y:g}"'
        begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        head = [begin, f"<title>{title}</title>", f"<style>{STYLE}</style>"]
        return "\n".join([*head, *self.parts, "</svg>\n"]).encode()


@dataclass(frozen=True)
class Axis:
    """Differences in points, from one edge of a drawing to the other."""

    svg: Drawing
    low: float
    high: float
    margin: float

    def x(self, points: float) -> float:
        return round(EDGE + (points - self.low) / (self.high - self.low) * (WIDTH - 2 * EDGE), 1)

    def strip(
        self,
        mean: float | None,
        limits: tuple[float, float] | None,
        colour: str,
        radius: float,
        half: int,
        gain: float | None = None,
    ) -> None:
        """The band, the line at 0 and, between them, the interval and the paper's gain."""
        svg, margin = self.svg, self.margin
        top, y, bottom = (f"{svg.y + 5 + part:g}" for part in (0, half, 2 * half))
        wide = self.x(margin) - self.x(-margin)
        band = f'x="{self.x(-margin)}" y="{top}" width="{wide:.1f}" height="{2 * half}"'
        svg.parts.append(f'<rect class="band" {band}/>')
        svg.path("rule", f"M{self.x(0)} {top}V{bottom}")
        if limits is not None:
            first, last = map(self.x, limits)
            svg.path(colour, f"M{first} {y}H{last}")
        if mean is not None:
            dot = f'cx="{self.x(mean)}" cy="{y}" r="{radius:g}"'
            svg.parts.append(f'<circle class="{colour}" {dot}/>')
        if gain is not None:
            svg.path("paper", f"M{self.x(gain)} {y}{DIAMOND}")
        svg.y += 9 + 2 * half

    def ticks(self, words: str) -> None:
        """The axis itself, below all strips, with words on its unit."""
        svg = self.svg
        svg.y += 8
        svg.path("rule", f"M{EDGE} {svg.y:g}H{WIDTH - EDGE}")
        for number in _ticks(self.low, self.high):
            svg.path("rule", f"M{self.x(number)} {svg.y:g}v5")
            svg.text(self.x(number), svg.y + 20, signed(f"{number:+g}"), "soft middle")
        svg.text(WIDTH / 2, svg.y + 42, words, "soft middle")
        svg.y += 54


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at most eight steps apart: 1, 2, 5, 10, ... or 0.5, 0.2, ..."""
    least = (high - low) / 8
    power = float(10.0 ** floor(log10(least)))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= least)
    return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]


def forest(study: StudyFile, findings: Sequence[Finding], right: str = "as claimed") -> bytes:
    """Each comparison's difference and interval, beside the paper's gain; empty if none was measured.

    The axis reaches from the lowest limit to the highest, and to the papers' gains, which are drawn where the
    metric is theirs.
    """
    tested = [finding.tested for finding in findings if finding.tested]
    if not tested:
        return b""
    pools = {method: pool for method, pool in pooled(study, findings).items() if pool}
    of_papers = [of.comparison for of in findings if study.metric(of.comparison) == PAPERS]
    gains = {of.name: gain for of in of_papers if (gain := of.reported_gain()) is not None}
    svg, margin = Drawing(), study.margin
    reached = [-margin, margin, *gains.values()]
    for of in (*tested, *pools.values()):
        reached += of.limits() if of.has_interval else [of.mean]
    edge = 0.04 * (max(reached) - min(reached))
    low, high = min(reached) - edge, max(reached) + edge

    axis = Axis(svg, low, high, margin)

    def strip(of: Paired | None, *look: Any) -> None:
        limits = of.limits() if of and of.has_interval else None
        axis.strip(of.mean if of else None, limits, *look)

    seen = {colour_of(finding) for finding in findings} | {"seen"}
    for colour, words in KEY.items():
        if colour in seen:
            dot = f'<circle class="{colour}" cx="22" cy="{{y}}" r="4"/>'
            svg.key(f'<path class="{colour}" d="M8 {{y}}h28"/>{dot}', words)
    band = '<rect class="band" x="8" y="{top}" width="28" height="16"/>'
    svg.key(band, f"less than {margin:g} point{'s' * (margin != 1)}")
    if gains:
        diamond = f'<path class="paper" d="M22 {{y}}{DIAMOND}"/>'
        svg.key(diamond, "the paper's gain, on its own dataset (Recall@1)")
    for group, members in by_method(findings).items():
        svg.y += 8
        if group:
            svg.line(group[:1].upper() + group[1:], "group")
        for one in members:
            difference = signed(one.tested.points()) if one.tested else Word.DIVERGED
            svg.line(name_of_claim(study, one.comparison), "", difference)
            strip(one.tested, colour_of(one), 4.5, 11, gains.get(one.comparison.name))
        if group in pools:
            svg.line("pooled, exploratory", "soft", signed(pools[group].points()))
            strip(pools[group], "pool", 3, 7)
    axis.ticks(f"percentage points of {metric_name(study.primary)}; right of 0: {right}")
    return svg.file("Paired differences with 95 % intervals")


def colour_of(finding: Finding) -> str:
    """The class of its colour, one of `KEY`."""
    words = {*finding.words}
    if words & {Word.HELPS, Word.WORTH, Word.AS_GOOD}:
        return "gain"
    return "harm" if words & {Word.HARMS, Word.WORSE} else "seen"


def signed(text: str) -> str:
    """The text with signs as wide as each other, and no sign at 0."""
    return "0" if text == "+0" else text.replace("-", "\N{MINUS SIGN}")


def curves(
    study: StudyFile, findings: Sequence[Finding], results: Results, panels: Mapping[str, str]
) -> bytes:
    """The panels of the first compared rows, as many as there are colours; empty if no row kept such curves."""
    kept = {
        row: [run["curves"] for run in results.get(row, {}).values() if run.get("curves")]
        for of in findings
        for row in reversed(of.comparison.rows())  # a base loss before its methods
    }
    rows = [row for row in kept if kept[row]][: len(COLOURS)]
    labels = {row: read_entry(study.rows[row].recipe).label for row in rows}
    every = [*labels.values()]
    labels = {row: f"{of}, {row}" if every.count(of) > 1 else of for row, of in labels.items()}
    return curves_svg({labels[row]: kept[row] for row in rows}, panels, singles=False).encode()
