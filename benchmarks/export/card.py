"""The model card of an export."""

from collections.abc import Mapping
from dataclasses import replace
from math import floor
from pathlib import Path
from typing import Any

from timm.models import model_entrypoint, split_model_name_tag

from benchmarks.console import printable
from benchmarks.export.timm_files import HEAD_FILE, preprocessing
from benchmarks.export.trained import Exported, Trained
from benchmarks.reporting import compare, fill
from benchmarks.settings import dump
from pml_regularizers import EmbeddingHead


def card(trained: Trained, exported: Mapping[str, Exported]) -> str:
    """The model card, README.md: description, usage, training data and results."""
    run, info, experiment = trained.run, trained.run.info, trained.experiment
    trunk, head = trained.network
    view = preprocessing(experiment.data, trunk)
    channels, size, _ = view["input_size"]
    tested = (info.get("selection") or {"step": info["steps"]})["step"]
    results = None
    if info["status"] == "finished" and tested == trained.step:
        # The descriptor is HORDE's, which is not exported.
        results = compare([replace(run, info={**info, "outputs": {}})]).markdown()
    entrypoint = model_entrypoint(split_model_name_tag(experiment.model.trunk)[0])
    changes = " with uncommitted changes" if info.get("dirty") else ""
    training = {
        "recipe": info.get("recipe"),
        "command": f"`{info.get('command', 'unknown')}`",
        "commit": info.get("commit") and info["commit"] + changes,
        "steps": f"{trained.step:,}",
        "seed": str(run.seed),
        "precision": experiment.precision,
        "weights at the start": _starting_weights(trained),
        "data": _inline(info["data"]),
        "versions": _inline(info.get("versions", {})),
        "hardware": f"{_inline(info['hardware'])}, {info['world_size']} process(es)",
    }
    # They are not built, and may not be names of classes.
    losses = [str(term.loss.description.get("class_path")) for term in experiment.losses]
    return fill(
        Path(__file__).with_suffix(".md"),
        **{"exported": exported, "trained": trained, "info": info, "head": head},
        **{"view": view, "channels": channels, "size": size, "results": results},
        **{"training": training, "head_file": HEAD_FILE},
        # timm knows such a trunk only once `benchmarks.backbones` has registered it.
        ours=entrypoint.__module__.startswith("benchmarks."),
        pooled=pooling(head, trunk(trained.images).ndim),
        upright=experiment.data.dataset == "folder",
        shown=floor(size / view["crop_pct"]),
        losses=[printable(path).rpartition(".")[2] for path in losses],
        config=dump(info["config"]),
    )


def pooling(head: EmbeddingHead, ndim: int) -> str:
    """Code of the head's pooling, before its linear layer, in torch."""
    if head.pool == "token":
        return "features[:, 0]"
    reduce = {"avg": "mean", "max": "amax"}[head.pool]
    if ndim == 3:
        return f"features[:, {head.num_prefix_tokens}:].{reduce}(dim=1)"
    return f"features.{reduce}(dim={(1, 2) if head.data_format == 'NHWC' else (2, 3)})"


def _inline(entries: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in entries.items() if value is not None)


def _starting_weights(trained: Trained) -> str:
    arguments, file = trained.experiment.model.trunk_args, trained.run.info.get("weights")
    if file:
        return f"{file['file']}, SHA-256 {file['sha256']}"
    if arguments.get("checkpoint_path"):
        return f"{arguments['checkpoint_path']}"
    if not arguments.get("pretrained"):
        return "drawn from the seed"
    published = trained.network.trunk.pretrained_cfg
    source = published.get("hf_hub_id") or published.get("url") or "unknown"
    return f"timm's, from {source}, licence {published.get('license') or 'not stated'}"
