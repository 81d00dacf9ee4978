"""HORDE, a high-order regularizer for deep embeddings (Jacob, Picard, Histace, Klein, ICCV 2019).

    L = L_DML(embeddings) + sum_{k=2..K} w_k L_k(e_k)      eqs. 7, 9; all w_k = 1
    e_k = E_k z_k / |E_k z_k|                              z_k: `moments.py`; E_k: (d, E), without bias

The same metric loss acts on the embeddings and on every order's moments, so that the deep features of a class
follow one distribution. At test time HORDE costs nothing, unless you use the descriptor of the paper's dagger
rows: all orders concatenated, then PCA to the embedding size (section 4).

Differs from the paper: the L2 normalisation of every order comes from the authors' code; the text does not
mention it. `normalize=False` leaves it out.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._loss_copies import WrapperLoss
from ._pca import is_pca, principal_components
from ._precision import full_precision
from ._summed_products import Activations
from .distributed import gather_features
from .feature_loss import already_reduced, check_width
from .feature_tap import Features
from .moments import FIXED, HighOrderMoments, Init, Products, Projections


class HORDELoss(WrapperLoss):
    """A metric loss, regularised by the same loss on the high-order moments of the deep features.

    It owns the projections and the embeddings of the orders: **give `parameters()` to an optimizer**.
    The base loss is deep-copied, one copy per order, order 1 included; the copies are trained, the
    original is not. A mined `indices_tuple` serves every order.

    Args:
        loss: Any PML loss. HORDE's Table 1 uses contrastive, triplet and binomial deviance.
        in_channels: C, channels of the feature map.
        embedding_size: E, width of the embeddings, and of every order's. HORDE, section 4: 512.
        order: Highest moment K, counting the embeddings as order 1. HORDE, section 4: 5 on CUB and Cars,
            4 on SOP and In-Shop.
        moment_dim: d, width of the moments before their embedding. HORDE, section 4: 8192. The cost, K
            matrices (C, d), grows with it.
        projections: "cascaded" (the paper's method), "independent" (its Table 4), "random" (its
            Table 3) or "sketch" (fast); see `HighOrderMoments`.
        embed_orders: Give each order 2..K a linear embedding (d -> E). Default: yes for trained projections, no
            for fixed ones, as in the paper, unless the loss has proxies, class weights or a memory that fit
            vectors of width E only. Without embeddings, orders 2..K are d wide.
        normalize: L2-normalise every order, as the authors' code does. Without it, features of size s give an
            order k of size s^k, whose squares must fit float32: s below about 1e3 at order 5.
        order_weights: w_2 .. w_K: K - 1 numbers, one number for all orders, "sum" (all 1, eq. 7) or "mean" (all
            1/(K-1), the authors' code for ensembles).
        init: Start of trained projections, "glorot" (the authors' code) or "rademacher" (Algorithm 1).
        first_loss: Loss of order 1 if it differs from that of the other orders, as on the ensembles of Table 1:
            `EnsembleLoss`. Deep-copied too. Default: `loss`.
        activations: "store" what the backward pass needs (fast) or "recompute" it (less memory); `repr` and
            `activation_bytes` show how much it is. See `HighOrderMoments`.
        products: "full", or "bfloat16" for only the matrix products. See `HighOrderMoments`.
        **kwargs: `collect_stats`, `embedding_regularizer` and `embedding_reg_weight`, as in any PML loss.

    Shape:
        embeddings (N, E), labels (N,), features: (N, C, H, W), (N, L, C) or the pair (tokens, mask).
        Pass the features as `features=`, or let `attach(module)` record them.

    Raises:
        ValueError: for arguments out of range; for a base loss that does not return one number
            (DoNothingReducer), that reads features itself, or whose own parameters do not fit the
            width of every order; for `reducer=` or `distance=`, which belong to the base loss.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> loss = HORDELoss(losses.ContrastiveLoss(), 32, 8, order=3, moment_dim=64)
        >>> embeddings, labels = torch.randn(4, 8), torch.tensor([0, 0, 1, 1])
        >>> loss(embeddings, labels, features=torch.randn(4, 32, 7, 7)).shape
        torch.Size([])
    """

    cannot_read = (
        "itself and cannot act on moments; add it beside HORDE with "
        'MultipleLosses({"horde": horde, "other": other})'
    )

    def __init__(
        self,
        loss: nn.Module,
        in_channels: int,
        embedding_size: int,
        *,
        order: int = 5,
        moment_dim: int = 8192,
        projections: Projections = "cascaded",
        embed_orders: bool | None = None,
        normalize: bool = True,
        order_weights: float | Sequence[float] | Literal["sum", "mean"] = "sum",
        init: Init = "glorot",
        first_loss: nn.Module | None = None,
        activations: Activations = "store",
        products: Products = "full",
        **kwargs: Any,
    ) -> None:
        self.order = order  # before super().__init__: PML asks for the sub-loss names there
        super().__init__(**kwargs)
        if embedding_size < 1:
            raise ValueError(f"embedding_size: expected at least 1, got {embedding_size}")
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
            activations=activations,
            products=products,
            scale=not normalize,
        )
        self.order_weights = _weights(order_weights, order)
        self.check_wrapped("loss", loss)
        if embed_orders is None:
            embed_orders = projections not in FIXED or not _fits(loss, moment_dim, embedding_size)
        width = embedding_size if embed_orders else moment_dim
        widths = {embedding_size, width} if first_loss is None else {width}
        _check_fits("loss", loss, widths, embedding_size)
        if first_loss is None:
            first_loss = loss
        else:
            self.check_wrapped("first_loss", first_loss)
            _check_fits("first_loss", first_loss, {embedding_size}, embedding_size)
        self.embeddings = nn.ModuleDict(
            {
                f"order_{k}": _embedding(moment_dim, width) if embed_orders else nn.Identity()
                for k in range(2, order + 1)
            }
        )
        self.hold(
            {name: first_loss if name == "order_1" else loss for name in self._sub_loss_names()}
        )
        self.register_buffer("pca_mean", None)
        self.register_buffer("pca_components", None)
        self.add_to_recordable_attributes(
            list_of_names=["order", "moment_dim", "embedding_size", "order_weights"], is_stat=False
        )

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> dict[str, dict[str, Any]]:
        self.check_tuples(indices_tuple)
        check_width(embeddings, self.embedding_size)
        orders = self.order_embeddings(self.features)
        # Phase 1 ends here: these vectors, not the maps, go to the other processes, in one exchange.
        gathered = gather_features(orders, embeddings)
        weights = [1.0, *self.order_weights]
        return {  # eq. 7, and with order 1 the sum of eq. 9
            name: already_reduced(weight * self.part(name, vectors, labels, indices_tuple))
            for name, weight, vectors in zip(
                self.losses, weights, [embeddings, *gathered], strict=True
            )
        }

    def order_embeddings(self, features: Features) -> list[Tensor]:
        """Inputs of the losses of orders 2..K: K - 1 tensors (N, E), or (N, d) without embeddings."""
        orders = [
            F.linear(z, embedding.weight.to(z.dtype)) if isinstance(embedding, nn.Linear) else z
            for embedding, z in zip(self.embeddings.values(), self.moments(features), strict=True)
        ]
        return [F.normalize(order) for order in orders] if self.normalize else orders

    def activation_bytes(self, images: int, positions: int) -> int:
        """Bytes that a batch keeps for the backward pass; see `HighOrderMoments.activation_bytes`."""
        return self.moments.activation_bytes(images, positions)

    def extra_repr(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.parameters())
        return (
            f"embedding_size={self.embedding_size}, normalize={self.normalize}, parameters={parameters:,}, "
            f"activations={self.activation_bytes(1, 1) / 1024:,.0f} KiB per position of an image"
        )

    @torch.no_grad()
    def descriptor(self, embeddings: Tensor, features: Features | None = None) -> Tensor:
        """Return all orders of a batch, L2-normalised and concatenated: (N, E + (K-1) E), or E + (K-1) d wide.

        The paper reduces them to the embedding size by PCA: `fit_pca`, then `reduce`.

        Args:
            embeddings: (N, E), the network's output: order 1.
            features: As in the loss; default: what the tap recorded in the last forward pass, which must have
                given these embeddings.

        Raises:
            ValueError: if the sizes do not fit.
            MissingFeaturesError: see `FeatureLoss`.
        """
        embeddings = embeddings.detach()
        check_width(embeddings, self.embedding_size)
        with self.reading(embeddings, features):
            orders = [full_precision(embeddings), *self.order_embeddings(self.features)]
            return torch.cat([F.normalize(order) for order in orders], dim=1)

    def split_orders(self, descriptors: Tensor) -> dict[str, Tensor]:
        """The orders of descriptors (M, D): {"order_1": (M, E), ..., "order_K": (M, E or d)}.

        Raises:
            ValueError: unless they are as wide as `descriptor` makes them.
        """
        width, left = divmod(descriptors.shape[-1] - self.embedding_size, self.order - 1)
        if descriptors.ndim != 2 or left or width not in (self.embedding_size, self.moment_dim):
            raise ValueError(
                f"descriptors: expected the output of descriptor(), got shape {tuple(descriptors.shape)}"
            )
        widths = [self.embedding_size] + [width] * (self.order - 1)
        orders = torch.split(descriptors, widths, dim=1)
        return dict(zip(self._sub_loss_names(), orders, strict=True))

    @torch.no_grad()
    def fit_pca(self, descriptors: Tensor, size: int | None = None) -> None:
        """Learn the PCA that `reduce` applies; it is saved with the loss's `state_dict`.

        The paper does not say on which images it was fitted; use the training set, never tested images. The
        descriptors are centred, but not whitened and not normalised again.

        Args:
            descriptors: (M, D), `descriptor` of the training images.
            size: Number of principal components to keep; default: `embedding_size`.

        Raises:
            ValueError: unless there are more than `size` descriptors, and at least `size` dimensions.
        """
        size = self.embedding_size if size is None else size
        if descriptors.ndim != 2 or not 1 <= size <= min(
            len(descriptors) - 1, descriptors.shape[1]
        ):
            raise ValueError(
                f"descriptors: expected a matrix of more than {size} rows and at least {size} columns "
                f"(size={size}), got shape {tuple(descriptors.shape)}"
            )
        self.pca_mean, self.pca_components = principal_components(descriptors, size)

    def reduce(self, descriptors: Tensor) -> Tensor:
        """Map descriptors (M, D) to their principal components (M, size).

        Raises:
            ValueError: before `fit_pca`.
        """
        if self.pca_components is None:
            raise ValueError(
                "reduce: no PCA is fitted; call fit_pca(descriptors of training images)"
            )
        mean: Tensor = self.pca_mean.to(descriptors)
        components: Tensor = self.pca_components.to(descriptors)
        with torch.autocast(descriptors.device.type, enabled=False):
            return (descriptors - mean) @ components

    def _sub_loss_names(self) -> list[str]:
        return [f"order_{k}" for k in range(1, self.order + 1)]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        _, strict, *_, errors = args
        names = ("pca_mean", "pca_components")  # exist once fitted, in the size chosen then
        found = [state_dict.get(prefix + name) for name in names]
        if not is_pca(*found):
            came = " and ".join(
                "nothing" if x is None else f"{tuple(x.shape)} {x.dtype}" for x in found
            )
            errors.append(
                f"{prefix}pca_mean, pca_components: expected the floating (D,) and (D, size) of one fit, got {came}"
            )
            return
        for name, saved in zip(names, found, strict=True):
            if saved is None and not strict:
                continue
            device = next(iter(self.moments.state_dict().values())).device
            setattr(self, name, None if saved is None else torch.empty_like(saved, device=device))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _embedding(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.xavier_uniform_(linear.weight)
    return linear


def _weights(order_weights: float | Sequence[float] | str, order: int) -> list[float]:
    count = order - 1
    if isinstance(order_weights, (int, float)):
        return [float(order_weights)] * count
    if isinstance(order_weights, str):
        words = {"sum": 1.0, "mean": 1.0 / count}
        if order_weights not in words:
            raise ValueError(
                f'order_weights: expected "sum", "mean", a number or {count} of them, got {order_weights!r}'
            )
        return [words[order_weights]] * count
    if len(order_weights) != count:
        raise ValueError(
            f"order_weights: expected {count} numbers, for orders 2 to {order}, got {len(order_weights)}"
        )
    return [float(weight) for weight in order_weights]


def _is_meta(loss: nn.Module) -> bool:
    """True if nothing can be computed: some of PML's losses keep numbers on the device of the moment."""
    # An empty tensor tells: torch 2.4's get_default_device() does not see `with torch.device("meta")`.
    tensors = [torch.empty(0), *loss.parameters(), *loss.buffers()]
    return any(tensor.is_meta for tensor in tensors)


def _fits(loss: nn.Module, width: int, other: int) -> bool:
    """True if the loss takes vectors of this width; on the meta device, if nothing in it has the other one."""
    if _is_meta(loss):
        return not any(other in tensor.shape for tensor in [*loss.parameters(), *loss.buffers()])
    return _trial(loss, width) is None


def _check_fits(name: str, loss: nn.Module, widths: Iterable[int], embedding_size: int) -> None:
    for width in widths:
        if (error := _trial(loss, width)) is not None:
            wider = "" if width == embedding_size else ", and embed_orders=True to HORDELoss"
            raise ValueError(
                f"{name}: a trial call of {type(loss).__name__} with 8 embeddings of width {width} in two "
                f"classes failed ({type(error).__name__}: {error}); where it has an embedding_size, pass "
                f"{embedding_size}{wider}"
            ) from error


def _trial(loss: nn.Module, width: int) -> Exception | None:
    """The error of a call of a copy, which must return one number at this width; none on the meta device."""
    if _is_meta(loss):
        return None
    state = [*loss.parameters(), *loss.buffers()]
    device = state[0].device if state else torch.device("cpu")
    labels = torch.arange(8, device=device) % 2
    vectors = torch.eye(8, width, device=device)
    with torch.device(device), torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            copy.deepcopy(loss)(vectors, labels, None).view(())
        except Exception as error:
            return error
    return None
