"""Names of metrics, and of the rows of a table, for a reader."""

from collections.abc import Mapping
from typing import Any

METRICS = {
    "mean_average_precision_at_r": "MAP@R",
    "r_precision": "R-precision",
    "ideal_joint_error": "ideal joint error",
    "h_divergence": "H-divergence",
}

START = "before_training"
"""Entry of a record: the results of the whole network at its start."""

UNTRAINED = "untrained_"
"""How the names of outputs begin that read the trunk at its start."""

FEATURES = {
    "features": "pooled features",
    "features_centred": "centred pooled features",
    "features_pca": "{} components",
    "features_whitened": "{} components after within-class whitening",
}
"""Outputs that read the trunk; those of the untrained one have UNTRAINED in place of "features_"."""


def metric_name(metric: str) -> str:
    """E.g. "seen Recall@1" for "seen_recall_at_1"."""
    return METRICS.get(metric, metric.replace("recall_at_", "Recall@").replace("_", " "))


def row_name(label: str, output: str, config: Mapping[str, Any] | None = None) -> str:
    """A method's row of a tested output: "HORDE †" for the descriptor, "HORDE, order 2" for an order.

    Outputs of the untrained trunk, which no method has changed, have names without the method's.

    Args:
        config: Settings of the run, which say the number of principal components.

    >>> row_name("HORDE", "untrained_pca", {"model": {"embedding_size": 128}})
    'untrained trunk, 128 components'
    """
    if output == START:
        return "before training"
    suffixes = {"embedding": "", "descriptor": " †"}
    if output in suffixes:
        return label + suffixes[output]
    own = output.removeprefix(UNTRAINED)
    known = FEATURES.get(own) or FEATURES.get(f"features_{own}") or own.replace("_", " ")
    of_trunk, of_model = ((config or {}).get(group, {}) for group in ("evaluation", "model"))
    size = of_model.get("embedding_size")
    if own == output and of_trunk.get("features"):
        size = of_trunk["features"]
    name = known.format(size or "principal")
    return f"{'untrained trunk' if own != output else label}, {name}"


def told_apart(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels of rows, each once: the row is added to one that another has, too."""
    every = [*labels.values()]
    return {
        row: f"{label}, {row}" if every.count(label) > 1 else label for row, label in labels.items()
    }
