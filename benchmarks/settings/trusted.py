"""Modules that settings may name classes of: to import a module is to run it."""

import re
from collections.abc import Iterable

import jsonargparse

from benchmarks.settings.errors import ConfigError

# jsonargparse imports what a value names, and calls it where any value is accepted; ours are the types of settings.
jsonargparse.set_parsing_settings(
    import_path_denylist=["*"],
    import_path_allowlist=["benchmarks.settings"],
    instantiate_subclass_spec_in_any=False,
)

OURS = ("benchmarks", "pml_regularizers", "pytorch_metric_learning", "timm", "torch")

TRUST = "settings may name classes of it; repeatable: docs/security.md"
"""Help of the option --trust."""

_added: set[str] = set()


def trust(modules: Iterable[str]) -> None:
    """Let settings name classes of these modules and of those below, from here to the end of the process.

    For what a command line says (`--trust`), never for what a file does.
    """
    _added.update(modules)


def is_added(module: str) -> bool:
    """Whether a command line has said to trust the module."""
    return is_within(module, _added)


def is_within(module: str, packages: Iterable[str]) -> bool:
    """Whether the module is one of these, or lies below one."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def trusted_module(path: object, key: str) -> tuple[str, str]:
    """(module, name of the class) of a dotted path.

    Raises:
        ConfigError: if it is no such path, or of a module that nobody has said to trust.
    """
    if not isinstance(path, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
        raise ConfigError(f"{key}: expected a path such as torch.optim.SGD, got {path!r}")
    module, _, name = path.rpartition(".")
    if not is_within(module, OURS) and not is_added(module):
        raise ConfigError(
            f"{key}: {path} is not imported, since a module that is imported runs; if you trust it, add "
            f"--trust {module} to the command"
        )
    return module, name
