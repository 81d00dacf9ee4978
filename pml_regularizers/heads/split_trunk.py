"""Cut a network in two behind one of its modules."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from ..functional.checks import check_module

_BY_HAND = "write the two parts as modules and call AttentionEnsemble(stem, body, ...)"


def split_trunk(trunk: nn.Module, stage: str) -> tuple[nn.Module, nn.Module]:
    """Cut a network behind one of its modules: trunk(x) = body(stem(x)).

    Both parts hold the trunk's own modules under their own names, so you may load weights before or after the cut.
    torch.fx traces the code around the module, and keeps `self.training` as a constant: a trunk that reads it there
    cannot be cut.

    Args:
        trunk: A network; a timm model is cut in its `forward_features`.
        stage: Name of the module behind whose output to cut, as in `trunk.named_modules()`.

    Returns:
        The stem, up to that module, and the body, the rest.

    Raises:
        ValueError: if the trunk does not call that module exactly once, if anything except its output passes the
            cut, if the trunk cannot be traced, or if it computes different things in training and in evaluation.

    Example:
        >>> import torch
        >>> layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 5, 3)]
        >>> stem, body = split_trunk(torch.nn.Sequential(*layers), "1")
        >>> stem(torch.randn(2, 3, 9, 9)).shape
        torch.Size([2, 4, 7, 7])
    """
    check_module("trunk", trunk)
    nodes = _trace(trunk, stage)
    _turn_mode(trunk)
    try:
        others = _trace(trunk, stage)
    finally:
        _turn_mode(trunk)
    # The shorter trace ends with an output, and the longer one has none there.
    steps = zip(_operations(trunk, nodes), _operations(trunk, others), strict=False)
    for node, (here, there) in zip(nodes, steps, strict=False):
        if here != there:
            raise ValueError(
                f"trunk: {type(trunk).__name__} computes different things in training and in evaluation, from "
                f"{node.format_node()} on; make that a module, as torch.nn.Dropout is, turn it off, or {_BY_HAND}"
            )
    cuts = [i for i, node in enumerate(nodes) if (node.op, node.target) == ("call_module", stage)]
    if len(cuts) != 1:
        raise ValueError(
            f"stage: expected a module that {type(trunk).__name__} calls once, got {stage!r}, called "
            f"{len(cuts)} times; it calls {', '.join(str(n.target) for n in nodes if n.op == 'call_module')}"
        )
    cut = cuts[0]
    stem, body = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes[: cut + 1]:
        copies[node] = stem.node_copy(node, copies.__getitem__)
    stem.output(copies[nodes[cut]])
    copies = {nodes[cut]: body.placeholder("x")}
    for node in nodes[cut + 1 :]:
        beside = [used.name for used in node.all_input_nodes if used not in copies]
        if beside:
            raise ValueError(
                f"stage: {node.name} also needs {', '.join(beside)} from before {stage!r}; cut where only one "
                "map passes"
            )
        copies[node] = body.node_copy(node, copies.__getitem__)
    return fx.GraphModule(trunk, stem), fx.GraphModule(trunk, body)


class _Opener(fx.Tracer):
    """Tracer of the code around one module."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self.stage.startswith(module_qualified_name + ".")


def _trace(trunk: nn.Module, stage: str) -> list[fx.Node]:
    tracer = _Opener(stage)
    if hasattr(trunk, "forward_features"):
        tracer.traced_func_name = "forward_features"
    parameters = inspect.signature(getattr(trunk, tracer.traced_func_name)).parameters.values()
    # Optional arguments, such as the attention mask of timm's ViT, keep their defaults.
    optional = {p.name: p.default for p in parameters if p.default is not p.empty}
    try:
        return list(tracer.trace(trunk, concrete_args=optional).nodes)
    except fx.proxy.TraceError as error:
        raise ValueError(
            f"trunk: torch.fx cannot trace {type(trunk).__name__} ({error}); {_BY_HAND}"
        ) from error


def _operations(trunk: nn.Module, nodes: list[fx.Node]) -> Iterator[tuple[Any, ...]]:
    """The operation of each node of a trace, without the names that the tracer gave."""
    place = {node: f"%{i}" for i, node in enumerate(nodes)}
    for node in nodes:
        target: Any = node.target
        if node.op == "get_attr" and str(target).startswith("_tensor_constant"):
            target = getattr(trunk, str(target)).tolist()  # a new one in each trace
        yield node.op, target, fx.node.map_arg((node.args, node.kwargs), place.__getitem__)


def _turn_mode(trunk: nn.Module) -> None:
    """Switch from train to eval or back, each module on its own: some may be frozen."""
    for module in trunk.modules():
        module.training = not module.training
