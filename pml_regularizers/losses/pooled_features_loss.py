"""A metric loss on the pooled features, at powers of their cosines.

    L = sum_k w_k L_k        L_k: a loss for which the similarity of images i and j is cos(x_i, x_j)^k,
                             x their pooled features

Ours, from no paper: HORDE (ICCV 2019) without positions, projections and parameters. Its fixed projections estimate
the same powers where an image has one position; a loss computes the matrix of cosines anyway.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from ..distributed import gather_features
from ..features.feature_loss import already_reduced
from ..functional.checks import weights
from .per_output_loss import PerOutputLoss
from .tensor_product_distances import refuse_vectors, with_power


class PooledFeaturesLoss(PerOutputLoss):
    """A metric loss on the pooled features, at powers of their cosines: a term beside the loss of the embeddings.

        MultipleLosses([loss, PooledFeaturesLoss(ProxyAnchorLoss(num_classes, in_channels)).attach(head)])

    The first power trains the parameters of the given loss, such as proxies, and each further one a copy of them:
    **give `parameters()` to an optimizer**. A mined `indices_tuple` serves all powers.

    Args:
        loss: Any PML loss on cosines or on Euclidean distances of normalised vectors, which are
            sqrt(2 - 2 cos^k). A trial refuses those that read vectors, or their lengths, otherwise than by their
            `distance`, such as `AngularLoss` and `LargeMarginSoftmaxLoss`. One with proxies or class weights must
            have them as wide as the features.
        powers: The powers k. Default: those that helped in our studies. An even power cannot tell opposite features
            apart: take odd ones for ViT, ConvNeXt and text encoders, whose features are of both signs.
            With (1,), it is the loss itself on the pooled features, and any PML loss will do.
        power_weights: w_k, a number for all powers or one for each.
        **kwargs: `collect_stats`, `embedding_regularizer` and `embedding_reg_weight`, as in any PML loss.

    Shape:
        embeddings (N, E), labels (N,), features: pooled (N, C).
        Let `attach(head)` record the head's `pooled`; or call this loss by itself and pass `features=`, which
        `MultipleLosses` does not hand on. The embeddings' values do not count.

    Raises:
        ValueError: for arguments out of range, a loss on other distances, or that does not return one number or
            reads features; for `reducer=` or `distance=`, which belong to it; in the call, for features that are no
            matrix.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning import losses
        >>> loss, term = losses.ProxyAnchorLoss(2, 8), PooledFeaturesLoss(losses.ProxyAnchorLoss(2, 32))
        >>> embeddings, labels = torch.randn(4, 8), torch.tensor([0, 0, 1, 1])
        >>> (loss(embeddings, labels) + term(embeddings, labels, features=torch.rand(4, 32))).shape
        torch.Size([])
    """

    feature_names = ("pooled",)
    nested_feature_loss_hint = "itself; add it beside this one with MultipleLosses"
    _argument = "loss"  # the one that has the loss of the features
    _signs_are_told = False

    def __init__(
        self,
        loss: nn.Module,
        *,
        powers: Sequence[int] = (2, 3),
        power_weights: float | Sequence[float] = 1.0,
        **kwargs: Any,
    ) -> None:
        self.powers = _different(powers)  # before super().__init__: PML asks for the sub-loss names
        super().__init__(**kwargs)
        self.power_weights = weights("power_weights", power_weights, len(self.powers))
        name = self._argument
        self.check_wrapped(name, loss)
        raised = [with_power(name, loss, k, shared=not i) for i, k in enumerate(self.powers)]
        if self.powers != [1]:
            refuse_vectors(name, raised[0])
        self.hold_losses({f"power_{k}": x for k, x in zip(self.powers, raised, strict=True)})
        self.add_to_recordable_attributes(list_of_names=["powers", "power_weights"], is_stat=False)

    def _sub_loss_names(self) -> list[str]:
        return [f"power_{k}" for k in self.powers]

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, *_: Any
    ) -> dict[str, dict[str, Any]]:
        features = self.features
        if features.ndim != 2:
            raise ValueError(
                f"features: expected pooled features (N, C), got shape {tuple(features.shape)}; attach to an "
                'EmbeddingHead, write attach(module, embedder=head, pool="avg"), or pool them'
            )
        self._tell_signs(features)
        own = features if self.powers == [1] else in_range(features)
        (rows,) = gather_features([own], embeddings)
        return {
            name: already_reduced(weight * self.sub_loss(name, rows, labels, indices_tuple))
            for k, weight in zip(self.powers, self.power_weights, strict=True)
            for name in [f"power_{k}"]
        }

    def _tell_signs(self, features: Tensor) -> None:
        """Warn once, in the first call, of an even power on features of both signs."""
        even = [k for k in self.powers if k % 2 == 0]
        if self._signs_are_told or not even or torch.compiler.is_compiling() or is_fake(features):
            return
        self._signs_are_told = True
        signs = [float((sign * features > 0).float().mean()) for sign in (1, -1)]
        if min(signs) > 0.1:
            warnings.warn(
                f"powers: {even[0]} is even and cannot tell opposite features apart, and of these features "
                f"{signs[1]:.0%} are negative, as in ViT, ConvNeXt and text encoders; take odd powers, such as "
                "powers=(1, 3), or read features behind a ReLU",
                stacklevel=2,
            )


def _different(powers: Any) -> list[int]:
    """The powers, if they can be."""
    numbers = list(powers) if isinstance(powers, Iterable) else []
    whole = all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in numbers)
    if not numbers or not whole or len({*numbers}) < len(numbers):
        raise ValueError(f"powers: expected different whole numbers above 0, got {powers!r}")
    return numbers


def in_range(features: Tensor) -> Tensor:
    """Rows scaled, without a change of their directions, where their squares would leave the range of the dtype."""
    largest = features.detach().abs().amax(dim=1, keepdim=True)
    limits = torch.finfo(features.dtype)
    safe = (largest > limits.tiny**0.25) & (largest < limits.max**0.25)
    return features / torch.where(safe | (largest == 0) | ~largest.isfinite(), 1, largest)
