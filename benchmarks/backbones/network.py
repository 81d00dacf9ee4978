"""timm's model interface for networks that are a chain of layers from the image to one feature map."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from timm.layers import ClassifierHead
from timm.models import build_model_with_cfg, checkpoint
from torch import Tensor, nn


class Network(nn.Module):
    """A chain of layers and a classifier.

    Gradient checkpointing keeps only the layers' outputs (a part "stem" counts as one layer) and computes the
    rest again. As in all of timm, a batch norm that is not frozen then counts each batch twice in its running
    statistics.

    Args:
        parts: Name -> layers, in the order of the chain.
        taps: (channels, stride, module) of the last feature map of each size.
        num_classes: Number of classes; 0: no classifier.
        global_pool: timm's name of a pooling, or "" for none.
        drop_rate: Dropout between the pooling and the classifier; none without a classifier.
    """

    def __init__(
        self,
        parts: dict[str, nn.Sequential],
        taps: Sequence[tuple[int, int, str]],
        *,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.drop_rate = drop_rate
        self.grad_checkpointing = False
        self.feature_info = [
            dict(zip(("num_chs", "reduction", "module"), tap, strict=True)) for tap in taps
        ]
        self.num_features = taps[-1][0]
        for name, layers in parts.items():
            self.add_module(name, layers)
        self.head = ClassifierHead(
            self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The linear layer, or an identity."""
        return self.head.fc

    def forward_features(self, x: Tensor) -> Tensor:
        """Image -> feature map."""
        parts = [(name, part) for name, part in self.named_children() if name != "head"]
        for layer in chain(*([part] if name == "stem" else part for name, part in parts)):
            x = checkpoint(layer, x) if self.grad_checkpointing else layer(x)
        return x

    def forward_head(self, x: Tensor) -> Tensor:
        """Feature map -> logits; without a classifier, its input before dropout."""
        return self.head(x) if self.num_classes else self.head.global_pool(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def create(
    build: Callable[..., nn.Module],
    name: str,
    convert: Callable[..., Any],
    pretrained: bool,
    **kwargs: Any,
) -> Any:
    """A timm model; `convert` turns published weights into the network's own."""
    kwargs["feature_cfg"] = {"flatten_sequential": True}  # a copy: timm writes into it
    return build_model_with_cfg(build, name, pretrained, pretrained_filter_fn=convert, **kwargs)
