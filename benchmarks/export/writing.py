"""Writes a run as files for use without this package: all of them, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import floor
from pathlib import Path

import torch
from timm.models import model_entrypoint, split_model_name_tag

from benchmarks.console import InUseError, alone, let_others_read, reason
from benchmarks.export.timm_files import HEAD_FILE, preprocessing, write_timm
from benchmarks.export.trained import SAME, Exported, Trained, load_trained
from benchmarks.reporting import compare, fill
from benchmarks.settings import ConfigError, dump
from pml_regularizers import EmbeddingHead

NEEDED_BY_ONNX = ("onnx", "onnxscript", "onnxruntime")


def export(run: Path, output: Path, formats: Sequence[str]) -> dict[str, Exported]:
    """Export a run folder into a new or empty one, completely or not at all; return the files by format.

    Raises:
        ConfigError: if the run cannot be read, the output is in use, a package is missing, or a format would give
            other embeddings than the checkpoint.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output: {output} is not an empty folder; choose a new one")
    missing = [name for name in NEEDED_BY_ONNX if find_spec(name) is None]
    if "onnx" in formats and missing:
        raise ConfigError(
            f"--formats: onnx needs {', '.join(missing)}; pip install '.[export]', or leave it out with "
            "--formats timm"
        )
    trained = load_trained(run)
    try:
        with alone(output.absolute()) as folder:
            exported = {name: _write(name, trained, folder) for name in formats}
            (folder / "README.md").write_text(card(trained, exported), encoding="utf-8")
            for file in folder.iterdir():
                let_others_read(file)
            folder.rename(output.absolute())
    except (InUseError, OSError) as error:
        raise ConfigError(f"--output: {output}: {reason(error)}") from error
    return exported


def _write(name: str, trained: Trained, folder: Path) -> Exported:
    written = {"timm": write_timm, "onnx": write_onnx}[name](trained, folder)
    if not written.difference <= SAME:
        raise ConfigError(
            f"--formats: {name}: the embeddings of what was written differ by {written.difference:.1e} from the "
            f"checkpoint's, expected at most {SAME:.0e}; leave this format out"
        )
    return written


def write_onnx(trained: Trained, folder: Path) -> Exported:
    """Write the whole network, with embeddings of unit length, as an ONNX graph.

    Raises:
        ConfigError: if torch cannot export the network.
    """
    path = folder / "model.onnx"
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
    differences = [
        trained.difference(torch.from_numpy(session.run(None, {"images": batch.numpy()})[0]))
        for batch in (trained.images, trained.images[:1])
    ]
    return Exported([path.name], max(differences))


def card(trained: Trained, exported: Mapping[str, Exported]) -> str:
    """The model card, README.md: how to use the files, results, and the training's settings."""
    info, trunk = trained.run.info, trained.experiment.model.trunk
    view = preprocessing(trained.experiment.data, trained.network.trunk)
    tested = (info.get("selection") or {"step": info["steps"]})["step"]
    results = None
    if info["status"] == "finished" and tested == trained.step:
        # The descriptor is HORDE's, which is not exported.
        results = compare([replace(trained.run, info={**info, "outputs": {}})]).markdown()
    entrypoint = model_entrypoint(split_model_name_tag(trunk)[0])
    files = [file for written in exported.values() for file in written.files]
    return fill(
        Path(__file__).with_name("card.md"),
        **{"exported": exported, "info": info, "trunk": trunk, "head": trained.network.head},
        **{"view": view, "results": results, "step": trained.step, "config": dump(info["config"])},
        # timm knows such a trunk only once `benchmarks.backbones` has registered it.
        ours=entrypoint.__module__.startswith("benchmarks."),
        parts=HEAD_FILE if HEAD_FILE in files else None,
        pooled=pooling(trained.network.head, trained.network.trunk(trained.images).ndim),
        shown=floor(view["input_size"][1] / view["crop_pct"]),
        difference=max(written.difference for written in exported.values()),
    )


def pooling(head: EmbeddingHead, ndim: int) -> str:
    """Code of the head's pooling, before its linear layer, in torch."""
    if head.pool == "token":
        return "features[:, 0]"
    reduce = {"avg": "mean", "max": "amax"}[head.pool]
    if ndim == 3:
        return f"features[:, {head.num_prefix_tokens}:].{reduce}(dim=1)"
    return f"features.{reduce}(dim={(1, 2) if head.data_format == 'NHWC' else (2, 3)})"
