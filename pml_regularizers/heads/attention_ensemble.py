r"""Attention-based ensemble, ABE-M (Kim, Goyal, Chawla, Lee, Kwon, "Attention-based ensemble for deep metric
learning", ECCV 2018), the ensemble of HORDE's Table 1.

    B_m(x) = G(S(x) * A_m(S(x)))                                    embedding of head m, section 3.3

S is the stem and G the body with its embedding layer, both shared by all M heads; A_m is a sigmoid mask as
large as the map S(x); `*` is the element-wise product. `ensemble_loss.py` has the losses.

HORDE reads the M maps that leave the body, concatenated and reduced to 1024 channels by a 1x1 convolution (the
authors' code); its order 1 is the ensemble's own loss. The defaults come from HORDE's code.
"""

import copy
import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..features.feature_maps import FeatureModule
from ..functional.checks import check_module, whole_numbers
from .embedding_head import EmbeddingHead
from .split_trunk import split_trunk
from .trunk_output import layout, trial_image, try_out


def split_heads(embeddings: Tensor, num_heads: int) -> Tensor:
    """The output (N, M E) of an ensemble -> its heads (N, M, E) of unit length; a ValueError for other widths."""
    if embeddings.ndim != 2 or embeddings.shape[1] % num_heads:
        raise ValueError(
            f"embeddings: expected (N, {num_heads} x E), the heads' embeddings one after the other, got shape "
            f"{tuple(embeddings.shape)}; pass num_heads=... to match the network"
        )
    width = embeddings.shape[1] // num_heads
    return embeddings.reshape(len(embeddings), num_heads, width) * math.sqrt(num_heads)


def between_heads(matrix: Tensor, num_heads: int) -> Tensor:
    """The blocks of a matrix over all heads of all images, one for each pair of heads p < q.

    (N M, N M), image-major as `heads.flatten(0, 1)` is -> (M (M-1) / 2, N, N), head p of the first image against
    head q of the second.
    """
    p, q = torch.triu_indices(num_heads, num_heads, 1, device=matrix.device)
    images = len(matrix) // num_heads
    blocks = matrix.view(images, num_heads, images, num_heads).permute(1, 3, 0, 2)
    return blocks[p, q]


class AttentionEnsemble(FeatureModule):
    """One network that gives M embeddings of an image, each through an attention mask of its own.

    Images -> stem -> map; M masks of the map; each masked map -> body -> pool, linear, L2. The output is one
    embedding: the heads' unit vectors, one after the other, divided by sqrt(M), so that a cosine is the mean of the
    heads' cosines, and a squared distance the mean of theirs. HORDE attaches to the child `feature_map`: the M maps
    that leave the body, concatenated (N, M D, h, w) and reduced to `map_channels`, computed only while something is
    attached.

    The body runs once on all N M masked maps: in training mode, its batch normalisation uses the statistics of all
    images and heads together. (GoogLeNet, which the paper uses, has none.)

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
        ValueError: for an embedding size that is not a multiple of M.

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
        attention_channels = stem_channels if attention_channels is None else attention_channels
        whole_numbers(num_heads=num_heads, embedding_size=embedding_size)
        whole_numbers(stem_channels=stem_channels, body_channels=body_channels)
        whole_numbers(attention_channels=attention_channels)
        if embedding_size % num_heads:
            raise ValueError(
                f"embedding_size: expected a multiple of num_heads={num_heads}, got {embedding_size}"
            )
        self.embedding_size = embedding_size
        self.num_heads = num_heads
        check_module("stem", stem)
        check_module("body", body)
        self.stem = stem
        self.body = body
        self.attention = nn.Identity() if attention is None else attention
        self.mask = nn.Conv2d(attention_channels, num_heads * stem_channels, 1)
        self.head = EmbeddingHead(body_channels, embedding_size // num_heads, data_format="NCHW")
        concatenated = num_heads * body_channels
        self.reduction: nn.Module = nn.Identity()
        if map_channels is not None:
            whole_numbers(map_channels=map_channels)
            self.reduction = nn.Conv2d(concatenated, map_channels, 1, bias=False)
            nn.init.xavier_uniform_(self.reduction.weight)
        self.feature_map = nn.Identity()
        self.map_channels = concatenated if map_channels is None else map_channels
        # Glorot, as ABE's section 4 and HORDE's code start them; each head's mask is a layer of its own.
        assert isinstance(self.head.fc, nn.Linear)
        nn.init.xavier_uniform_(self.head.fc.weight)
        for weight in self.mask.weight.data.chunk(num_heads):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.mask.bias)  # type: ignore[arg-type]

    @classmethod
    def for_trunk(
        cls,
        trunk: nn.Module,
        stage: str,
        *,
        attention_stage: str | None = None,
        image: Tensor | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make an ensemble by cutting a trunk in two; a trial forward pass finds the channels.

        Args:
            trunk, stage: See `split_trunk`; the output of the stage is masked.
            attention_stage: Copy the trunk from there to this module as `attention`. Its map must be as
                large as the stage's. The paper's: inception 4e.
            image: An image (1, 3, H, W). Default: of the size that the trunk states, else 224 x 224.
            **kwargs: As in the constructor; they override what is found.

        Raises:
            ValueError: if the trunk cannot be cut there, or does not take the image.
        """
        stem, body = split_trunk(trunk, stage)
        x = try_out(stem, trial_image(trunk) if image is None else image)
        maps = {"stem_channels": x, "body_channels": try_out(body, x)}
        if attention_stage is not None:
            kwargs["attention"] = copy.deepcopy(split_trunk(body, attention_stage)[0])
            maps["attention_channels"] = try_out(kwargs["attention"], x)
        outputs = {name: layout(output, trunk) for name, output in maps.items()}
        if any(output.data_format != "NCHW" for output in outputs.values()):
            raise ValueError(
                f"stage: expected maps (N, C, H, W) at {stage!r} and behind it, got shape {tuple(x.shape)}; "
                "channels-last maps, as Swin's, need a stem and a body that permute them"
            )
        return cls(stem, body, **{**{name: o.channels for name, o in outputs.items()}, **kwargs})

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.stem(images)
        masks = self.mask(self.attention(x)).sigmoid()
        if masks.shape[2:] != x.shape[2:]:
            raise ValueError(
                f"attention: expected maps as large as the stem's, {tuple(x.shape[2:])}, got "
                f"{tuple(masks.shape[2:])}; give it layers that keep the size"
            )
        masks = masks.view(len(x), self.num_heads, *x.shape[1:])  # (N, M, C, H, W)
        maps: Tensor = self.body((masks * x.unsqueeze(1)).flatten(0, 1))  # section 3.3
        if self.feature_map._forward_hooks:
            joined = len(x), self.num_heads * maps.shape[1], *maps.shape[2:]
            self.feature_map(self.reduction(maps.reshape(joined)))
        heads: Tensor = self.head(maps).view(len(x), self.embedding_size)
        return heads / math.sqrt(self.num_heads)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, embedding_size={self.embedding_size}"
