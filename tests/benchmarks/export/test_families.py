"""Which of timm's families can be exported; docs/export.md has them as a table."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.building.network import build_model
from benchmarks.export.trained import Trained, embed
from benchmarks.export.writing import SAME, _for_timm
from benchmarks.settings.command import parse
from benchmarks.settings.errors import ConfigError
from tests.library.test_trunk_families import FAMILIES, model_of

MODELS = FAMILIES | {
    "mobilenetv3": ("mobilenetv3_small_050", {}),  # LCNet, of the same module, can be exported
    "poolformer": ("poolformer_s12", {}),
}

NOT_EXPORTED = {
    *("cpubone", "deepseek_vit", "efficientformer", "efficientformer_v2", "efficientvit_msra"),
    *("fasternet", "gemma4_vit", "ghostnet", "hardcorenas", "hgnet", "hiera", "hieradet_sam2"),
    *("iformer", "lcnetv2", "levit", "lowformer", "mambaout", "mobilenetv3", "pit", "poolformer"),
    *("qwen3_vit", "repghost", "repvit", "sequencer", "shvit", "swiftformer", "tiny_vit"),
    *("vision_transformer_relpos", "vision_transformer_sam", "volo"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of timm's and torch's, in some families
@pytest.mark.parametrize("family", MODELS)
def test_a_family_is_exported_or_refused(family):
    name, arguments, side = model_of(MODELS[family])
    options = [f"--model.trunk={name}", f"--model.trunk_args={json.dumps(arguments)}"]
    options += ["--data.dataset=folder", f"--data.image_size={side}", "--model.embedding_size=8"]
    experiment = parse(options).experiment
    network = build_model(experiment.model, experiment.data).eval()
    with torch.no_grad():  # scales of 1, and gates of 0, would hide a difference
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    images = torch.randn(3, 3, side, side)
    run = SimpleNamespace(folder="run")
    trained = Trained(run, experiment, 0, network, images, embed(network, images))  # type: ignore[arg-type]
    if family in NOT_EXPORTED:
        with pytest.raises(ConfigError, match="gives other embeddings"):
            _for_timm(trained)
    else:
        model, _ = _for_timm(trained)
        assert trained.difference(model) <= SAME
