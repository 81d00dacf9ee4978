"""A trained network as an ONNX graph."""

from pathlib import Path

import torch

from benchmarks.console import reason
from benchmarks.export.trained import Exported, Trained, checked
from benchmarks.settings import ConfigError

ONNX_FILE = "model.onnx"
NEEDED_BY_ONNX = ("onnx", "onnxscript", "onnxruntime")


def write_onnx(trained: Trained, folder: Path) -> Exported:
    """Write the whole network, with embeddings of unit length, as an ONNX graph.

    Raises:
        ConfigError: if torch cannot export the network, or onnxruntime gives other embeddings.
    """
    path = folder / ONNX_FILE
    try:
        torch.onnx.export(
            trained.network,
            (trained.images,),
            path,
            dynamo=True,
            external_data=False,
            input_names=["images"],
            output_names=["embeddings"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    except Exception as error:  # a trunk's operations make the exporter raise almost any error
        raise ConfigError(
            f"--formats: onnx: torch cannot export {trained.experiment.model.trunk} ({reason(error)}); leave it "
            "out with --formats timm"
        ) from error
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    batches = trained.images, trained.images[:1]
    differences = [
        trained.difference(torch.from_numpy(session.run(None, {"images": batch.numpy()})[0]))
        for batch in batches
    ]
    return Exported((ONNX_FILE,), checked("onnx", max(differences)))
