"""Former names: how the settings of the first published results were spelled, whatever the code calls them now.

A published result is found by a digest of all its settings, with every default and the path of every class. A class
that moves, an argument that leaves or a new one would lose it, if digests were made of today's names. They are made
of the names below, to which `identity` translates. Add a row with every such change; no row is ever removed.

A changed default needs no row: recipes with published results state every argument of this project's classes.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

Arguments = dict[str, Any]

SETTINGS: Arguments = {
    **{"data.crop_to_box": False, "model.compile": False, "trackers": []},
    "evaluation.verification": False,
}
"""Settings that left, or came later, with the value that means their absence; of all others it is null."""

LATER: Arguments = {"model.head": "random"}
"""Settings that came after results were published, and change them: digests know no such value."""

BETA: Arguments = {"lr": 5e-4, "weight_decay": 0.0}
"""Settings that the trained beta of PML's MarginLoss had before they were stated in `optimization.overrides`."""

UNSTATED = "as the loss's other parameters"
"""In former spelling, the settings of such a beta without an override: then, nothing was written for `BETA`."""

MODULES = {
    "pml_regularizers.features.feature_loss": "pml_regularizers.feature_loss",
    "pml_regularizers.functional.kernels": "pml_regularizers.reproducing_kernels",
    "pml_regularizers.heads.attention_ensemble": "pml_regularizers.attention_ensemble",
    "pml_regularizers.heads.variance_attention": "pml_regularizers.variance_attention",
    "pml_regularizers.losses.binomial_deviance_loss": "pml_regularizers.binomial_deviance",
    "pml_regularizers.losses.cosine_contrastive_loss": "pml_regularizers.cosine_contrastive",
    "pml_regularizers.losses.dense_n_pairs_loss": "pml_regularizers.dense_n_pairs",
    "pml_regularizers.losses.ensemble_loss": "pml_regularizers.ensemble_loss",
    "pml_regularizers.losses.high_order_moments": "pml_regularizers.moments",
    "pml_regularizers.losses.horde_loss": "pml_regularizers.horde",
    "pml_regularizers.losses.jrd_loss": "pml_regularizers.jrd",
    "pml_regularizers.losses.pair_loss": "pml_regularizers._pair_loss",
    "pml_regularizers.losses.per_output_loss": "pml_regularizers._loss_copies",
    "pml_regularizers.regularizers.energy_confusion": "pml_regularizers.energy_confusion",
    "pml_regularizers.regularizers.joint_similarity": "pml_regularizers.joint_similarity",
    "pml_regularizers.regularizers.joint_similarity_ablations": "pml_regularizers.reproducing_kernels",
    "pml_regularizers.regularizers.variance": "pml_regularizers.variance_attention",
}
"""{module: its former name}."""


def _same(arguments: Arguments) -> Arguments:
    return arguments


@dataclass(frozen=True)
class Former:
    """How a class was described before its arguments changed.

    Args:
        name: The class's former name. Default: today's.
        renamed: {argument: (former name, {value: former value})}; other values stay.
        left: {argument that left: the value that does what is done now}.
        rewrite: The former arguments made of today's, where a table cannot say it; given former ones, it
            returns them.
    """

    name: str | None = None
    renamed: Mapping[str, tuple[str, Mapping[Hashable, Any]]] = field(default_factory=dict)
    left: Mapping[str, Any] = field(default_factory=dict)
    rewrite: Callable[[Arguments], Arguments] = _same

    def arguments(self, arguments: Arguments) -> Arguments:
        former = {name: value for name, value in arguments.items() if name not in self.renamed}
        for name, (before, values) in self.renamed.items():
            if name in arguments:
                value = arguments[name]
                former[before] = values.get(value, value) if isinstance(value, Hashable) else value
        return {**self.left, **self.rewrite(former)}


def _ordered_sum(arguments: Arguments) -> Arguments:
    """`reducer=SumReducer()` was `reduction="ordered_sum"`, and the reducer had no effect."""
    if "reduction" in arguments:
        return arguments
    if not _sums(arguments):
        return {**arguments, "reduction": "mean"}
    mean = _former_reducer("mean_reducer.MeanReducer", arguments)
    return {**arguments, "reduction": "ordered_sum", "reducer": mean}


def _stated_sum(arguments: Arguments) -> Arguments:
    """`reducer=SumReducer()` was the default, known by the path of its module."""
    if not _sums(arguments):
        return arguments
    return {**arguments, "reducer": _former_reducer("sum_reducer.SumReducer", arguments)}


def _sums(arguments: Arguments) -> bool:
    path = str((arguments.get("reducer") or {}).get("class_path", ""))
    return path.startswith("pytorch_metric_learning.") and path.endswith(".SumReducer")


def _former_reducer(name: str, arguments: Arguments) -> Arguments:
    """A default reducer, as it was described, with what is given to today's."""
    given = arguments["reducer"].get("init_args") or {}
    stated = {name: value for name, value in given.items() if value is not None}
    path = f"pytorch_metric_learning.reducers.{name}"
    return {"class_path": path, "init_args": {"collect_stats": False, **stated}}


def _order_1(arguments: Arguments) -> Arguments:
    """`loss`, now that of the embeddings, was that of the orders beside a `first_loss`: now `feature_loss`."""
    if "feature_loss" not in arguments:
        return arguments
    arguments = {**arguments, "first_loss": None}
    if (feature_loss := arguments.pop("feature_loss")) is not None:
        arguments |= {"first_loss": arguments.get("loss"), "loss": feature_loss}
    return arguments


_HORDE = Former(
    renamed={
        "embedding_loss": ("first_loss", {}),
        "checkpoint": ("activations", {False: "store", True: "recompute"}),
        "matmul_dtype": ("products", {None: "full"}),
    },
    rewrite=_order_1,
)

CLASSES: dict[str, Former] = {
    "BinomialDevianceLoss": Former(rewrite=_stated_sum),
    "CosinePowersLoss": Former(renamed={"power_weights": ("power_weight", {})}),
    "DenseNPairsLoss": Former(rewrite=_stated_sum),
    "EnergyConfusionRegularizer": Former(left={"num_pairs": None, "seed": 0}, rewrite=_ordered_sum),
    "HORDELoss": _HORDE,
    "OnePositionHORDELoss": _HORDE,
    "ProjectedFeaturesLoss": Former(name="PooledFeaturesLoss"),  # a control
}
"""{class of this project: how it was described before}."""


def identity(settings: Any) -> Any:
    """Settings with every description of this project's classes in its former spelling; a former one stays."""
    if isinstance(settings, Mapping):
        if "class_path" in settings:
            settings = _described(settings)
        if "losses" in settings:
            settings = _with_former_beta(settings)
        return {name: identity(value) for name, value in settings.items()}
    if isinstance(settings, list):
        return [identity(value) for value in settings]
    return settings


def _described(description: Mapping[str, Any]) -> Mapping[str, Any]:
    module, _, name = str(description["class_path"]).rpartition(".")
    if module.partition(".")[0] not in ("pml_regularizers", "benchmarks"):
        return description
    former = CLASSES.get(name, Former())
    path = f"{MODULES.get(module, module)}.{former.name or name}"
    arguments = former.arguments(dict(description.get("init_args") or {}))
    return {**description, "class_path": path, "init_args": arguments}


def _with_former_beta(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """All settings, with `BETA` and the lack of an override exchanged where a MarginLoss trains its beta."""
    terms, optimization = settings["losses"] or [], settings.get("optimization") or {}
    if not any(map(_trains_beta, terms)):
        return settings
    alone = [term.get("weight", 1.0) for term in terms] == [1.0]  # or in PML's MultipleLosses
    path = "loss.beta" if alone else "loss.losses.MarginLoss.beta"
    overrides = {path: UNSTATED, **(optimization.get("overrides") or {})}
    if overrides[path] == BETA:
        del overrides[path]
    return {**settings, "optimization": {**optimization, "overrides": overrides}}


def _trains_beta(term: Any) -> bool:
    loss = (term.get("loss") if isinstance(term, Mapping) else None) or {}
    is_margin = str(loss.get("class_path", "")).rpartition(".")[2] == "MarginLoss"
    return is_margin and bool((loss.get("init_args") or {}).get("learn_beta"))
