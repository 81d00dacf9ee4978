"""What only a study of one's own images shows: its network and machine, its classes, and pictures of neighbours."""

from collections.abc import Mapping
from math import ceil, isfinite
from typing import Any

from accelerate import Accelerator

from benchmarks.building.images import build_datasets, show_to
from benchmarks.evaluation.closed_form import read_features
from benchmarks.evaluation.learning_curve import learning_curve
from benchmarks.evaluation.networks import load_network
from benchmarks.evaluation.tester import Evaluator
from benchmarks.records.files import damage_named, read_json, write_json
from benchmarks.records.results import load_run
from benchmarks.reporting.identification import known_or_unknown
from benchmarks.reporting.learning_curve import Curve, more_photographs, sentence
from benchmarks.reporting.names import metric_name
from benchmarks.reporting.neighbours import differing_neighbours
from benchmarks.reporting.study_choice import Choice
from benchmarks.reporting.study_classes import Section, by_class, confused, stored_by_class
from benchmarks.reporting.table import Table
from benchmarks.reporting.untrained_rows import untrained_row
from benchmarks.settings.data import num_workers
from benchmarks.studies.choosing import left_out, score_of
from benchmarks.studies.study import Study


def shown(study: Study, choice: Choice, curve: Curve) -> dict[str, Any]:
    """Parts of the pages, all of the recommended row: "known", "sections" and the HTML of "neighbours".

    The last two need the runs and the images; without them, they are empty.

    Args:
        curve: From `fewer_photographs`.
    """
    tests, labels = study.tests(choice.row), study.labels()
    job, label = tests[0], labels[choice.row]
    about: dict[str, Any] = {
        "known": known_or_unknown(job.record() or {}),
        "sections": [*_tested(study, labels)],
        "neighbours": "",
    }
    if curve and (untrained := untrained_row(study.file, study.found())) is not None:
        about["sections"] += more_photographs(curve, labels[untrained])
    results = {job.seed: result for job in tests if (result := study.results.of(job))}
    rows = [choice.row]
    if choice.finding is not None:
        rows += [row for row in choice.finding.comparison.rows() if row != choice.row]
    folders = {labels[row]: study.tests(row)[0].folder for row in rows}
    pictured = all((folder / "neighbours.npz").is_file() for folder in folders.values())
    data = job.experiment.data
    if not (pictured or stored_by_class(results)) or not (
        data.dataset == "glyphs" or data.root.is_dir()
    ):
        return about
    images = build_datasets(data, seed=job.seed).test
    about["sections"] += by_class(results, images.class_names, label)
    if not pictured:
        return about
    runs = {label: load_run(folder) for label, folder in folders.items()}
    about["sections"] += confused(runs[label], images, label)
    if len(runs) > 1:
        about["neighbours"] = differing_neighbours(runs, images)
    return about


def setup(study: Study, row: str, curve: Curve) -> list[str]:
    """What else could be tried, and what measured a row's network: trunk, pixels, frozen stages, time, hardware."""
    record = study.tests(row)[0].record() or {}
    if "gpus" not in record.get("hardware", {}):
        return []
    config, hardware = record["config"], record["hardware"]
    model, pixels = config["model"], record["data"].get("image_size", "")
    told = f"{sentence(curve)} " if len(curve) > 1 else ""
    options = ["another trunk (`--model.trunk=NAME`)"]
    if config["data"]["dataset"] != "glyphs":
        options.append("larger images (`--data.image_size=PIXELS` and `--data.resize=PIXELS`)")
    frozen = "all of it trains"
    if stages := model["frozen_stages"]:
        options.append(f"fewer frozen stages (`--model.frozen_stages={max(1, stages - 1)}`)")
        frozen = f"its first {stages} stages stay frozen"
    kept = [result for job in study.known() if (result := study.results.of(job))]
    hours = sum(result["wall_time_s"] for result in kept) / 3600
    time = f"{hours:.1f} hours" if hours > 1 else f"{ceil(60 * hours)} min"
    gpus = hardware["gpus"]
    machine = (
        f"{len(gpus)} x {gpus[0]}"
        if gpus
        else f"{hardware['cores']} cores of {hardware['processor']}"
    )
    spent = f"The study took {len(kept)} trainings, {time}, on {machine}."
    return [
        f"{told}Not tried here: {', '.join(options)}; append them behind `--`, and give another `--runs`.",
        f"Network: {model['trunk']}{pixels and f', images of {pixels} x {pixels} pixels'}, {frozen}. {spent}",
    ]


def fewer_photographs(study: Study) -> Curve:
    """The learning curve of the untrained network, measured once.

    It is empty without such a row, its run and its images, or where cameras or galleries decide what is ranked.
    """
    if (row := untrained_row(study.file, study.found())) is None:
        return []
    job, path = study.tests(row)[0], study.runs / "learning_curve.json"
    with damage_named(path, "delete it, and it is measured again"):
        kept = read_json(path) if path.exists() else {}
    if kept.get("run") == study.results.name(job):
        return [(number, right) for number, right in kept["curve"]]
    data, model = job.experiment.data, job.experiment.model
    if model.head not in ("pca", "whitened") or not (job.folder / "run.json").exists():
        return []
    if data.dataset != "glyphs" and not data.root.is_dir():
        return []
    accelerator, network = Accelerator(), load_network(job.folder).network
    images = show_to(network.trunk, build_datasets(data, seed=job.seed), data)
    if images.test.ranking is not None:
        return []
    batch, workers = job.experiment.evaluation.batch_size, num_workers(data, 1)
    evaluator = Evaluator(accelerator, network.to(accelerator.device), batch, workers)
    read = [read_features(evaluator, part) for part in (images.train, images.test)]
    train, test = ((part["features"], part["labels"]) for part in read)
    whiten = model.head == "whitened"
    curve = learning_curve(train, test, model.embedding_size, whiten=whiten)
    write_json(path, {"run": study.results.name(job), "curve": curve})
    return curve


def _tested(study: Study, labels: Mapping[str, str]) -> list[Section]:
    """Which comparisons validation classes chose for the test, by which rule; nothing if all are tested."""
    main = [pair for pair in study.file.comparisons if pair.family == "main"]
    tested = [pair for pair in study.final.comparisons if pair.family == "main"]
    if len(tested) == len(main):
        return []

    def score(row: str) -> str:
        value = score_of(study.file, row, study.tried)
        if left_out(study.file, row, study.tried):
            return "not tried"
        return "diverged" if value is None or not isfinite(value) else f"{100 * value:.1f}"

    rows = [
        [
            labels[method],
            score(method),
            labels[base],
            score(base),
            "yes" if pair in tested else "no",
        ]
        for pair in main
        for method, base in [pair.rows()]
    ]
    metric = f"{metric_name(study.file.choice.metric)} (%)"
    header = ["method", metric, "beside", f"its {metric}", "tested"]
    limit, behind = study.file.choice.behind, ""
    if limit is not None:
        behind = f" Methods on a loss that is more than {limit:g} points behind the best one were not tried."
    text = (
        f"{len(main)} comparisons were tuned on validation classes, which are part of the classes to train on. The "
        f"one with the best network there was tested, with {study.file.seeds.count} seeds. The test classes had no "
        "part in this choice, so that no other comparison has to be corrected for: the chance of a gain or a harm "
        f"that is none is at most 5 %.{behind} Methods that were not tested may help, too."
    )
    return [Section("Which methods were tested", text, Table(header, rows))]
