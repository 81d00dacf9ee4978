r"""The losses of an attention-based ensemble (see `attention_ensemble.py`).

    L      = sum_m L_metric(B_m) + lambda_div L_div                 section 3.4
    L_div  = sum_i sum_{p,q} max(0, m_div - |B_p(x_i) - B_q(x_i)|^2)

Embeddings have unit length, so that the hinge of L_div is 2 max(0, s - (1 - m_div/2)) with the cosine s; the
paper's margin m_div = 1 corresponds to s = 0.5.

The defaults are those of HORDE's code, which trained the ensembles of its Table 1. It differs from ABE's text: the
divergence compares heads across all pairs of images, not only within one image (`images="same"`), and is averaged
over the active pairs (`reducer=SumReducer()`); heads are averaged, not summed (`reduction="sum"`). Differs from
both: the metric loss is reduced for each head and then averaged; HORDE's code averages the active negative pairs of
all heads at once.
"""

from typing import Any, Literal, get_args

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import AvgNonZeroReducer
from torch import Tensor, nn

from ..features.feature_loss import FeatureLoss, already_reduced
from ..functional.checks import number, one_of, whole_numbers
from ..heads.attention_ensemble import between_heads, split_heads
from .pair_loss import unreduced
from .per_output_loss import PerOutputLoss

Images = Literal["all", "same"]
Reduction = Literal["mean", "sum"]


class EnsembleLoss(PerOutputLoss):
    """A metric loss on every head of an ensemble.

    The first head has the loss itself, and each other one a copy: **where it has parameters, give `parameters()` to
    an optimizer**. A mined `indices_tuple` serves every head, and so do `ref_emb`, split likewise, and
    `enqueue_mask`.

    With the divergence it is the loss of the paper:
    `EnsembleLoss(loss, 8, embedding_regularizer=DivergenceLoss(8), embedding_reg_weight=0.5)`.

    Args:
        loss: Any PML loss; if it has an embedding size, pass that of one head. ABE: contrastive.
        num_heads: M. HORDE's code: 8.
        reduction: "mean" over the heads (HORDE's code) or "sum" (ABE, section 3.4).
        **kwargs: `collect_stats`, `embedding_regularizer` and `embedding_reg_weight`, as in any PML loss.

    Shape:
        embeddings: (N, M E), as `AttentionEnsemble` returns them; labels: (N,).

    Raises:
        ValueError: for arguments out of range; for a loss that does not return one number, or reads features; for
            `reducer=` or `distance=`, which belong to it; in the call, for a width that is not a multiple of M, or
            not the one that the loss was made for.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> loss = EnsembleLoss(losses.ContrastiveLoss(), num_heads=4)
        >>> loss(torch.randn(6, 4 * 8), torch.tensor([0, 0, 1, 1, 2, 2])).shape
        torch.Size([])
    """

    feature_names = ()
    takes_reference = True
    nested_feature_loss_hint = (
        "and a head has none of its own; give the ensemble's loss to it (HORDELoss(EnsembleLoss(...), ..., "
        "feature_loss=loss)), or add it beside with MultipleLosses"
    )

    def __init__(
        self, loss: nn.Module, num_heads: int, *, reduction: Reduction = "mean", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        whole_numbers(num_heads=num_heads)
        one_of("reduction", reduction, get_args(Reduction))
        self.check_wrapped("loss", loss)
        self.num_heads = num_heads
        self.reduction = reduction
        self.hold_losses({f"head_{m}": loss for m in range(1, num_heads + 1)})
        self.add_to_recordable_attributes(list_of_names=["num_heads", "reduction"], is_stat=False)

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        heads = split_heads(embeddings, self.num_heads).unbind(dim=1)
        reference: list[dict[str, Any]] = [{} for _ in heads]
        if ref_emb is not embeddings:
            parts = split_heads(ref_emb, self.num_heads).unbind(dim=1)
            reference = [{"ref_emb": part, "ref_labels": ref_labels} for part in parts]
        values = [
            self.sub_loss(name, head, labels, indices_tuple, **others)
            for name, head, others in zip(self.losses, heads, reference, strict=True)
        ]
        total = torch.stack(values).sum()  # section 3.4
        divisor = self.num_heads if self.reduction == "mean" else 1
        return {"loss": already_reduced(total / divisor)}


class DivergenceLoss(FeatureLoss):
    """Divergence loss that keeps the heads of an ensemble apart: a hinge on the similarity of each pair of heads.

        max(0, s(B_p(x_i), B_q(x_j)) - margin)     for all p < q and all i, j, or for i = j only

    It is called like a PML loss, and ignores the labels and any `indices_tuple`. It goes beside the metric
    loss in `MultipleLosses({"metric": EnsembleLoss(loss, 8), "divergence": DivergenceLoss(8)}, weights={...})`,
    or in that loss's slot `embedding_regularizer=`; its weight in HORDE's code is 0.5.

    Args:
        num_heads: M, at least 2.
        margin: Similarity above which two heads are pushed apart: 0.5, the margin 1 of ABE and HORDE's code; see
            above. With a distance instead of a similarity: the distance below which they are pushed apart.
        images: "all", also heads of different images (HORDE's code), or "same" (ABE).
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
        ValueError: for M < 2 or an unknown word; in the call, for a width that is not a multiple of M.

    Example:
        >>> import torch
        >>> DivergenceLoss(2)(torch.tensor([[1.0, 0.0, 0.8, 0.6]]))
        tensor(0.3000)
    """

    feature_names = ()

    def __init__(
        self, num_heads: int, margin: float = 0.5, *, images: Images = "all", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        whole_numbers(2, num_heads=num_heads)
        number("margin", margin)
        one_of("images", images, get_args(Images))
        self.num_heads = num_heads
        self.margin = margin
        self.images = images
        self.add_to_recordable_attributes(
            list_of_names=["num_heads", "margin", "images"], is_stat=False
        )

    def compute_loss(self, embeddings: Tensor, *_: Any) -> dict[str, dict[str, Any]]:
        heads = split_heads(embeddings, self.num_heads)
        first = torch.arange(len(embeddings), device=embeddings.device)
        mat = between_heads(self.distance(heads.flatten(0, 1)), self.num_heads)
        if self.images == "same":
            mat = mat.diagonal(dim1=1, dim2=2)
        else:
            first = first.unsqueeze(1)
        losses = torch.relu(self.distance.margin(self.margin, mat))  # section 3.4, the hinge
        # A reducer that counts values above zero would drop NaN: let one NaN spoil all, as in a mean.
        losses = (losses + 0 * losses.sum()).flatten()
        return {"loss": unreduced(losses, first.expand_as(mat).flatten(), "element", mat.numel())}

    def get_default_distance(self) -> Any:
        return CosineSimilarity()

    def get_default_reducer(self) -> Any:
        return AvgNonZeroReducer()
