"""Forward passes that never wait for a GPU: no shape and no branch depends on what a tensor holds."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from speed.losses import LOSSES, Sizes

SIZES = Sizes(N=16, P=16, C=12, E=8, d=32, K=3, classes=4)


@pytest.mark.parametrize("name", LOSSES)
def test_no_value_is_waited_for(name: str) -> None:
    """Fake tensors, here of a GPU that need not be there, have no values and refuse to be asked for them."""
    with FakeTensorMode(), torch.device("cuda"):
        loss = LOSSES[name](SIZES)
        # PML makes parameters on the CPU, and `to` cannot move fake ones.
        for module in loss.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                module._parameters[key] = nn.Parameter(parameter.to("cuda"))
        shapes = {
            "feature_map": (SIZES.N, SIZES.C, 4, 4),
            "pooled": (SIZES.N, SIZES.C),
            "stopgrad_embeddings": (SIZES.N, SIZES.E),
            "embeddings": (SIZES.N, SIZES.E),
        }
        leaves = {key: torch.empty(shape, requires_grad=True) for key, shape in shapes.items()}
        given = {**leaves, "attention": (leaves["pooled"], leaves["pooled"])}
        names = getattr(loss, "feature_names", ())
        options = {"features": {key: given[key] for key in names}} if names else {}
        labels = torch.empty(SIZES.N, dtype=torch.long)
        value = loss(leaves["embeddings"], labels, **options)
    assert (value.shape, value.device.type, value.requires_grad) == ((), "cuda", True)
