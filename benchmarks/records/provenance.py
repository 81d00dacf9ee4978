"""The origin of a run: command, code, versions, weights and hardware."""

import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import joblib
import psutil
import torch
from accelerate.utils import parse_flag_from_env
from torch import nn

from benchmarks.building.images import Datasets, image_size
from benchmarks.console.arguments import say
from benchmarks.console.printing import printable
from benchmarks.datasets.contents import listed_digests
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.datasets.listing import DatasetError
from benchmarks.datasets.queries import count_queries, leaving_text
from benchmarks.datasets.remarks import remarks, verify_command
from benchmarks.records.files import file_digest
from benchmarks.settings.data import Data
from benchmarks.settings.experiment import Experiment


def describe_data(
    experiment: Experiment, images: Datasets, trunk: nn.Module
) -> dict[str, dict[str, Any] | None]:
    """Images and the file of pretrained weights of a run, if there is one, for its run.json."""
    data, train = experiment.data, images.train
    held_out = experiment.protocol == "fair" or data.split == "validation"
    about = {
        **describe_tested(data, images.test, trunk),
        "fold": f"{data.fold} of {data.folds}" if held_out else None,
        "train_classes": train.num_classes,
        "train_images": len(train),
    }
    if images.validation is not None:
        asked, unanswered = count_queries(images.validation.labels, images.validation.ranking)
        about |= {"validation_queries": asked, "unanswered_validation_queries": unanswered}
    if data.known_classes and data.split == "test":
        about["known_classes"] = len({*images.test.class_names} & {*train.class_names})
    path = experiment.network.weights
    weights = {"file": path.name, "sha256": file_digest(path)} if path else None
    return {"data": about, "weights": weights}


def describe_tested(data: Data, test: Glyphs | ImageSet, trunk: nn.Module) -> dict[str, Any]:
    """Images that a network is tested on, for a record."""
    asked, unanswered = count_queries(test.labels, test.ranking)
    leaving = leaving_text(data.camera, data.sequence)
    return {
        "name": data.dataset,
        "fingerprint": test.fingerprint,
        "layout": test.layout,
        "split": data.split,
        "fold": None,
        "image_size": image_size(data, trunk),
        "view": test.view,
        "test_classes": test.num_classes,
        "test_images": len(test),
        "test_queries": asked,
        "unanswered_queries": unanswered,
        **({"leaving": leaving} if leaving else {}),
    }


def look_through(data: Data, images: Glyphs | ImageSet) -> dict[str, Any]:
    """Facts about the files of images that reading them takes, for a record; remarks are printed.

    Raises:
        DatasetError: if a file cannot be used.
    """
    if isinstance(images, Glyphs):
        return {}
    try:
        digests = listed_digests(images.listing)
    except DatasetError as error:
        told = f"{verify_command(vars(data))} finds all files of this kind"
        raise DatasetError(f"data.root: {error}; {told}") from error
    place = "table" if images.listing.name == "table" else "root"
    for subject, text in remarks(images.listing, digests):
        say(f"data.{place}: {subject}: {printable(text)}")
    return {"content": images.content, "test_copies": images.copies()}


PACKAGES = (
    *("pml-regularizers", "pytorch-metric-learning", "torch", "torchvision", "timm", "accelerate"),
    *("faiss-cpu", "faiss-gpu", "numpy", "scikit-learn", "record-keeper", "jsonargparse"),
)


CODE = ("benchmarks", "pml_regularizers")
"""Folders whose new files of code change what a run does."""


@cache  # for this process and its forks, which run the code as it was imported
def describe_code() -> dict[str, Any]:
    """{"commit": the hash, "dirty": True if the code differs from it}.

    Files that git tracks count, except those in docs and results, which commands write, and new files of code; a
    user's images and outputs beside them do not.

    Both are None if git does not track this file, e.g. when it was installed. Never raises.
    """
    try:
        # Not tracked: the repository around this file is another project's.
        git("ls-files", "--error-unmatch", Path(__file__).resolve().name)
        commit = git("rev-parse", "HEAD")
        written = (":(top,exclude)docs", ":(top,exclude)results")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *written) or git(
            *("ls-files", "--others", "--exclude-standard", "--"),
            *(f":(top,glob){folder}/**/*.py" for folder in CODE),
        )
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(changed)}


@cache  # a study asks for each of its tests, which share few commits
def descends(commit: str | None, ancestor: str | None) -> bool:
    """True if a commit is the ancestor or comes after it; False if git does not know them."""
    if commit is None or ancestor is None:
        return False
    try:
        git("merge-base", "--is-ancestor", ancestor, commit)
    except (OSError, subprocess.SubprocessError):
        return commit == ancestor
    return True


def git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that can change a number."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def describe_hardware() -> dict[str, Any]:
    """Processor (None if unknown), cores this process may use, torch's threads, memory in GiB and GPU names."""
    processor = platform.processor()
    with suppress(OSError):
        cpus = Path("/proc/cpuinfo").read_text()
        if line := re.search(r"^model name\s*:(.*)", cpus, re.MULTILINE):
            processor = line[1].strip()
    if processor:  # its vector instructions, too: both decide how sums are rounded
        processor = f"{processor}, {torch.backends.cpu.get_cpu_capability()}"
    return {
        "processor": processor or None,
        "cores": joblib.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def peak_memory() -> dict[str, float]:
    """Peak memory of this process so far, in GiB: of the machine and, if it has one, of its GPU."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; on macOS bytes
    peak = {"host": most / (2**30 if sys.platform == "darwin" else 2**20)}
    if torch.cuda.is_available():
        peak["gpu"] = torch.cuda.max_memory_allocated() / 2**30
    return peak


def describe_launcher() -> dict[str, str]:
    """The variables of the environment that Accelerate reads; `accelerate launch` sets them by its config file."""
    ours = (name for name in sorted(os.environ) if name.startswith("ACCELERATE_"))
    return {name: os.environ[name] for name in ours}


def describe_machine() -> dict[str, Any]:
    """Code, versions and hardware that what is done now is done with."""
    about = {"versions": describe_versions(), "hardware": describe_hardware()}
    return {**describe_code(), **about}


def describe_session(argv: Sequence[str], processes: int) -> dict[str, Any]:
    """A command that does the same, code, versions and hardware of a run from now on."""
    launcher = ["ACCELERATE_USE_CPU=true"] if parse_flag_from_env("ACCELERATE_USE_CPU") else []
    launcher += ["torchrun", "--nproc_per_node", f"{processes}"] if processes > 1 else ["python"]
    return {
        "command": shlex.join([*launcher, "benchmarks/run.py", *argv]),
        **describe_machine(),
        "world_size": processes,
        "launcher": describe_launcher(),
        "started": now(),
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
