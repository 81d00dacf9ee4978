"""A small model of every family of timm's, which the tests of export embed images with, or a refusal."""

from importlib.util import find_spec
from typing import Any

import pytest

from pml_regularizers import EmbeddingHead
from tests.support.toys import timm_model

timm = pytest.importorskip("timm")

SIDE = 64
"""Pixels of an image, unless a family needs more."""

OF_SIZE = {"img_size": SIDE}
"""For networks that are made for one size of images."""

SHALLOW = {"depth": 2}
"""For families without a small model."""

MODELS: list[tuple[dict[str, Any], str]] = [
    ({}, """
    test_byobnet convmixer_768_32 test_convnext cpubone_nano csatv2 cs3darknet_focus_s
    cspnext_tiny davit_tiny densenet121 dla46_c dpn48b edgenext_xx_small test_efficientnet
    efficientvit_m0 fasternet_t0 fastvit_t8 focalnet_tiny_srf ghostnet_050 hardcorenas_b
    hgnetv2_b0 sam2_hiera_tiny hrnet_w18_small iformer_t lcnetv2_small lowformer_b0
    test_mambaout poolformerv2_s12 lcnet_035 mobilenetv5_base mobilevit_xxs mvitv2_tiny
    nasnetalarge nextvit_small test_nfnet pnasnet5large pvt_v2_b0 rdnet_tiny regnetx_002
    repghostnet_050 repvit_m0_9 res2net50_14w_8s resnest14d test_resnet resnetv2_18 rexnet_100
    selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs
    tiny_vit_5m_224 tresnet_m twins_svt_small vgg11 ese_vovnet19b_slim_dw legacy_xception
    xception41p xcit_nano_12_p8_224
    """),
    (OF_SIZE, """
    convit_tiny deit_tiny_patch16_224 efficientformerv2_s0 gcvit_xxtiny hiera_tiny_224
    levit_128s test_coatnet gmlp_ti16_224 nest_tiny pit_ti_224 swin_tiny_patch4_window7_224
    swinv2_tiny_window8_256 swinv2_cr_tiny_224 tnt_s_legacy_patch16_224 visformer_tiny test_vit
    vit_tiny_r_s16_p8_224 test_vit_relpos vitamin_small_224 volo_d1_224
    """),
    (SHALLOW, "gemma4_vit_167m naflexvit_base_patch16_siglip qwen3_vit_88m samvit_base_patch16_224"),
    (OF_SIZE | SHALLOW, "beit_base_patch16_224 cait_xxs24_224"),
    ({"side": 256}, "halonet_h1"),
    ({"depth": 2, "img_size": 112, "side": 112}, "deepseek_vit_412m"),
    ({"side": 224}, "efficientformer_l1"),
    ({"img_size": 56, "side": 56}, "eva02_tiny_patch14_224"),
    ({"side": 128}, "inception_resnet_v2 inception_v3 inception_v4"),
]  # fmt: skip
"""A model of each module of timm's, the smallest or one of the smallest, and the arguments that make it smaller."""


def family_of(name: str) -> str:
    """The module of timm's that defines a model."""
    return timm.model_entrypoint(name).__module__.removeprefix("timm.models.")


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    family_of(name): (name, arguments)
    for arguments, names in MODELS
    for name in names.split()
    if timm.is_model(name)  # an older timm lacks some
}

REFUSED = (
    *("coat_tiny", "crossvit_9_240", "deit_tiny_distilled_patch16_224", "efficientvim_m1"),
    *("efficientvit_b0", "inception_next_atto"),
)
"""Those that timm does not make without a pooling, and one that gives several maps: docs/backbones.md."""


def model_of(family: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any], int]:
    """A model's name, the arguments that timm makes it with, and the pixels of an image's side."""
    name, settings = family
    arguments = {key: value for key, value in settings.items() if key != "side"}
    return name, arguments, settings.get("side", SIDE)


def test_every_family_is_listed() -> None:
    listed = {*FAMILIES, *map(family_of, REFUSED)}
    # Not those that other code has registered in this process.
    there = {name for name in timm.list_modules() if find_spec(f"timm.models.{name}")}
    if timm.__version__ == "1.0.31":
        assert listed == there
    assert len(listed & there) > 85


@pytest.mark.parametrize("name", REFUSED)
def test_no_trunk(name: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        EmbeddingHead.for_trunk(timm_model(name, num_classes=0, global_pool=""), 8)
