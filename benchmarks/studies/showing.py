"""What only a study of one's own images shows: its network and machine, its classes, and pictures of neighbours."""

from collections.abc import Mapping
from functools import partial
from math import isfinite
from typing import Any

from accelerate import Accelerator

from benchmarks.building.images import build_datasets, show_to
from benchmarks.evaluation.closed_form import read_features
from benchmarks.evaluation.learning_curve import learning_curve
from benchmarks.evaluation.networks import load_network
from benchmarks.evaluation.tester import Evaluator
from benchmarks.records.files import damage_named, read_json, write_json
from benchmarks.records.results import load_run
from benchmarks.records.run_folder import NEIGHBOURS
from benchmarks.reporting.identification import known_or_unknown
from benchmarks.reporting.names import metric_name
from benchmarks.reporting.neighbours import differing_neighbours
from benchmarks.reporting.study_answer import duration
from benchmarks.reporting.study_choice import Choice, untrained_row
from benchmarks.reporting.study_page import Own
from benchmarks.reporting.study_sections import (
    Curve,
    Section,
    by_class,
    confused,
    more_photographs,
    sentence,
    stored_by_class,
)
from benchmarks.reporting.table import Table
from benchmarks.settings.data import num_workers
from benchmarks.studies.choosing import left_out, score_of
from benchmarks.studies.jobs import Job
from benchmarks.studies.study import Found, Study
from benchmarks.training.cached_views import CachedViews


def own_parts(study: Study, found: Found, choice: Choice, steps: Mapping[str, str]) -> Own:
    """The parts of the page of one's own images, most of them of the recommended row.

    Without the runs and the images, some are empty.

    Args:
        found: The results of the tests.
        steps: Commands to go on with, by what they do.
    """
    tests, labels = study.tests(choice.row), study.labels()
    job, label, sections = tests[0], labels[choice.row], _tested(study, labels)
    record, curve = job.own_record() or {}, Curve()
    if (untrained := untrained_row(study.file, found)) is not None:
        curve = fewer_photographs(study, study.tests(untrained)[0])
        sections += more_photographs(curve, labels[untrained])
    about = setup(study, record, curve)
    own = Own(labels, about, steps, known_or_unknown(record), sections)
    results = {job.seed: result for job in tests if (result := study.results.of(job))}
    beside = choice.finding.comparison.rows() if choice.finding else []
    rows = dict.fromkeys([choice.row, *beside])
    firsts = [study.tests(row)[0] for row in rows]
    folders = {labels[row]: job.folder for row, job in zip(rows, firsts, strict=True)}
    pictured = all(job.own_record() and (job.folder / NEIGHBOURS).is_file() for job in firsts)
    if not (pictured or stored_by_class(results)) or not job.has_images():
        return own
    images = build_datasets(job.experiment.data, seed=job.seed).test
    sections += by_class(results, images.class_names, label)
    if not pictured:
        return own
    runs = {label: load_run(folder) for label, folder in folders.items()}
    sections += confused(runs[label], images, label)
    return own._replace(neighbours=differing_neighbours(runs, images) if len(runs) > 1 else "")


def setup(study: Study, record: Mapping[str, Any], curve: Curve) -> list[str]:
    """What else could be tried, and what measured a run's network: trunk, pixels, frozen stages, time, hardware."""
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
        frozen = "its first stage stays frozen"
        if stages > 1:
            options.append(f"fewer frozen stages (`--model.frozen_stages={stages - 1}`)")
            frozen = f"its first {stages} stages stay frozen"
    kept = {job: result for job in study.known() if (result := study.results.of(job))}
    trained = sum(job.experiment.optimization.steps > 0 for job in kept)
    time = duration(sum(result["wall_time_s"] for result in kept.values()))
    machine = f"{hardware['cores']} cores of {hardware['processor']}"
    if gpus := hardware["gpus"]:
        machine = f"{len(gpus)} x {gpus[0]}"
    work = f"{trained} training{'s' * (trained > 1)} and their tests" if trained else "The tests"
    spent = f"{work} computed for {time} in all, starts not counted, on {machine}."
    return [
        f"{told}Not tried here: {', '.join(options)}; append them behind `--`, and give another `--runs`.",
        f"Network: {model['trunk']}{pixels and f', images of {pixels} x {pixels} pixels'}, {frozen}. {spent}",
    ]


def fewer_photographs(study: Study, job: Job) -> Curve:
    """The learning curve of the untrained network of a test, measured once.

    It is empty without its run and its images, or where cameras or galleries decide what is ranked.
    """
    path = study.runs / "learning_curve.json"
    with damage_named(path, "delete it, and it is measured again"):
        kept = read_json(path) if path.exists() else {}
    if kept.get("run") == study.results.name(job):
        return [(number, right) for number, right in kept["curve"]]
    data, model = job.experiment.data, job.experiment.model
    measured = job.own_record() is not None and job.has_images()
    kind = model.replacement or model.head
    if kind == "random" or not measured:
        return []
    accelerator, network = Accelerator(), load_network(job.folder).network
    images = show_to(network.trunk, build_datasets(data, seed=job.seed), data)
    if images.test.ranking is not None:
        return []
    network.to(accelerator.device)
    batch, workers = job.experiment.evaluation.batch_size, num_workers(data, 1)
    parts: list[Any] = [images.train, images.test]
    if data.cached_views is not None:  # the outputs that the run has kept
        keep = partial(CachedViews, accelerator, network, experiment=job.experiment, test=True)
        parts, workers = [keep(part).open() for part in parts], 0
    evaluator = Evaluator(accelerator, network, batch, workers)
    read = [read_features(evaluator, part) for part in parts]
    train, test = ((part["features"], part["labels"]) for part in read)
    curve = learning_curve(train, test, kind, model.embedding_size)
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
        [labels[better], f"{score(than)} → {score(better)}", "yes" if pair in tested else "no"]
        for pair in main
        for better, than in [pair.rows()]
    ]
    metric = metric_name(study.file.choice.metric)
    tuned = sum(not left_out(study.file, pair.rows()[0], study.tried) for pair in main)
    limit, behind = study.file.choice.behind, ""
    if limit is not None:
        behind = f" Methods on a loss that is more than {limit:g} points behind the best loss were not tried."
    text = (
        f"{tuned} of {len(main)} methods were tuned on validation classes, a part of the classes to train on. The "
        f"table has the {metric} there, of the loss alone and with the method. The method of the best network was "
        f"then tested on other classes, in {study.file.seeds.count} repeated trainings. These had no part in the "
        "choice, so that the chance to find a gain or a harm that is none is at most 5 %."
        f"{behind} Methods that were not tested may help, too."
    )
    return [
        Section(
            "Which methods were tested", text, Table(["method", f"{metric} (%)", "tested"], rows)
        )
    ]
