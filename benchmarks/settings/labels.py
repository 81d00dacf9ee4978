"""Names of methods that no recipe has named: those of their classes."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.console.printing import printable
from benchmarks.settings.experiment import WeightedLoss
from benchmarks.settings.types import ClassSpec


def label_of(losses: Sequence[WeightedLoss], miner: ClassSpec | None) -> str:
    """E.g. "HORDELoss(ContrastiveLoss) + JRSRegularizer, MultiSimilarityMiner"."""
    terms = " + ".join(_name(term.loss.description) for term in losses)
    return printable(", ".join([terms, *([] if miner is None else [_name(miner.description)])]))


def _name(description: Mapping[str, Any]) -> str:
    """The class's name, with those of the losses inside it."""
    name = str(description.get("class_path")).rpartition(".")[2]
    arguments = description.get("init_args")
    inner = [
        _name(value)
        for argument, value in (arguments.items() if isinstance(arguments, Mapping) else ())
        if argument.endswith("loss") and isinstance(value, Mapping)
    ]
    return f"{name}({', '.join(inner)})" if inner else name
