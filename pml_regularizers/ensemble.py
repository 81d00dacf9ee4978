r"""Attention-based ensemble, ABE-M (Kim, Goyal, Chawla, Lee, Kwon, "Attention-based ensemble for deep metric
learning", ECCV 2018), the ensemble of HORDE's Table 1.

    B_m(x) = G(S(x) * A_m(S(x)))                                    embedding of head m, section 3.3
    L      = sum_m L_metric(B_m) + lambda_div L_div                 section 3.4
    L_div  = sum_i sum_{p,q} max(0, m_div - |B_p(x_i) - B_q(x_i)|^2)

S is the stem and G the body with its embedding layer, both shared by all M heads; A_m is a sigmoid mask as
large as the map S(x); `*` is the element-wise product. Embeddings have unit length, so that the hinge of
L_div is 2 max(0, s - (1 - m_div/2)) of the cosine s; the paper's margin m_div = 1 is s = 0.5.

HORDE takes its moments from the M maps that leave the body, concatenated and reduced to 1024 channels by a
1x1 convolution (the authors' code); its order 1 is the ensemble's own loss.

The defaults are those of HORDE's code, which trained the ensembles of its Table 1. It differs from ABE's
text: the divergence compares heads of all pairs of images, not of one image only (`images="same"`), and is
averaged over the active pairs (`reducer=SumReducer()`); heads are averaged, not summed (`reduction="sum"`).
Differs from both: the metric loss is reduced for each head and then averaged; HORDE's code averages the
active negative pairs of all heads at once, which weighs a head by how many it has.
"""

import copy
import math
from typing import Any, Literal, Self, get_args

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import AvgNonZeroReducer
from torch import Tensor, fx, nn

from .features import FeatureLoss, already_reduced
from .heads import EmbeddingHead, Staged
from .wrapper_loss import WrapperLoss

Images = Literal["all", "same"]
Reduction = Literal["mean", "sum"]


def join_heads(heads: Tensor) -> Tensor:
    """Heads (N, M, E) of unit length -> one embedding (N, M E) of unit length.

    Divided by sqrt(M), so that the inner product of two images is the mean of their heads' cosines, and the
    squared distance the mean of their heads' squared distances.
    """
    return heads.flatten(1) / math.sqrt(heads.shape[1])


def split_heads(embeddings: Tensor, num_heads: int) -> Tensor:
    """One embedding (N, M E) -> the heads (N, M, E) that `join_heads` joined.

    Raises:
        ValueError: for M < 1, or if the width is no multiple of M.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads: expected at least 1, got {num_heads}")
    if embeddings.ndim != 2 or embeddings.shape[1] % num_heads:
        raise ValueError(
            f"embeddings: expected (N, {num_heads} x E), the heads' embeddings one after the other, got shape "
            f"{tuple(embeddings.shape)}; pass num_heads=... to match the network"
        )
    width = embeddings.shape[1] // num_heads
    return embeddings.reshape(len(embeddings), num_heads, width) * math.sqrt(num_heads)


def between_heads(matrix: Tensor, num_heads: int) -> Tensor:
    """What a matrix over all heads of all images says of each two heads p < q.

    Args:
        matrix: (N M, N M), image-major as `heads.flatten(0, 1)` is.
        num_heads: M.

    Returns:
        (M (M-1) / 2, N, N), head p of the first image against head q of the second.
    """
    p, q = torch.triu_indices(num_heads, num_heads, 1, device=matrix.device)
    images = len(matrix) // num_heads
    blocks = matrix.view(images, num_heads, images, num_heads).permute(1, 3, 0, 2)
    return blocks[p, q]


class AttentionEnsemble(Staged):
    """M embeddings of an image by one network, each of what one attention mask lets through.

    Images -> stem -> map; M masks of the map; each masked map -> body -> pool, linear, L2. Its output is one
    tensor (`join_heads`), with which testers and miners work as with any other. HORDE attaches to its
    child `feature_map`, the M maps that leave the body, concatenated (N, M D, h, w) and reduced to
    `map_channels`; it is computed only while something is attached.

    The body runs once on all N M masked maps. In training mode, batch normalisation in it therefore uses the
    statistics of all images and heads together, which belong to the weights that the heads share, and moves
    its running statistics once per step. (GoogLeNet, which the paper uses, has none.)

    Args:
        stem: Images -> map (N, C, H, W). The paper's: GoogLeNet up to the pooling after inception 3b.
        body: Map (., C, H, W) -> map (., D, h, w). The paper's: the rest of GoogLeNet.
        stem_channels: C.
        body_channels: D.
        embedding_size: Width of the output, M times that of a head. ABE and HORDE: 512.
        num_heads: M. HORDE's code: 8.
        attention: Layers that all masks share, (N, C, H, W) -> (N, A, H, W), before each mask's own 1x1
            convolution. The paper's: a second copy of inception 4a to 4e. Default: none.
        attention_channels: A; default: C.
        map_channels: Channels of `feature_map`, by a 1x1 convolution that trains with the network. 1024 in
            HORDE's code. Default: no reduction, M D channels.

    Shape:
        images: as the stem takes them. Output: (N, embedding_size), of unit length.

    Raises:
        ValueError: for sizes < 1, an embedding size that is no multiple of M, or maps that do not fit.

    Example:
        >>> import torch
        >>> stem, body = torch.nn.Conv2d(3, 6, 3), torch.nn.Conv2d(6, 10, 3)
        >>> ensemble = AttentionEnsemble(
        ...     stem, body, stem_channels=6, body_channels=10, embedding_size=12, num_heads=4
        ... )
        >>> ensemble(torch.randn(2, 3, 9, 9)).shape
        torch.Size([2, 12])
    """

    def __init__(
        self,
        stem: nn.Module,
        body: nn.Module,
        *,
        stem_channels: int,
        body_channels: int,
        embedding_size: int = 512,
        num_heads: int = 8,
        attention: nn.Module | None = None,
        attention_channels: int | None = None,
        map_channels: int | None = None,
    ) -> None:
        super().__init__()
        if attention_channels is None:
            attention_channels = stem_channels
        for name, value in (
            ("stem_channels", stem_channels),
            ("body_channels", body_channels),
            ("num_heads", num_heads),
            ("attention_channels", attention_channels),
            ("map_channels", map_channels),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if embedding_size < 1 or embedding_size % num_heads:
            raise ValueError(
                f"embedding_size: expected a multiple of num_heads={num_heads}, got {embedding_size}"
            )
        self.stem_channels = stem_channels
        self.embedding_size = embedding_size
        self.num_heads = num_heads
        self.stem = stem
        self.body = body
        self.attention = nn.Identity() if attention is None else attention
        self.mask = nn.Conv2d(attention_channels, num_heads * stem_channels, 1)
        self.head = EmbeddingHead(body_channels, embedding_size // num_heads, data_format="NCHW")
        concatenated = num_heads * body_channels
        self.reduction: nn.Module = nn.Identity()
        if map_channels is not None:
            self.reduction = nn.Conv2d(concatenated, map_channels, 1, bias=False)
            nn.init.xavier_uniform_(self.reduction.weight)
        self.feature_map = nn.Identity()
        self.map_channels = concatenated if map_channels is None else map_channels
        # Glorot, as ABE's section 4 and HORDE's code start them; each head's mask is a layer of its own.
        nn.init.xavier_uniform_(self.head.fc.weight)
        for weight in self.mask.weight.data.chunk(num_heads):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.mask.bias)  # type: ignore[arg-type]

    @classmethod
    def for_trunk(
        cls, trunk: nn.Module, stage: str, *, attention_stage: str | None = None, **kwargs: Any
    ) -> Self:
        """An ensemble that cuts a trunk in two.

        Args:
            trunk: A timm model, or any network that `split_trunk` can cut.
            stage: Name of the module whose output is masked, as in `trunk.named_modules()`.
            attention_stage: Copy the trunk from there to this module as `attention`. Its map must be as
                large as the stage's. The paper's: inception 4e.
            **kwargs: As in the constructor. The channels of a timm model are found; otherwise pass
                `stem_channels`, `body_channels` and, with `attention_stage`, `attention_channels`.

        Raises:
            ValueError: if the trunk cannot be cut there, or does not say its channels.
        """
        stem, body = split_trunk(trunk, stage)
        if attention_stage is not None:
            kwargs["attention"] = copy.deepcopy(split_trunk(body, attention_stage)[0])
        channels = {info["module"]: info["num_chs"] for info in getattr(trunk, "feature_info", [])}
        for name, found in (
            ("stem_channels", channels.get(stage)),
            ("body_channels", getattr(trunk, "num_features", None)),
            ("attention_channels", channels.get(attention_stage)),
        ):
            if name == "attention_channels" and attention_stage is None:
                continue
            if kwargs.setdefault(name, found) is None:
                raise ValueError(f"{name}: {type(trunk).__name__} does not say it; pass {name}=...")
        return cls(stem, body, **kwargs)

    def masks(self, x: Tensor) -> Tensor:
        """The masks A_m of the stem's map x (N, C, H, W) -> (N, M, C, H, W), between 0 and 1."""
        masks: Tensor = self.mask(self.attention(x)).sigmoid()
        if masks.shape[2:] != x.shape[2:]:
            raise ValueError(
                f"attention: expected a map of {tuple(x.shape[2:])}, as large as the stem's, got "
                f"{tuple(masks.shape[2:])}; pass layers that keep the resolution"
            )
        return masks.view(len(x), self.num_heads, *x.shape[1:])

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.stem(images)
        if x.ndim != 4 or x.shape[1] != self.stem_channels:
            raise ValueError(
                f"stem: expected a map (N, {self.stem_channels}, H, W), got shape {tuple(x.shape)}; pass "
                "stem_channels=... to match it; channels-last maps, as Swin's, need a stem and a body that "
                "permute them"
            )
        maps: Tensor = self.body((self.masks(x) * x.unsqueeze(1)).flatten(0, 1))
        if self.feature_map._forward_hooks:
            self.feature_map(self.reduction(maps.reshape(len(x), -1, *maps.shape[2:])))
        return join_heads(self.head(maps).view(len(x), self.num_heads, -1))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, embedding_size={self.embedding_size}"


class _Opener(fx.Tracer):
    """Traces what is around one module; modules that do not hold it stay whole."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self.stage.startswith(module_qualified_name + ".")


def split_trunk(trunk: nn.Module, stage: str) -> tuple[nn.Module, nn.Module]:
    """Cut a network behind one of its modules: trunk(x) = body(stem(x)).

    Both parts hold the trunk's own modules under their own names, so that weights may be loaded before or
    after. What surrounds the module is traced by torch.fx, once in each mode (train and eval): a trace keeps
    `self.training` as a constant, so that a trunk which asks for it there cannot be cut.

    Args:
        trunk: A network; of a timm model, its `forward_features`.
        stage: Name of the module whose output is where to cut, as in `trunk.named_modules()`.

    Returns:
        The stem, up to that module, and the body, the rest.

    Raises:
        ValueError: if the trunk does not call that module exactly once, if anything but its output
            passes the cut, if the trunk cannot be traced, or if its traces in the two modes differ.

    Example:
        >>> import torch
        >>> layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 5, 3)]
        >>> stem, body = split_trunk(torch.nn.Sequential(*layers), "1")
        >>> stem(torch.randn(2, 3, 9, 9)).shape
        torch.Size([2, 4, 7, 7])
    """
    nodes = _trace(trunk, stage)
    _turn_mode(trunk)
    try:
        others = _trace(trunk, stage)
    finally:
        _turn_mode(trunk)
    _check_same(trunk, nodes, others)
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
                f"stage: {node.name} also needs {', '.join(beside)} from before {stage!r}; cut where one map "
                "is all that passes"
            )
        copies[node] = body.node_copy(node, copies.__getitem__)
    return fx.GraphModule(trunk, stem), fx.GraphModule(trunk, body)


def _trace(trunk: nn.Module, stage: str) -> list[fx.Node]:
    tracer = _Opener(stage)
    if hasattr(trunk, "forward_features"):
        tracer.traced_func_name = "forward_features"
    try:
        return list(tracer.trace(trunk).nodes)
    except fx.proxy.TraceError as error:
        raise ValueError(
            f"trunk: torch.fx cannot trace {type(trunk).__name__} ({error}); write its two parts as modules "
            "and call AttentionEnsemble(stem, body, ...)"
        ) from error


def _says(trunk: nn.Module, nodes: list[fx.Node]) -> list[tuple[Any, ...]]:
    """What each node of a trace does, without the names that the tracer gave."""
    place = {node: f"%{i}" for i, node in enumerate(nodes)}
    said = []
    for node in nodes:
        target: Any = node.target
        if node.op == "get_attr" and str(target).startswith("_tensor_constant"):
            target = getattr(trunk, str(target)).tolist()  # made while tracing, anew each time
        arguments = fx.node.map_arg((node.args, node.kwargs), place.__getitem__)
        said.append((node.op, target, arguments))
    return said


def _turn_mode(trunk: nn.Module) -> None:
    """From train to eval or back, each module for itself: some may be frozen."""
    for module in trunk.modules():
        module.training = not module.training


def _check_same(trunk: nn.Module, nodes: list[fx.Node], others: list[fx.Node]) -> None:
    """Raise if two traces of a trunk, in its mode and in the other one, do not say the same."""
    # To the end of the shorter trace, an output, where the longer has none.
    steps = zip(nodes, others, _says(trunk, nodes), _says(trunk, others), strict=False)
    for node, other, here, there in steps:
        if here != there:
            mode, turned = ("train", "eval") if trunk.training else ("eval", "train")
            raise ValueError(
                f"trunk: {type(trunk).__name__} computes something else in training than in evaluation, and a "
                f"cut would keep one of them for good: {node.format_node()} in {mode} mode is "
                f"{other.format_node()} in {turned} mode; make a module of it, as torch.nn.Dropout is, turn it "
                "off, or write the two parts as modules and call AttentionEnsemble(stem, body, ...)"
            )


class EnsembleLoss(WrapperLoss):
    """A metric loss on every head of an ensemble.

    The loss is deep-copied, one copy per head: **where it has parameters, give `parameters()` to an
    optimizer**; the copies are trained, the original is not. A mined `indices_tuple`, which the miner draws
    from the whole embeddings, serves every head.

    With the divergence it is the loss of the paper:
    `EnsembleLoss(loss, 8, embedding_regularizer=DivergenceLoss(8), embedding_reg_weight=0.5)`.

    Args:
        loss: Any PML loss; where it has an embedding size, that of one head. ABE: contrastive.
        num_heads: M. HORDE's code: 8.
        reduction: "mean" over the heads (HORDE's code) or "sum" (ABE, section 3.4).
        **kwargs: `collect_stats`, `embedding_regularizer` and `embedding_reg_weight`, as in any PML loss.

    Shape:
        embeddings: (N, M E), as `AttentionEnsemble` returns them; labels: (N,).

    Raises:
        ValueError: for arguments out of range; for a loss that does not return one number
            (DoNothingReducer), or that reads features; for `reducer=` or `distance=`, which belong to the
            loss; in the call, for a width that is no multiple of M, or that the loss was not made for.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> loss = EnsembleLoss(losses.ContrastiveLoss(), num_heads=4)
        >>> loss(torch.randn(6, 4 * 8), torch.tensor([0, 0, 1, 1, 2, 2])).shape
        torch.Size([])
    """

    reads = ()
    cannot_read = (
        "of which a head has none of its own; give the ensemble's loss to it (HORDELoss(loss, ..., "
        "first_loss=EnsembleLoss(...))), or add it beside with MultipleLosses"
    )

    def __init__(
        self, loss: nn.Module, num_heads: int, *, reduction: Reduction = "mean", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if num_heads < 1:
            raise ValueError(f"num_heads: expected at least 1, got {num_heads}")
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction: expected one of mean, sum; got {reduction!r}")
        self.check_wrapped("loss", loss)
        self.num_heads = num_heads
        self.reduction = reduction
        self.hold({f"head_{m}": loss for m in range(1, num_heads + 1)})
        self.add_to_recordable_attributes(list_of_names=["num_heads", "reduction"], is_stat=False)

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> dict[str, dict[str, Any]]:
        self.check_tuples(indices_tuple)
        values = []
        heads = split_heads(embeddings, self.num_heads).unbind(dim=1)
        for (name, loss), head in zip(self.losses.items(), heads, strict=True):
            try:
                value = self.part(name, head, labels, indices_tuple)
            except RuntimeError as error:
                if isinstance(error, torch.cuda.OutOfMemoryError) or not loss.state_dict():
                    raise
                raise ValueError(
                    f"loss: {type(loss).__name__} failed on a head's embeddings {tuple(head.shape)} ({error}); "
                    f"where it has an embedding_size, pass that of one head, {head.shape[1]}"
                ) from error
            values.append(value)
        total = torch.stack(values).sum()
        value = total / self.num_heads if self.reduction == "mean" else total
        return {"loss": already_reduced(value)}


class DivergenceLoss(FeatureLoss):
    """Keeps the heads of an ensemble apart: a hinge on the similarity of each two heads.

        max(0, s(B_p(x_i), B_q(x_j)) - margin)     for all p < q and all i, j, or for i = j only

    It is called like a PML loss, and ignores the labels and any `indices_tuple`. It goes beside the metric
    loss in `MultipleLosses([EnsembleLoss(loss, 8), DivergenceLoss(8)], weights=[1, 0.5])`, or into its slot
    `embedding_regularizer=`; 0.5 is the weight of HORDE's code.

    Args:
        num_heads: M, at least 2.
        margin: Similarity above which two heads are pushed apart: 0.5, the margin 1 of ABE and HORDE's code;
            see above. With a distance that is no similarity, the distance below which they are.
        images: "all", also heads of different images (HORDE's code), which takes (N M)^2 similarities; or
            "same" (ABE): N M^2.
        **kwargs: `distance`, `reducer`, `collect_stats`, as in any PML loss. ABE's hinge, as printed, is
            `margin=1, images="same", distance=LpDistance(power=2), reducer=SumReducer()`, where each pair
            of heads counts once.

    Default distance: `CosineSimilarity()`. Default reducer: `AvgNonZeroReducer()`, the mean over the pairs
    that are too similar, as in HORDE's code.
    Reducer input: **loss**, M(M-1)/2 values per pair of images (i, j), or per image; reduction type
    "element", with the indices i.

    Shape:
        embeddings: (N, M E), as `AttentionEnsemble` returns them; labels: (N,), or none.

    Raises:
        ValueError: for M < 2 or an unknown word; in the call, for a width that is no multiple of M.

    Example:
        >>> import torch
        >>> DivergenceLoss(2)(torch.tensor([[1.0, 0.0, 0.8, 0.6]]))
        tensor(0.3000)
    """

    reads = ()

    def __init__(
        self, num_heads: int, margin: float = 0.5, *, images: Images = "all", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if num_heads < 2:
            raise ValueError(
                f"num_heads: expected at least 2, got {num_heads}; one head has none to diverge from"
            )
        if images not in get_args(Images):
            raise ValueError(f"images: expected one of all, same; got {images!r}")
        self.num_heads = num_heads
        self.margin = margin
        self.images = images
        self.add_to_recordable_attributes(
            list_of_names=["num_heads", "margin", "images"], is_stat=False
        )

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        heads = split_heads(embeddings, self.num_heads)
        first = torch.arange(len(embeddings), device=embeddings.device)
        if self.images == "same":
            p, q = torch.triu_indices(self.num_heads, self.num_heads, 1, device=embeddings.device)
            mat = _within_images(self.distance, heads)[:, p, q].T
        else:
            mat = between_heads(self.distance(heads.flatten(0, 1)), self.num_heads)
            first = first.unsqueeze(1)
        losses = torch.relu(self.distance.margin(self.margin, mat))
        return {
            "loss": {
                # A reducer that counts values above zero would drop NaN: let one spoil all, as in a mean.
                "losses": (losses + 0 * losses.sum()).flatten(),
                "indices": first.expand_as(mat).flatten(),
                "reduction_type": "element",
                "divisor": mat.numel(),
            }
        }

    def get_default_distance(self) -> Any:
        return CosineSimilarity()

    def get_default_reducer(self) -> Any:
        return AvgNonZeroReducer()


def _within_images(distance: Any, heads: Tensor) -> Tensor:
    """A PML distance between the heads (N, M, E) of each image by itself -> (N, M, M).

    What the distance makes of all N M heads, without the pairs of different images. Its own
    `pairwise_distance` would leave out the power, and adds 1e-6 to differences.
    """
    rows = heads.flatten(0, 1)
    unit = distance.maybe_normalize(rows)
    distance.reset_stats()
    distance.set_default_stats(rows, rows, unit, unit)
    unit = unit.view_as(heads)
    mat: Tensor = torch.vmap(distance.compute_mat)(unit, unit) ** distance.power
    return mat
