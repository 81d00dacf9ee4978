"""The untrained network of a study, which its trainings must beat: by how much, and how sure that is."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from benchmarks.reporting.names import metric_name
from benchmarks.reporting.verdicts import MAIN, Finding, Results, judge, percent
from benchmarks.settings.study_files import CONTROL, Comparison, StudyFile


def untrained_row(study: StudyFile, results: Results) -> str | None:
    """The best row that trains nothing; None without results of one, or if rows have different test classes."""
    rows = [] if study.has_blocks() else [row for row in study.untrained() if results.get(row)]
    return max(rows, key=lambda row: percent(results[row], study.primary), default=None)


def beyond_untrained(
    study: StudyFile, findings: Sequence[Finding], results: Results
) -> list[Finding]:
    """Each trained row of the main comparisons beside the best untrained one.

    As for controls, no p is corrected: one of them decides, beside the better of the untrained rows, and with three
    seeds hardly a gain would be left to see.
    """
    if (than := untrained_row(study, results)) is None:
        return []
    main = [comparison.rows() for comparison in study.comparisons if comparison.family == MAIN]
    rows = dict.fromkeys(row for row in chain(*main) if row not in study.untrained())
    claim = "training beats the untrained network"
    comparisons = [Comparison(row, claim, row, than, family=CONTROL) for row in rows]
    registered = {
        row: all(f.registered for f in findings if row in f.comparison.rows()) for row in rows
    }
    return judge(replace(study, comparisons=comparisons), results, registered=registered)


def only_untrained(study: StudyFile, results: Results) -> str:
    """A sentence on the rows that train nothing, before any training is compared."""
    shown = "; ".join(
        f"`{row}`: {percent(results[row], study.primary):.1f} %"
        for row in study.untrained()
        if results.get(row)
    )
    metric = metric_name(study.primary)
    return f"Before any training, by {metric} on the test classes: {shown}. Trainings have to beat that."


def beside_untrained(finding: Finding) -> str:
    """A sentence on what a training gains or loses beside the best row that trains nothing."""
    better, than = (f"`{row}`" for row in finding.comparison.rows())
    if finding.tested is None:
        return f"{better} diverged; {than} did not."
    gain, limits = finding.tested.mean, ""
    if finding.tested.has_interval:
        low, high = finding.tested.limits()
        limits = f" (between {low:+.1f} and {high:+.1f}, with a confidence of 95 %)"
    pays = "training pays" if finding.is_gain else "training is not shown to pay"
    return f"Beside {than}, {better} has {gain:+.1f} points{limits}: {pays}."
