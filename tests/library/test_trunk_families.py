"""A small model of every family of timm's: one training step of HORDE, with random weights, or a refusal."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses

from pml_regularizers import EmbeddingHead, HORDELoss
from tests.support.toys import timm_model

timm = pytest.importorskip("timm")

SIDE = 64
"""Pixels of an image, unless a family needs more."""

OF_SIZE = {"img_size": SIDE}
"""For networks that are made for one size of images."""

SHALLOW = {"depth": 2}
"""For families without a small model."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", {**OF_SIZE, **SHALLOW}),
    "byoanet": ("halonet_h1", {"side": 256}),
    "byobnet": ("test_byobnet", {}),
    "cait": ("cait_xxs24_224", {**OF_SIZE, **SHALLOW}),
    "convit": ("convit_tiny", OF_SIZE),
    "convmixer": ("convmixer_768_32", {}),
    "convnext": ("test_convnext", {}),
    "cpubone": ("cpubone_nano", {}),
    "csatv2": ("csatv2", {}),
    "cspnet": ("cs3darknet_focus_s", {}),
    "cspnext": ("cspnext_tiny", {}),
    "davit": ("davit_tiny", {}),
    "deepseek_vit": ("deepseek_vit_412m", {"img_size": 112, "side": 112, **SHALLOW}),
    "deit": ("deit_tiny_patch16_224", OF_SIZE),
    "densenet": ("densenet121", {}),
    "dla": ("dla46_c", {}),
    "dpn": ("dpn48b", {}),
    "edgenext": ("edgenext_xx_small", {}),
    "efficientformer": ("efficientformer_l1", {"side": 224}),
    "efficientformer_v2": ("efficientformerv2_s0", OF_SIZE),
    "efficientnet": ("test_efficientnet", {}),
    "efficientvit_msra": ("efficientvit_m0", {}),
    "eva": ("eva02_tiny_patch14_224", {"img_size": 56, "side": 56}),
    "fasternet": ("fasternet_t0", {}),
    "fastvit": ("fastvit_t8", {}),
    "focalnet": ("focalnet_tiny_srf", {}),
    "gcvit": ("gcvit_xxtiny", OF_SIZE),
    "gemma4_vit": ("gemma4_vit_167m", SHALLOW),
    "ghostnet": ("ghostnet_050", {}),
    "hardcorenas": ("hardcorenas_b", {}),
    "hgnet": ("hgnetv2_b0", {}),
    "hiera": ("hiera_tiny_224", OF_SIZE),
    "hieradet_sam2": ("sam2_hiera_tiny", {}),
    "hrnet": ("hrnet_w18_small", {}),
    "iformer": ("iformer_t", {}),
    "inception_resnet_v2": ("inception_resnet_v2", {"side": 128}),
    "inception_v3": ("inception_v3", {"side": 128}),
    "inception_v4": ("inception_v4", {"side": 128}),
    "lcnetv2": ("lcnetv2_small", {}),
    "levit": ("levit_128s", OF_SIZE),
    "lowformer": ("lowformer_b0", {}),
    "mambaout": ("test_mambaout", {}),
    "maxxvit": ("test_coatnet", OF_SIZE),
    "metaformer": ("poolformerv2_s12", {}),
    "mlp_mixer": ("gmlp_ti16_224", OF_SIZE),
    "mobilenetv3": ("lcnet_035", {}),
    "mobilenetv5": ("mobilenetv5_base", {}),
    "mobilevit": ("mobilevit_xxs", {}),
    "mvitv2": ("mvitv2_tiny", {}),
    "naflexvit": ("naflexvit_base_patch16_siglip", SHALLOW),
    "nasnet": ("nasnetalarge", {}),
    "nest": ("nest_tiny", OF_SIZE),
    "nextvit": ("nextvit_small", {}),
    "nfnet": ("test_nfnet", {}),
    "pit": ("pit_ti_224", OF_SIZE),
    "pnasnet": ("pnasnet5large", {}),
    "pvt_v2": ("pvt_v2_b0", {}),
    "qwen3_vit": ("qwen3_vit_88m", SHALLOW),
    "rdnet": ("rdnet_tiny", {}),
    "regnet": ("regnetx_002", {}),
    "repghost": ("repghostnet_050", {}),
    "repvit": ("repvit_m0_9", {}),
    "res2net": ("res2net50_14w_8s", {}),
    "resnest": ("resnest14d", {}),
    "resnet": ("test_resnet", {}),
    "resnetv2": ("resnetv2_18", {}),
    "rexnet": ("rexnet_100", {}),
    "selecsls": ("selecsls42", {}),
    "senet": ("legacy_seresnet18", {}),
    "sequencer": ("sequencer2d_s", {}),
    "shvit": ("shvit_s1", {}),
    "sknet": ("skresnet18", {}),
    "starnet": ("starnet_s050", {}),
    "swiftformer": ("swiftformer_xs", {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", OF_SIZE),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", OF_SIZE),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", OF_SIZE),
    "tiny_vit": ("tiny_vit_5m_224", {}),
    "tnt": ("tnt_s_legacy_patch16_224", OF_SIZE),
    "tresnet": ("tresnet_m", {}),
    "twins": ("twins_svt_small", {}),
    "vgg": ("vgg11", {}),
    "visformer": ("visformer_tiny", OF_SIZE),
    "vision_transformer": ("test_vit", OF_SIZE),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", OF_SIZE),
    "vision_transformer_relpos": ("test_vit_relpos", OF_SIZE),
    "vision_transformer_sam": ("samvit_base_patch16_224", SHALLOW),
    "vitamin": ("vitamin_small_224", OF_SIZE),
    "volo": ("volo_d1_224", OF_SIZE),
    "vovnet": ("ese_vovnet19b_slim_dw", {}),
    "xception": ("legacy_xception", {}),
    "xception_aligned": ("xception41p", {}),
    "xcit": ("xcit_nano_12_p8_224", {}),
}
"""A model of each module of timm's, the smallest or one of the smallest, and the arguments that make it smaller."""

REFUSED = {
    "coat": ("coat_tiny", AssertionError, "Only token or avg pooling"),
    "crossvit": ("crossvit_9_240", AssertionError, "Only token or avg pooling"),
    "deit": ("deit_tiny_distilled_patch16_224", AssertionError, "distilled"),
    "efficientvim": ("efficientvim_m1", ValueError, "trunk: expected a map .* got list$"),
    "efficientvit_mit": ("efficientvit_b0", AssertionError, "Cannot disable pooling"),
    "inception_next": ("inception_next_atto", AssertionError, "Cannot disable pooling"),
}
"""Those that timm does not make without a pooling, and one that gives several maps: docs/backbones.md."""


def model_of(family: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any], int]:
    """A model's name, the arguments that timm makes it with, and the pixels of an image's side."""
    name, settings = family
    arguments = {key: value for key, value in settings.items() if key != "side"}
    return name, arguments, settings.get("side", SIDE)


def made(name: str, **settings: Any) -> Any:
    return timm_model(name, num_classes=0, global_pool="", **settings)


def test_every_family_is_listed() -> None:
    listed = {*FAMILIES, *REFUSED}
    # Not those that other code has registered in this process.
    there = {name for name in timm.list_modules() if find_spec(f"timm.models.{name}")}
    if timm.__version__ == "1.0.31":
        assert listed == there
    assert len(listed & there) > 85


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of timm's and torch's, in some families
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trunk_trains_one_step(family: str) -> None:
    name, arguments, side = model_of(FAMILIES[family])
    trunk = made(name, **arguments)
    head = EmbeddingHead.for_trunk(trunk, 8, image=torch.zeros(1, 3, side, side))
    loss = HORDELoss(losses.ContrastiveLoss(), head.in_channels, 8, moment_dim=16)
    loss.attach(head)
    network = torch.nn.Sequential(trunk, head)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    embeddings = network(torch.randn(4, 3, side, side))
    assert embeddings.shape == (4, 8)
    value = loss(embeddings, torch.tensor([0, 0, 1, 1]))
    value.backward()
    assert value.isfinite()
    first = next(p for p in trunk.parameters() if p.grad is not None and p.grad.any())
    before = first.detach().clone()
    optimizer.step()
    assert not torch.equal(first, before) and first.isfinite().all()


@pytest.mark.parametrize("family", REFUSED)
def test_no_trunk(family: str) -> None:
    name, error, message = REFUSED[family]
    with pytest.raises(error, match=message):
        EmbeddingHead.for_trunk(made(name), 8)
