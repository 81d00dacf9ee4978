"""Open-set identification in words: when a search says "known", "not sure" or "unknown", and how often rightly.

`benchmarks.evaluation.identification` measures it, and says why a rate, times the factor by which a gallery is
larger, is a limit there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from benchmarks.reporting.paired import Estimate, percent
from benchmarks.reporting.rows import Group, tested
from benchmarks.reporting.table import Table
from benchmarks.reporting.verification import share

USUAL = 0.01  # false positives, if that many or fewer can be had
SURE = 0.25  # half-width of an interval, at most, of a number that is worth telling
USEFUL = 0.1  # known images named rightly, at least, for a threshold that is of use
REPORTED = (0.1, 0.01, 0.001)
MEASURED = ("false_positives_half_width", "true_positives", "threshold")


@dataclass(frozen=True)
class Judge:
    """Judges a query by the similarity of its nearest image, in a gallery of a given size.

    In a gallery that is larger than the tested one, the rates are limits. Half-widths are of 95 % intervals; None:
    too few classes for one.
    """

    known: float  # similarity from which a query is known
    unknown: float  # similarity below which it is unknown; at most `known`
    false_positives: float  # share of unknown queries that are called known
    half_width: float | None
    true_positives: float  # share of known queries that are named rightly
    true_half_width: float | None
    misnamed: float  # share of known queries that are named wrongly
    missed: float  # share of known queries that are called unknown, at most
    rejected: float  # share of unknown queries that are called unknown
    times: float  # how much larger the gallery is; 1 if it is not
    own_images: int | None  # of a class in the gallery; None: as in the test
    found: Mapping[str, Any]  # what was measured

    def word(self, similarity: float) -> str:
        """ "known", "not sure" or "unknown"."""
        if similarity >= self.known:
            return "known"
        return "unknown" if similarity < self.unknown else "not sure"

    def told(self) -> str:
        """The rates in words; that they say nothing, where their intervals are too wide."""
        found = self.found
        most, least = ("at most ", "at least ") if self.times > 1 else ("", "")
        queries, classes = found["unknown_queries"], found["unknown_classes"]
        right = _interval(self.true_positives, self.true_half_width, 100)
        if max(self.half_width or 0.0, self.true_half_width or 0.0) > SURE:
            wrong = _interval(self.false_positives, self.half_width, 100)
            return (
                f"The test of {queries:,} images of {classes:,} classes is too small to tell: of 100 unknown "
                f"images, {wrong or 'some'} would be called known, and of 100 known ones, {right or 'some'} named "
                "rightly. Take more photographs, of more classes."
            )
        base = next((n for n in (100, 1000) if n * self.false_positives > 1 - 1e-9), 10_000)
        called = ceil(base * self.false_positives - 1e-9)
        wrong = _interval(self.false_positives, self.half_width, base)
        told = (
            f"Of {base:,} unknown images, {most}{called} {'is' if called == 1 else 'are'} called known"
            f"{_sure(wrong)}, and {least}{int(base * self.rejected):,} unknown. Of 100 known ones, "
            f"{least}{int(100 * self.true_positives)} are named rightly{_sure(right)}, "
            f"{most}{ceil(100 * self.misnamed - 1e-9)} wrongly, and at most {ceil(100 * self.missed - 1e-9)} are "
            f"called unknown. Measured on {queries:,} images of {classes:,} classes, each compared with "
            f"{found['compared']:,} of other classes; "
        )
        counts = found["known_queries"], found["known_classes"]
        known = "known ones have"
        if counts != (queries, classes):
            known = f"the {counts[0]:,} known ones, of {counts[1]:,} classes, have"
        own, here = found["own_images"], self.own_images
        told += f"{known} about {own:,} image{'s' * (own != 1)} of their class to find."
        if self.times > 1:
            told += f" The searched folder has {_many(self.times)} times as many, so that the numbers are limits."
        if here is not None and here < own:
            told += (
                f" It has about {here:,} image{'s' * (here != 1)} of a class, so that fewer known images are "
                "named, and more are called unknown."
            )
        return told


def _interval(share: float, half_width: float | None, base: int) -> str:
    """The limits of a share, of `base` images; empty without any."""
    if half_width is None:
        return ""
    low, high = max(0.0, share - half_width), min(1.0, share + half_width)
    return f"{int(base * low + 1e-9):,} to {ceil(base * high - 1e-9):,}"


def _sure(interval: str) -> str:
    return interval and f" ({interval} with a confidence of 95 %)"


def _many(times: float) -> str:
    return f"{times:.2g}" if times < 10 else f"{times:,.0f}"


def _of_100(share: float) -> str:
    count = round(100 * share)
    return f"{count} of 100" if count or not share else "fewer than 1 of 100"


def judge(
    found: Mapping[str, Any],
    images: int = 0,
    rate: float | None = None,
    own_images: int | None = None,
) -> Judge:
    """The judge for a gallery of so many images.

    Args:
        found: The entry "identification" of a record.
        rate: Share of unknown queries that may be called known; default: `USUAL`, or the least above it with a
            threshold that is of use.
        own_images: Images of a class there, if they are known.

    Raises:
        ValueError: if no threshold is of use, or none is for that rate.
    """
    times, unknown = max(1.0, images / max(found["compared"], 1)), found["unknown"]
    rows = [row for row in found["rates"] if row["threshold"] is not None]
    judges = list[Judge]()
    for row in sorted(rows, key=lambda row: -row["false_positives"]):
        share, width = row["false_positives"], row["false_positives_half_width"]
        known, below = row["threshold"], unknown["threshold"]
        if below is None:  # too few known images to tell
            below, rejected = -inf, 0.0
        elif below < known:
            rejected = unknown["rejected"]
        else:
            below, rejected = known, 1 - share
        judge = Judge(
            known=known,
            unknown=below,
            false_positives=min(1.0, times * share),
            half_width=width and times * width,
            true_positives=max(0.0, row["true_positives"] - (times - 1) * share),
            true_half_width=row["true_positives_half_width"],
            misnamed=min(1.0, row["misnamed"] + (times - 1) * share),
            missed=unknown["missed"] if below > -inf else 0.0,
            rejected=max(0.0, 1 - times * (1 - rejected)),
            times=times,
            own_images=own_images,
            found=found,
        )
        judges.append(judge)
    useful = [j for j in judges if j.true_positives >= max(USEFUL, j.false_positives)]
    if not useful:
        raise ValueError(_of_no_use(found, judges, times))
    asked = USUAL if rate is None else rate
    best = next((j for j in useful if j.false_positives <= asked * (1 + 1e-9)), None)
    if best is None and rate is not None:
        shares = ", ".join(f"{judge.false_positives:.3g}" for judge in useful)
        raise ValueError(f"expected one of the rates that are of use here, {shares}, got {rate:g}")
    return best or useful[-1]


def _of_no_use(found: Mapping[str, Any], judges: Sequence[Judge], times: float) -> str:
    queries, needed = found["unknown_queries"], [row.get("needs", 0) for row in found["rates"]]
    if min(needed) > queries:
        return (
            f"the test has {queries:,} images, and a threshold needs {min(needed):,}; test on more"
        )
    if not judges:
        return "no threshold is of use, because images of other classes are as near as copies"
    if times > 1:
        return (
            f"no threshold is of use, because the folder is {_many(times)} times as large as the tested gallery of "
            f"{found['compared']:,} images; test on more"
        )
    best = max(judges, key=lambda judge: judge.true_positives - judge.false_positives)
    return (
        f"no threshold is of use, because where {_of_100(best.false_positives)} unknown images are called known, "
        f"{_of_100(best.true_positives)} known ones are named rightly; try another network"
    )


def known_or_unknown(info: Mapping[str, Any]) -> list[str]:
    """How well a record's run tells known from unknown images, in a sentence; none if it was not tested."""
    if (found := info.get("identification")) is None:
        return []
    try:
        told = judge(found).told()
    except ValueError as error:
        return [f"Known or unknown? {f'{error}'[0].upper()}{f'{error}'[1:]}."]
    return [f"Known or unknown? {told}"]


def identified(groups: Mapping[str, Group]) -> list[str | Table]:
    """A single run's thresholds, or a row per method with means over seeds; nothing if it was not measured."""
    runs = [run for group in groups.values() for run in group.runs]
    found = tested(groups, "identification")
    if not found:
        why = _not_measured(runs[0].info)
        return [f"Known or unknown? Not measured: {why}."] if why else []
    if len(runs) == 1:
        return [*known_or_unknown(runs[0].info), *_thresholds(runs[0].info["identification"])]
    rows = []
    for label, entries in found.items():
        shares = [[_row(entry, rate)["true_positives"] for entry in entries] for rate in REPORTED]
        rows.append([label, *map(percent, shares)])
    names = [f"known ones named rightly at {share(rate)} FPIR (%)" for rate in REPORTED]
    told = (
        "Is an image of a known class, and of which? Told by its nearest image, if so many unknown ones may be "
        "called known (FPIR):"
    )
    return [told, Table(["method", *names], rows)]


def _not_measured(info: Mapping[str, Any]) -> str | None:
    """Why a run that was asked for thresholds has none; None if it was not."""
    data, tests = info["data"], info["config"].get("evaluation", {})
    if not (info.get("verification") or tests.get("verification")):
        return None
    if known := data.get("known_classes"):
        return f"{known} of the tested classes were trained on"
    return {
        "all": "the tested classes were trained on",
        "validation": "settings are chosen on the tested classes",
    }.get(data["split"])


def _row(found: Mapping[str, Any], rate: float) -> Mapping[str, Any]:
    return next(row for row in found["rates"] if row["false_positives"] == rate)


def _thresholds(found: Mapping[str, Any]) -> list[str | Table]:
    rows, notes = [], list[str]()
    for row in (_row(found, rate) for rate in REPORTED):
        half_width, right, threshold = (row[name] for name in MEASURED)
        rate = share(row["false_positives"])
        rate += "" if half_width is None else f" ± {100 * half_width:.2f}"
        known = "–" if threshold is None else f"{threshold:.3f}"
        named = Estimate(right or 0.0, row["true_positives_half_width"]).percent()
        rows.append([rate, known, "–" if right is None else named])
        if "needs" in row:
            notes.append(
                f"For {rate}, the test has {found['unknown_queries']:,} images, and needs {row['needs']:,}."
            )
    header = [
        "unknown ones called known (FPIR)",
        "similarity from",
        "known ones named rightly (TPIR, %)",
    ]
    told = (
        f"A search compares an image with all of a folder. Here with {found['gallery_images']:,} images of "
        f"{found['gallery_classes']:,} classes, {found['own_images']:,} of its own class if it is known:"
    )
    return [told, Table(header, rows), *notes]
