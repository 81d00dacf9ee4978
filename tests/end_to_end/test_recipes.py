"""Every number of the papers is a cell of a recipe, beside its settings, and every recipe trains.

`references/papers.json` holds the rows of all result tables of the four papers, each with what it says of its
training ("facts"), in percent.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from benchmarks.datasets import IMAGE_DATASETS
from benchmarks.settings.command import parse
from benchmarks.settings.experiment import ClassSpec, Experiment, WeightedLoss
from benchmarks.settings.recipe_files import Entry, read_table, table_names
from pml_regularizers.losses.high_order_moments import FIXED
from tests.end_to_end.steps import two_steps

PAPERS = ("ecaml", "horde", "jrd", "second_order_attention")
TABLES = {
    name: read_table(name)
    for name in table_names()
    if name.startswith(tuple(f"{p}/" for p in PAPERS))
}
ENTRIES = [entry for table in TABLES.values() for entry in table.entries]
TRAININGS = [entry for entry in ENTRIES if entry.training == entry.name]
QUICK = {
    *("ecaml/table4/npair_ec", "ecaml/table4/triplet_ec", "horde/table1/cub_binomial_horde"),
    *("jrd/table1/cub", "second_order_attention/table1/cub_margin_vem"),
}
"""One of each paper and more; `make test-all` takes them all."""

ROWS = json.loads((Path(__file__).parents[1] / "references" / "papers.json").read_text())
OWN = [row for row in ROWS if row["kind"] != "quoted"]
QUOTED = [row for row in ROWS if row["kind"] == "quoted"]

METHODS = {
    "contrastive": "CosineContrastiveLoss",
    "tri": "TripletMarginLoss",
    "binomial": "BinomialDevianceLoss",
    "n-pair": "DenseNPairsLoss",
    "abe": "EnsembleLoss",
    "margin": "MarginLoss",
    "horde": "HORDELoss",
    "ecaml": "EnergyConfusionRegularizer",
    "dropout": "Dropout",
    "proposed": "VarianceRegularizer",
    "jrd": "JRDLoss",
    "jmmd": "jmmd",
    "mrd": "['embeddings']",
    "jrd-c": "['pooled', 'embeddings']",
    "jrd-pooling": "['embeddings', 'classes']",
    "gaussian": "GaussianKernel",
    "laplace": "LaplaceKernel",
    "polynomial": "PolynomialKernel",
    "p = 2": "'degree': 2",
    "p = 5": "'degree': 5",
    "generating": "ExponentialKernel",
}
"""Words of a row's name, and what then stands in its settings."""


@dataclass(frozen=True)
class Cell:
    """One output of an entry, with what the paper reports of it."""

    entry: Entry
    output: str

    @cached_property
    def made_of(self) -> str:
        """Losses and model, as text."""
        return str([self.entry.settings["losses"], self.entry.settings["model"]])

    def is_of(self, row: dict[str, Any]) -> bool:
        """True if it holds a row's numbers, under its name, of a training as the row describes it."""
        settings = self.entry.settings
        return (
            (self.entry.name.rpartition("/")[0], self.output) == (row["table"], row["output"])
            and settings["data"]["dataset"] == row["dataset"]
            and self.entry.label.startswith(row["row"])
            and self.entry.cells[self.output] == row["percent"]
            and self.entry.half_widths.get(self.output) == row.get("half_widths")
            and facts(settings, self.output).items() >= row["facts"].items()
            and all(
                METHODS[word] in self.made_of
                for word in METHODS
                if re.search(rf"\b{re.escape(word)}", row["row"].lower())
            )
        )


def losses_of(settings: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Class, arguments and weight of each loss."""
    for term in settings["losses"]:
        name = term["loss"]["class_path"].rpartition(".")[2]
        yield name, term["loss"].get("init_args") or {}, term.get("weight", 1)


def facts(settings: dict[str, Any], output: str) -> dict[str, Any]:
    """Facts that a paper's row states about its training, read from the settings."""
    model = settings["model"]
    found = {"trunk": model["trunk"], "width": model["embedding_size"], "orders": 1, "weight": 0}
    for name, arguments, weight in losses_of(settings):
        if name == "HORDELoss":
            found["orders"] = arguments["order"]
            if arguments.get("projections") in FIXED and output.startswith("order_"):
                found["width"] = arguments["moment_dim"]
        elif name == "EnergyConfusionRegularizer":
            found["weight"] = weight
        elif name == "JRDLoss":
            found |= {"weight": arguments["similarity_weight"], "margin": arguments["margin"]}
    return found


CELLS = [Cell(entry, output) for entry in ENTRIES for output in entry.cells]


def test_the_papers_report_173_rows_of_their_own_and_quote_89() -> None:
    assert (len(OWN), len(QUOTED)) == (173, 89)
    assert len(CELLS) == 173
    assert len(TRAININGS) == 152 and {entry.name for entry in TRAININGS} > QUICK


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_one_cell_and_every_quoted_one_is_listed(name: str) -> None:
    rows = [row for row in OWN if row["table"] == name]
    cells = [cell for cell in CELLS if cell.entry.name.startswith(f"{name}/")]
    found = {
        json.dumps(row): [(cell.entry.name, cell.output) for cell in cells if cell.is_of(row)]
        for row in rows
    }
    assert {row: cell for row, cell in found.items() if len(cell) != 1} == {}
    assert len({cell for [cell] in found.values()}) == len(rows) == len(cells)
    about = ("row", "dataset", "backbone", "embedding_dim")
    assert TABLES[name].quoted == [
        {key: row[key] for key in about if key in row} | row["percent"]
        for row in QUOTED
        if row["table"] == name
    ]


def test_no_training_stands_there_twice() -> None:
    """Two rows of the same settings are one training, except for its measurements."""
    asides = ("label", "evaluation", "checkpoint_every")
    seen: dict[str, str] = {}
    for entry in TRAININGS:
        settings = {key: value for key, value in entry.settings.items() if key not in asides}
        name = seen.setdefault(json.dumps(settings, sort_keys=True), entry.name)
        assert name == entry.name


def test_a_training_measures_what_its_cells_need() -> None:
    for cell in CELLS:
        evaluation, output = cell.entry.settings["evaluation"], cell.output
        measured = ["embedding", *["descriptor"] * bool(evaluation.get("descriptor"))]
        measured += ["parts"] * (evaluation.get("parts") == 10)
        if evaluation.get("orders"):
            last = facts(cell.entry.settings, output)["orders"]
            measured += [f"order_{k}" for k in range(2, last + 1)]
        metrics = [f"recall_at_{k}" for k in evaluation["recall_at"]]
        if output == "embedding" and evaluation.get("clustering"):
            metrics += ["NMI", "F1"]
        if output == "parts" and evaluation.get("divergence"):
            metrics += ["ideal_joint_error", "h_divergence"]
        assert output in measured, cell.entry.name
        assert {*cell.entry.cells[output]} <= {*metrics}, cell.entry.name


# ------------------------------------------------------------------------------------------ built and trained

PARSED: dict[str, Experiment] = {}


def experiment_of(entry: Entry) -> Experiment:
    """Experiment as `--recipe` gives it, except for the weights of ImageNet.

    The parser does not look into losses: entries that differ in them alone share what it made of the others.
    """
    rest = {key: value for key, value in entry.settings.items() if key not in ("label", "losses")}
    key = json.dumps(rest, sort_keys=True)
    if key not in PARSED:
        PARSED[key] = parse([f"--recipe={entry.name}", "--model.trunk_args={}"]).experiment
    terms = [
        WeightedLoss(ClassSpec(term["loss"]), float(term.get("weight", 1)))
        for term in entry.settings["losses"]
    ]
    return replace(PARSED[key], losses=terms)


def shrunk(entry: Entry, root: Path) -> Experiment:
    """The same classes, small enough for two steps on a fake tree.

    Images have 40 pixels and batches 8 of them, embeddings and moments are 16 wide, and the trunk is a tiny one
    unless an ensemble cuts it by the names of its modules.
    """
    sizes = {"moment_dim": 16, "num_heads": 2, "milestones": [1]}

    def small(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: sizes.get(key, small(inner)) for key, inner in value.items()}
        return [small(inner) for inner in value] if isinstance(value, list) else value

    experiment = experiment_of(entry)
    model, data, optimization = experiment.model, experiment.data, experiment.optimization
    if model.ensemble is None:
        model = replace(model, trunk="test_resnet")
    else:
        reduced = model.ensemble.map_channels and 16
        model = replace(model, ensemble=replace(model.ensemble, num_heads=2, map_channels=reduced))
    if optimization.scheduler is not None:
        scheduler = ClassSpec(small(optimization.scheduler.description))
        optimization = replace(optimization, scheduler=scheduler)
    samples = data.samples_per_class and 2
    return replace(
        experiment,
        losses=[replace(t, loss=ClassSpec(small(t.loss.description))) for t in experiment.losses],
        model=replace(model, embedding_size=16),
        data=replace(
            data, root=root, image_size=40, resize=44, batch_size=8, samples_per_class=samples
        ),
        optimization=replace(optimization, steps=2),
    )


EACH_TRAINING = pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.name, marks=[] if entry.name in QUICK else [pytest.mark.slow])
        for entry in TRAININGS
    ],
)


@EACH_TRAINING
def test_every_training_takes_two_steps(
    entry: Entry, trees: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = entry.settings["data"]["dataset"]
    info = IMAGE_DATASETS[name]
    counts = info.read(trees[name]).counts()
    monkeypatch.setitem(IMAGE_DATASETS, name, replace(info, counts=counts))
    model, loss, moved = two_steps(shrunk(entry, trees[name]))
    trained = [*dict(model.named_parameters()), *dict(loss.named_parameters(prefix="loss"))]
    trunk = {key for key in trained if key.startswith("trunk.")}
    # A residual branch that begins as zero has no gradient at first.
    assert {*trained} - moved < trunk
