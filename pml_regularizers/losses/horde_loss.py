"""HORDE, a high-order regularizer for deep embeddings (Jacob, Picard, Histace, Klein, ICCV 2019).

    L   = L_DML(embeddings) + sum_{k=2..K} w_k L_k(e_k)     eqs. 7, 9; all w_k = 1
    z_k = mean over positions of phi_k(x)                   eq. 8; phi_k: `HighOrderMoments`
    e_k = z_k / |z_k|, or E_k z_k / |E_k z_k|               E_k: (d, E), without bias

The same metric loss acts on the embeddings, order 1, and on the moments of the deep features, so that the features
of a class follow one distribution. Nothing remains at test time, except in the descriptor of the paper's dagger
rows: all orders, concatenated, and reduced to the embedding size by PCA (section 4).

Differs from the paper:

* The defaults are what helped in our studies (docs/horde.md): tensor sketches, orders 2 and 3, d = 1024, no E_k.
* Every order is L2-normalised, and E_k starts Glorot-uniform, as in the authors' code; the text mentions neither.
* `order_weights` other than 1 are ours, except for "mean", the authors' code for ensembles.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..distributed import gather_features
from ..features.feature_loss import already_reduced, check_width
from ..features.feature_tap import Features
from ..functional.checks import one_of, weights, whole_numbers
from ..functional.precision import full_precision
from .high_order_moments import FIXED, HighOrderMoments, Init, Projections
from .per_output_loss import PerOutputLoss


class HORDELoss(PerOutputLoss):
    """A metric loss, regularised by the same loss on the high-order moments of the deep features.

    Order 1, the embeddings, has the loss itself, and each other order a copy. A mined `indices_tuple` serves every
    order, and so does `enqueue_mask`, where features of all rows are passed.

    The paper's configuration is `HORDELoss(loss, C, E, projections="cascaded", order=5, moment_dim=8192)`. It
    trains the projections and the embeddings of the orders: **give `parameters()` to an optimizer**, also where the
    base loss has parameters.

    Args:
        loss: Any PML loss. HORDE's Table 1 uses contrastive, triplet and binomial deviance.
        in_channels: C, channels of the feature map.
        embedding_size: E, width of the embeddings. HORDE, section 4: 512.
        order: Highest moment K, counting the embeddings as order 1.
        moment_dim: d, width of the moments.
        projections: "sketch" (fast, fixed), "cascaded" (the paper's), "independent" (its Table 4) or "random" (its
            Table 3). `HighOrderMoments` has the sources of these three, and `init`, `checkpoint`, `matmul_dtype`.
        embed_orders: Give each order 2..K a linear embedding (d -> E). Without it, they are d wide, which a loss
            with proxies, class weights or a memory of width E cannot take. Default: yes for trained
            projections, no for fixed ones, as in the paper.
        normalize: L2-normalise every order, as the authors' code does. Without it, features of size s give an
            order k of size s^k, whose squares must fit float32: s below about 1e3 at order 5.
        order_weights: w_2 .. w_K: K - 1 numbers, one number for all orders, "sum" (all 1, eq. 7) or "mean" (all
            1/(K-1), the authors' code for ensembles).
        feature_loss: Loss of the orders 2..K, if another than the embeddings', as on the ensembles of Table 1,
            whose `loss` is an `EnsembleLoss`. Order 2 has it itself.
        **kwargs: `collect_stats`, `embedding_regularizer` and `embedding_reg_weight`, as in any PML loss.

    Shape:
        embeddings (N, E), labels (N,), features: (N, C, H, W), (N, L, C) or the pair (tokens, mask).
        Pass the features as `features=`, or let `attach(module)` record them.

    Raises:
        ValueError: for arguments out of range; for a base loss that does not return one number or reads features;
            for `reducer=` or `distance=`, which belong to it; in the call, for a base loss of another width.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> loss = HORDELoss(losses.ContrastiveLoss(), in_channels=32, embedding_size=8)
        >>> embeddings, labels = torch.randn(4, 8), torch.tensor([0, 0, 1, 1])
        >>> loss(embeddings, labels, features=torch.randn(4, 32, 7, 7)).shape
        torch.Size([])
    """

    nested_feature_loss_hint = (
        "itself and cannot act on moments; add it beside HORDE with "
        'MultipleLosses({"horde": horde, "other": other})'
    )

    def __init__(
        self,
        loss: nn.Module,
        in_channels: int,
        embedding_size: int,
        *,
        order: int = 3,
        moment_dim: int = 1024,
        projections: Projections = "sketch",
        embed_orders: bool | None = None,
        normalize: bool = True,
        order_weights: float | Sequence[float] | Literal["sum", "mean"] = "sum",
        init: Init = "glorot",
        feature_loss: nn.Module | None = None,
        checkpoint: bool = False,
        matmul_dtype: Literal["bfloat16"] | None = None,
        **kwargs: Any,
    ) -> None:
        whole_numbers(2, order=order)
        self.order = order  # before super().__init__: PML asks for the sub-loss names there
        super().__init__(**kwargs)
        whole_numbers(embedding_size=embedding_size)
        self.embedding_size = embedding_size
        self.moment_dim = moment_dim
        self.normalize = normalize
        # With a bias-free embedding or none, L2 normalisation cancels the scale s^k of the moments.
        self.moments = HighOrderMoments(
            in_channels,
            order=order,
            moment_dim=moment_dim,
            projections=projections,
            init=init,
            checkpoint=checkpoint,
            matmul_dtype=matmul_dtype,
            scale=not normalize,
        )
        words = {"sum": 1.0, "mean": 1 / (order - 1)}
        if isinstance(order_weights, str):
            order_weights = words[one_of("order_weights", order_weights, words)]
        self.order_weights = weights("order_weights", order_weights, order - 1)
        if embed_orders is None:
            embed_orders = projections not in FIXED
        if not embed_orders:
            self.width_hint = "; embed_orders=True makes every order as wide as the embeddings"
        names = self._sub_loss_names()
        self.embeddings = nn.ModuleDict({name: nn.Identity() for name in names[1:]})
        for name in names[1:] if embed_orders else ():
            self.embeddings[name] = embedding = nn.Linear(moment_dim, embedding_size, bias=False)
            nn.init.xavier_uniform_(embedding.weight)
        further = loss if feature_loss is None else feature_loss
        self.check_wrapped("loss", loss)
        self.check_wrapped("feature_loss", further)
        self.hold_losses(dict.fromkeys(names, further) | {"order_1": loss})
        self.add_to_recordable_attributes(
            list_of_names=["order", "moment_dim", "embedding_size", "order_weights"], is_stat=False
        )

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, *_: Any
    ) -> dict[str, dict[str, Any]]:
        check_width(embeddings, self.embedding_size)
        orders = self.order_embeddings(self.features)
        # Phase 1 ends here: these vectors, not the maps, go to the other processes, in one exchange.
        gathered = gather_features(orders, embeddings)
        return {  # eq. 7, and with order 1 the sum of eq. 9
            name: already_reduced(value if weight == 1 else weight * value)
            for name, weight, vectors in zip(
                self.losses, [1.0, *self.order_weights], [embeddings, *gathered], strict=True
            )
            for value in [self.sub_loss(name, vectors, labels, indices_tuple)]
        }

    def order_embeddings(self, features: Features) -> list[Tensor]:
        """Inputs of the losses of orders 2..K: K - 1 tensors (N, E), or (N, d) without embeddings."""
        orders = [
            F.linear(z, embedding.weight.to(z.dtype)) if isinstance(embedding, nn.Linear) else z
            for embedding, z in zip(self.embeddings.values(), self.moments(features), strict=True)
        ]
        return list(F.normalize(torch.stack(orders), dim=2)) if self.normalize else orders

    def extra_repr(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.parameters())
        return f"embedding_size={self.embedding_size}, normalize={self.normalize}, parameters={parameters:,}"

    @torch.no_grad()
    def descriptor(self, embeddings: Tensor, features: Features | None = None) -> Tensor:
        """Return all orders of a batch, L2-normalised and concatenated: (N, E + (K-1) E), or E + (K-1) d wide.

        The paper reduces them to the embedding size by a PCA, such as scikit-learn's, of the training images.
        Embeddings (N, E) and features, also from a tap, are passed as in the loss, whose errors this raises.
        """
        embeddings = embeddings.detach()
        check_width(embeddings, self.embedding_size)
        with self.reading(embeddings, features):
            orders = [full_precision(embeddings), *self.order_embeddings(self.features)]
            return torch.cat([F.normalize(order) for order in orders], dim=1)

    def split_orders(self, descriptors: Tensor) -> dict[str, Tensor]:
        """The orders of descriptors (M, D): {"order_1": (M, E), ..., "order_K": (M, E or d)}."""
        embedded = isinstance(self.embeddings["order_2"], nn.Linear)
        width = self.embedding_size if embedded else self.moment_dim
        widths = [self.embedding_size] + [width] * (self.order - 1)
        if descriptors.ndim != 2 or descriptors.shape[1] != sum(widths):
            raise ValueError(
                f"descriptors: expected (M, {sum(widths)}), as `descriptor` returns them, got shape "
                f"{tuple(descriptors.shape)}; pass them before a PCA"
            )
        orders = torch.split(descriptors, widths, dim=1)
        return dict(zip(self._sub_loss_names(), orders, strict=True))

    def _sub_loss_names(self) -> list[str]:
        return [f"order_{k}" for k in range(1, self.order + 1)]
