"""What only a study of one's own images shows: its network and machine, its classes, and pictures of neighbours."""

from math import ceil
from typing import Any

from benchmarks.building.images import build_datasets
from benchmarks.datasets.images import ImageSet
from benchmarks.datasets.transforms import ImageViews
from benchmarks.records.results import load_run
from benchmarks.reporting.figures import THUMBNAIL, differing_neighbours
from benchmarks.reporting.identification import known_or_unknown
from benchmarks.reporting.study_choice import Choice
from benchmarks.reporting.study_classes import by_class, confused, stored_by_class
from benchmarks.studies.study import Study


def shown(study: Study, choice: Choice) -> dict[str, Any]:
    """Parts of the pages, all of the recommended row: "known", "sections" and the HTML of "neighbours".

    The last two need the runs and the images; without them, they are empty.
    """
    tests, labels = study.tests(choice.row), study.labels()
    job, label = tests[0], labels[choice.row]
    about: dict[str, Any] = {
        "known": known_or_unknown(job.record() or {}),
        "sections": [],
        "neighbours": "",
    }
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
    if isinstance(images, ImageSet):
        side = THUMBNAIL
        images.views = ImageViews(
            image_size=side, resize=side, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
        )
    about["sections"] += by_class(results, images.class_names, label)
    if not pictured:
        return about
    runs = {label: load_run(folder) for label, folder in folders.items()}
    about["sections"] += confused(runs[label], images, label)
    if len(runs) > 1:
        about["neighbours"] = differing_neighbours(runs, images)
    return about


def setup(study: Study, row: str) -> list[str]:
    """What else could be tried, and what measured a row's network: trunk, pixels, frozen stages, time, hardware."""
    record = study.tests(row)[0].record() or {}
    if "gpus" not in record.get("hardware", {}):
        return []
    config, hardware = record["config"], record["hardware"]
    model, pixels = config["model"], record["data"].get("image_size", "")
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
        f"Not tried here: {', '.join(options)}; append them behind `--`, and give another folder as `--runs`.",
        f"Network: {model['trunk']}{pixels and f', images of {pixels} x {pixels} pixels'}, {frozen}. {spent}",
    ]
