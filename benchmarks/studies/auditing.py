"""Checks before a study's first run, and after its last one: was the plan written down before the tests?"""

from benchmarks.building.images import build_datasets, count_classes
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.reporting.study_answer import every_run
from benchmarks.reporting.verdicts import Finding, judge
from benchmarks.settings.errors import ConfigError
from benchmarks.studies.jobs import Job
from benchmarks.studies.study import Found, Study

ASKED_BY = {
    **{"descriptor": "descriptor", "parts": "parts", "order": "orders", "curve": "every"},
    **dict.fromkeys(
        ["features", "features_centred", "features_pca", "features_whitened"], "features"
    ),
}
"""The setting of `evaluation` that asks for an output; "order" stands for order_2, order_3, ..."""

UNTRAINED = ("features", "pca", "whitened")  # of the untrained trunk, in every test


def check(study: Study) -> None:
    """Refuse, with a ConfigError, metrics and outputs that no run will measure."""
    file = study.file
    choosing = [row for row in study.rows if file.rows[row].choose]
    wanted = [(row, file.choice.metric, "choice.metric") for row in choosing]
    for of in file.comparisons:
        metrics = [file.metric(of), *([file.agrees] if file.agrees and not of.metric else [])]
        wanted += [(s, m, f"comparisons.{of.name}") for s in of.sides() for m in metrics]
    for side, metric, at in wanted:
        row, _, output = side.partition(":")
        evaluation = study.first_job(row).config["evaluation"]
        known = {f"recall_at_{K}" for K in evaluation["recall_at"]}
        known |= {"mean_average_precision_at_r", "r_precision", "variance_correlation"}
        known |= {"NMI", "AMI", "F1"} if evaluation["clustering"] else set()
        if output == "curve":
            known = {"seen_recall_at_1", "unseen_recall_at_1"}
        elif output == "parts":
            known |= {"ideal_joint_error", "h_divergence"}
        option = ASKED_BY.get("order" if output.startswith("order_") else output)
        if output.startswith("untrained_") and output.partition("_")[2] in UNTRAINED:
            continue
        if output and (option is None or not evaluation[option]):
            asked = "expected one of " + ", ".join(sorted(ASKED_BY))
            if option is not None:
                asked = f"measures: --evaluation.{option} of the row asks for it"
            raise ConfigError(f"{at}: {row} has no output {output!r}; {asked}")
        if metric not in known:
            expected = ", ".join(sorted(known))
            raise ConfigError(
                f"{at}: {row} does not measure {metric!r}; expected one of {expected}"
            )


def fitted(study: Study) -> dict[str, str]:
    """Settings with which the training with the fewest classes and images works, by what is few; {} if all do.

    A batch fits its classes, and a head of principal components its images, whose number less one has variance.

    Raises:
        ConfigError: if the folder has too few classes to choose settings on.
    """
    data = study.first_job(study.rows[0]).experiment.data
    if data.dataset not in ("folder", "table") or not data.root.is_dir():
        return {}
    choosing = [row for row in study.rows if study.file.rows[row].choose]
    # The first row of each test set, of those that choose if there are any.
    blocks = {study.file.tested_on(row): row for row in reversed([*choosing, *study.rows])}
    trained: list[Glyphs | ImageSet] = []
    for row in blocks.values():
        classes, every, needed = count_classes(study.first_job(row).experiment.data)
        if row not in choosing or classes >= 2 * data.folds:
            trained.append(_trained(study.first_job(row)))
            classes = trained[-1].num_classes
        if row in choosing and classes < 2 * data.folds:
            raise ConfigError(
                f"data.root: {data.root}: you have {every} classes, and this study needs {needed}: "
                f"{2 * data.folds} to train on, two in each of data.folds, of which there are {classes}; add "
                "classes, or name fewer for the test with -- --data.test_classes"
            )
        draws = range(study.file.choice.draws * (row in choosing))
        trained += [_trained(study.first_job(row, draw)) for draw in draws]
    classes, images = min(of.num_classes for of in trained), min(map(len, trained))
    models = [study.first_job(row).experiment.model for row in study.rows]
    widths = [model.embedding_size for model in models if model.has_components]
    fits = classes * (data.samples_per_class or data.batch_size)
    found = {
        "classes": ("data.batch_size", data.batch_size, fits),
        "images": ("model.embedding_size", max(widths, default=0), images - 1),
    }
    return {
        few: f"--{setting}={most}"
        for few, (setting, size, most) in found.items()
        if size > most and not any(given.startswith(f"--{setting}") for given in study.settings)
    }


def _trained(job: Job) -> Glyphs | ImageSet:
    return build_datasets(job.experiment.data).train


def judged(study: Study) -> tuple[Found, list[Finding]]:
    """The results of the tests, and what they say of the comparisons."""
    found = study.found()
    return found, judge(study.final, found, registered=registered(study, found))


def registered(study: Study, found: Found) -> dict[str, bool]:
    """For each comparison: were all its tests made under the registered plan, with its present claim?"""
    counted = {
        row: all(study.results.counts(result, study.digest) for result in results.values())
        for row, results in found.items()
    }
    edited = _edited(study, found)
    return {
        of.name: all(counted[row] for row in of.all_rows()) and not {"", of.name} & edited.keys()
        for of in study.file.comparisons
    }


def _edited(study: Study, found: Found) -> dict[str, str]:
    """The registered claims, and with the key "" the question, that are others now, by the comparison's name."""
    names = ["", *(of.name for of in study.file.comparisons)]
    rows = [{*found}, *({*of.all_rows()} for of in study.file.comparisons)]
    edited: dict[str, str] = {}
    for row, results in found.items():
        for before in map(study.results.words, results.values()):
            words = zip(names, rows, before or [], study.file.words(), strict=False)
            edited |= {name: old for name, of, old, now in words if row in of and old != now}
    return edited


def registration(study: Study, found: Found) -> str:
    """The paragraph that says whether the plan was written down before the tests."""
    results = every_run(found)
    plan, count = study.results.plan(study.digest), len(results)
    kept = sum(study.results.counts(result, study.digest) for result in results)
    if plan is None:
        return "This plan was not registered before its tests: read all words as exploratory."
    at = f"`{plan['commit'][:7]}`" if plan["commit"] else "code outside a repository"
    at += ", with changes that were not committed," if plan["dirty"] else ""
    begun = f"The plan ({plan['plan'][:12]}) was registered at {at} on {plan['date'][:10]}"
    others = len({other["plan"] for other in study.results.plans} - {study.digest})
    more = f" This file has {others} other plan{'s' * (others > 1)}." if others else ""
    if due := study.due():
        more += f" **{due} tests of further seeds are due: no word on their rows is final.**"
    edited = [
        f"the claim of `{name}`, “{old}”" if name else f"the question, “{old}”"
        for name, old in _edited(study, found).items()
    ]
    if edited:
        more += f" **Edited since, and exploratory: {'; '.join(edited)}.**"
    if kept == count:
        return f"{begun}, before its first test; all {count} tests were made under it.{more}"
    return (
        f"{begun}. {count - kept} of {count} tests were not made under it: comparisons with one of them are "
        f"exploratory.{more}"
    )
