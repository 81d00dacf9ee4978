"""Embedding head: turns a trunk's output into embeddings, with stable places where losses read features."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, Self, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from ..features.feature_maps import FeatureModule, masked_mean, to_tokens
from ..functional.checks import check_module, one_of, whole_numbers
from ..functional.precision import full_precision
from .extraction import extract_features
from .trunk_output import last_hidden_state, trunk_output

Pool = Literal["avg", "max", "token"]
DataFormat = Literal["auto", "NCHW", "NHWC"]
Init = Literal["uniform", "glorot"]


class EmbeddingHead(FeatureModule):
    """Pool, [attention,] linear, L2: the embedder of a PML pipeline.

    It takes the output of a trunk: maps (N, C, H, W) or (N, H, W, C) from convolutional and Swin-like networks,
    tokens (N, L, C) from vision transformers. `for_trunk` makes one that fits. Losses attach to its children:

    * `feature_map`: (N, C, H, W), or tokens (N, L, C) without prefix tokens, or the pair (tokens, mask);
    * `pooled`: (N, C), before the attention; without an attention, the input of the linear layer;
    * `attention`: the module that weighs the pooled features, such as `VEMAttention`, or None;
    * `stopgrad_embeddings`: (N, E), the embeddings with a gradient to the linear layer only (while attached to).

    Args:
        in_channels: C.
        embedding_size: E. None: no linear layer, so that the embeddings are the pooled features themselves; after
            the training, `head.fc = pca_init_(nn.Linear(head.in_channels, E), features)` makes one.
        pool: "avg" (HORDE, eq. 10), "max", or "token", the first prefix token of a transformer.
        bias: Give the linear layer a bias; HORDE's code has none.
        normalize: L2-normalise the embeddings. Losses on inner products, such as N-pair's, need them raw.
        init: Start of the linear layer's weights: "uniform", torch's U(-1/sqrt(C), 1/sqrt(C)), or "glorot", as
            in HORDE's code, U(-sqrt(6/(C + E)), sqrt(6/(C + E))).
        num_prefix_tokens: Number of leading tokens that are not image patches (class and register tokens).
        data_format: Layout of 4-D input. "auto" takes the axis of size C, and raises an error if both fit.
        attention: A module (N, C) -> (N, C) between pooling and the linear layer, or a callable that makes one
            for C features: `VEMAttention`, or `functools.partial(VEMAttention, init="zeros")`.

    Raises:
        ValueError: for sizes < 1, unknown words, `pool="token"` without prefix tokens, `bias` or `init` without a
            layer, or input that does not fit.

    Example:
        >>> import torch
        >>> head = EmbeddingHead(96, 32)
        >>> head(torch.randn(2, 96, 7, 7)).shape, head(torch.randn(2, 49, 96)).shape
        (torch.Size([2, 32]), torch.Size([2, 32]))
    """

    def __init__(
        self,
        in_channels: int,
        embedding_size: int | None,
        *,
        pool: Pool = "avg",
        bias: bool = False,
        normalize: bool = True,
        init: Init = "uniform",
        num_prefix_tokens: int = 0,
        data_format: DataFormat = "auto",
        attention: nn.Module | Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        one_of("pool", pool, get_args(Pool))
        one_of("init", init, get_args(Init))
        one_of("data_format", data_format, get_args(DataFormat))
        whole_numbers(in_channels=in_channels)
        if embedding_size is not None:
            whole_numbers(embedding_size=embedding_size)
        elif bias or init != "uniform":
            name, value = ("bias", bias) if bias else ("init", init)
            raise ValueError(
                f"{name}: is for the linear layer, which embedding_size=None leaves out, got {value!r}; leave it "
                "out, or give a size"
            )
        whole_numbers(1 if pool == "token" else 0, num_prefix_tokens=num_prefix_tokens)
        self.in_channels = in_channels
        self.pool = pool
        self.normalize = normalize
        self.num_prefix_tokens = num_prefix_tokens
        self.data_format = data_format
        self.feature_map = nn.Identity()
        self.pooled = nn.Identity()
        if callable(attention) and not isinstance(attention, nn.Module):
            attention = attention(in_channels)
        if attention is not None:
            check_module("attention", attention, "pass one, or a callable such as VEMAttention")
        self.attention = attention
        self.fc: nn.Linear | nn.Identity = nn.Identity()
        if embedding_size is not None:
            self.fc = nn.Linear(in_channels, embedding_size, bias=bias)
            if init == "glorot":
                nn.init.xavier_uniform_(self.fc.weight)
        self.stopgrad_embeddings = nn.Identity()

    @property
    def embedding_size(self) -> int:
        """Width of the embeddings."""
        return self.fc.out_features if isinstance(self.fc, nn.Linear) else self.in_channels

    @classmethod
    def for_trunk(
        cls,
        trunk: nn.Module,
        embedding_size: int | None,
        *,
        image: Tensor | None = None,
        **kwargs: Any,
    ) -> Self:
        """A head that fits a trunk: its channels, layout and prefix tokens, from a trial forward pass.

        Args:
            trunk: Any network that gives a map or tokens, such as a timm model made with `num_classes=0,
                global_pool=""` or a vision model of Hugging Face's transformers.
            embedding_size: E, or None as in the constructor.
            image: A square image (1, 3, H, H), or a text's token numbers (1, L). Default: an image of the size
                that the trunk states, else 224 x 224.
            **kwargs: As in the constructor; they override what is found.

        Raises:
            ValueError: if the trunk does not take the image, or gives no map or tokens.
        """
        output = trunk_output(trunk, image)
        layout = "auto" if output.data_format == "NLC" else output.data_format
        settings = {**output._asdict(), "data_format": layout}
        return cls(settings.pop("channels"), embedding_size, **{**settings, **kwargs})

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Embeddings (N, E) of a trunk's output.

        Args:
            x: (N, C, H, W), (N, H, W, C) or (N, L, C); or an output of Hugging Face's that has `last_hidden_state`.
            mask: (N, L') booleans or integers, such as the `attention_mask` of transformers: not 0 for the patch
                tokens that count. With prefix tokens, (N, L) as well: theirs are left out.
        """
        x = last_hidden_state(x)
        if not isinstance(x, Tensor):
            raise ValueError(
                f"x: expected a trunk's map or tokens, a tensor, got {type(x).__name__}; pass the one to embed"
            )
        if x.ndim == 4:
            x = self._channels_first(x)
        elif x.ndim == 3:
            if mask is not None and mask.shape[1:] == x.shape[1:2]:
                mask = mask[:, self.num_prefix_tokens :]
            prefix, x = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        if self.pool == "token" and x.ndim != 3:
            raise ValueError(
                f'pool: "token" needs tokens (N, L, C), got shape {tuple(x.shape)}; pass pool="avg" for maps'
            )
        features = self.feature_map(x if mask is None else (x, mask))
        patches, mask = to_tokens(features, self.in_channels)
        if self.pool == "token":
            pooled = prefix[:, 0]
        elif self.pool == "max":
            if mask is not None:
                patches = patches.masked_fill(~mask.unsqueeze(2), float("-inf"))
            pooled = patches.amax(dim=1)
            if mask is not None:  # no token counts: zero, as in the average
                pooled = pooled.masked_fill(~mask.any(dim=1, keepdim=True), 0)
        else:
            pooled = masked_mean(patches, mask)  # HORDE, eq. 10
        attended = self.pooled(pooled)
        if self.attention is not None:
            attended = self.attention(attended)
        if self.stopgrad_embeddings._forward_hooks:
            self.stopgrad_embeddings(self._embed(attended.detach()))
        return self._embed(attended)

    def extract_features(
        self, trunk: nn.Module, loader: Iterable[Any], *, progress: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Features (N, C), as the linear layer takes them, and labels (N,) of all images of a loader, on the CPU.

        For `pca_init_` and `whitening_init_`. Trunk and head run in evaluation mode and without gradients; the mode
        of each module is restored.

        Args:
            trunk: The network whose output this head takes.
            loader: Gives batches (images, labels, ...); for the components of a training set, unaugmented ones. On
                several processes, which all call this, either the same loader in each, whose batches they share,
                or one that is divided already, by Accelerate or a `DistributedSampler`; all get all rows.
            progress: Show a bar, on the first process.

        Raises:
            ValueError: if a batch has no labels, or the loader no batch.
        """
        return extract_features(trunk, self, loader, progress=progress)

    def fold(self) -> Self:
        """Merge the attention into the linear layer, in place: the same embeddings from a plain head.

        For after training: `fc` becomes a new layer that no optimizer holds. Returns the head itself.

        Raises:
            ValueError: if there is no attention or no linear layer, or no method `fold(linear)`.
        """
        fold = getattr(self.attention, "fold", None)
        if fold is None:
            raise ValueError(
                "attention: expected one with a method fold(linear), such as VEMAttention, got "
                f"{type(self.attention).__name__}; keep the head as it is"
            )
        if not isinstance(self.fc, nn.Linear):
            raise ValueError(
                "fc: there is no linear layer to merge the attention into; make one: head.fc = "
                "pca_init_(nn.Linear(head.in_channels, E), features)"
            )
        self.fc = fold(self.fc)
        self.attention = None
        return self

    def _embed(self, attended: Tensor) -> Tensor:
        embeddings: Tensor = self.fc(attended)
        if self.normalize:  # in half precision the norm of a tiny vector is 0, and 0/0 is nan
            embeddings = F.normalize(full_precision(embeddings)).to(embeddings.dtype)
        return embeddings

    def _channels_first(self, x: Tensor) -> Tensor:
        layout = self.data_format
        if layout == "auto":
            axes: dict[DataFormat, int] = {"NCHW": 1, "NHWC": 3}
            fits = [name for name, axis in axes.items() if x.shape[axis] == self.in_channels]
            if len(fits) != 1:
                raise ValueError(
                    f"x: expected one axis of {self.in_channels} channels, (N, C, H, W) or (N, H, W, C), got "
                    f"shape {tuple(x.shape)}; pass data_format= or in_channels= to match the trunk"
                )
            layout = fits[0]
        return x if layout == "NCHW" else x.permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"pool={self.pool!r}, normalize={self.normalize}"
