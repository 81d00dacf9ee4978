"""Settings of the network: trunk, head and ensemble."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.settings.types import ClassSpec, PositiveInt

BatchNorm = Literal["train", "frozen_statistics", "frozen"]

Head = Literal["random", "pca", "whitened", "none"]


@dataclass
class Ensemble:
    """An attention-based ensemble in place of the trunk and its head; see `pml_regularizers.AttentionEnsemble`.

    Args:
        stage: Module of the trunk whose output is masked.
        attention_stage: Copy the trunk from there to this module for the masks; default: no layers of their own.
        num_heads: Number of masks, which share `Model.embedding_size`.
        map_channels: Channels to which the heads' maps are reduced for HORDE; default: no maps are computed.
        stem_channels: Channels of the masked map, if timm does not list them for this stage.
    """

    stage: str
    attention_stage: str | None = None
    num_heads: PositiveInt = 8
    map_channels: PositiveInt | None = None
    stem_channels: PositiveInt | None = None


@dataclass
class Model:
    """A timm trunk and an embedding head.

    Args:
        trunk: Name of a timm model.
        trunk_args: More arguments for `timm.create_model`, such as `pretrained` or `output_stride`.
        weights: File of pretrained weights for the trunk, in place of timm's, or a folder of .safetensors files
            that seeds and folds use in turn; default: as `trunk_args` say, else drawn from the seed.
        batch_norm: "train" the trunk's batch norm, keep its statistics and train only scale and shift
            ("frozen_statistics"), or keep all of it ("frozen").
        frozen_stages: Freeze the stem and this many of the trunk's stages, from below, with their batch norm and
            dropout as in a test; timm says what a stage is. Default: none.
        head: Start of the head's linear layer: "random" numbers; "pca", the principal components of the untrained
            trunk's features of the training images, which needs weights of the trunk; "whitened", these components
            after within-class whitening: for `optimization.steps: 0`, since a training starts better from "pca"; or
            "none": the trunk trains without it, and the test adds the components of the trained features.
            docs/heads.md compares them.
        replace_layer: What takes the layer's place after the training: "pca", principal components of the trained
            features of the training images; "whitened", these after within-class whitening; or "features", all
            features, centred (docs/heads.md). Default: nothing; for head "none", "pca".
        embedding_size: Width of the embeddings; with head "none", those of the test.
        pool: How the head pools the feature map.
        bias: Give a "random" layer a bias; the others have one.
        normalize: Give the losses embeddings of unit length. The test always compares unit vectors.
        init: Distribution of a "random" layer, see `pml_regularizers.EmbeddingHead`; an ensemble's is "glorot".
        attention: Class of a module between the pooling and the linear layer, such as
            `pml_regularizers.VEMAttention`.
        ensemble: Cut the trunk into an attention-based ensemble.
        channels_last: Lay out convolutions channels-last, which is faster on most processors.
    """

    trunk: str = "test_resnet"
    trunk_args: dict[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    batch_norm: BatchNorm = "train"
    frozen_stages: PositiveInt | None = None
    head: Head = "random"
    replace_layer: Literal["pca", "whitened", "features"] | None = None
    embedding_size: PositiveInt = 64
    pool: Literal["avg", "max", "token"] = "avg"
    bias: bool = False
    normalize: bool = True
    init: Literal["uniform", "glorot"] = "uniform"
    attention: ClassSpec | None = None
    ensemble: Ensemble | None = None
    channels_last: bool = False

    @property
    def replacement(self) -> str | None:
        """The layer of the test in place of the trained one, as in `replace_layer`; None if that stays."""
        return self.replace_layer or ("pca" if self.head == "none" else None)

    @property
    def has_components(self) -> bool:
        """True if a layer needs as many images and features as `embedding_size`."""
        return not {self.head, self.replacement}.isdisjoint(("pca", "whitened"))
