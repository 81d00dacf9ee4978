"""Trusted modules, whose classes settings may name: importing a module runs it."""

import sys
from collections.abc import Iterable
from pathlib import Path

import jsonargparse

# jsonargparse would import what a value names, and call it if any value is accepted; the types of the settings are
# in `benchmarks.settings`. It would also take null for any value that is not given.
jsonargparse.set_parsing_settings(
    unset_sentinel=True,
    import_path_denylist=["*"],
    import_path_allowlist=["benchmarks.settings"],
    instantiate_subclass_spec_in_any=False,
)

OURS = ("benchmarks", "pml_regularizers", "pytorch_metric_learning", "timm", "torch")

TRUST = "module whose classes settings may name; repeatable: docs/security.md"
"""Help of the option --trust."""

_added: set[str] = set()


def trust(modules: Iterable[str]) -> None:
    """Let settings name classes of these modules and their submodules, from now to the end of the process.

    Only a command line (`--trust`) may ask for this, never a file. The modules lie in the current folder, where
    `python -m` looks and a program started as a file does not, or on PYTHONPATH.
    """
    _added.update(modules)
    if _added and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def is_trusted(module: str, packages: Iterable[str] = OURS) -> bool:
    """True if the module is one of these, a submodule of one, or one that a command line trusts."""
    return any(f"{module}.".startswith(f"{package}.") for package in (*packages, *_added))
