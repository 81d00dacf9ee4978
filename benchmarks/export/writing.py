"""Writes a run as files for use without this package: all of them, or none."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from filelock import Timeout

from benchmarks.console import alone
from benchmarks.export.card import card
from benchmarks.export.onnx_file import NEEDED_BY_ONNX, write_onnx
from benchmarks.export.timm_files import write_timm
from benchmarks.export.trained import Exported, load_trained
from benchmarks.settings import ConfigError

WRITERS = {"timm": write_timm, "onnx": write_onnx}


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
            exported = {name: WRITERS[name](trained, folder) for name in formats}
            (folder / "README.md").write_text(card(trained, exported), encoding="utf-8")
            folder.rename(output.absolute())
    except Timeout as error:
        line = "another process exports to it; wait for it, or choose another"
        raise ConfigError(f"--output: {output}: {line}") from error
    except OSError as error:
        raise ConfigError(f"--output: {output}: {error.strerror or error}") from error
    return exported
