"""Kinds of values in files of YAML and JSON."""

from typing import Any


def misfit(value: Any, kind: Any) -> str | None:
    """Place of a value that is not of its kind: "data.split", "" for the value itself; None if all is well.

    Args:
        kind: A type or a tuple of types, a set of words, a list of the kind of all entries, or a mapping of the
            kinds of entries by their names, the name ... standing for all.
    """
    if isinstance(kind, list) and isinstance(value, list):
        value, kind = {str(i): entry for i, entry in enumerate(value)}, {...: kind[0]}
    if not isinstance(kind, (dict, list)):
        fits = value in tuple(kind) if isinstance(kind, set) else isinstance(value, kind)
        fits &= not isinstance(value, int) or abs(value) < 2**63
        return None if fits else ""
    if not isinstance(value, dict):
        return ""
    for name in value if ... in kind else kind:
        inner = misfit(value.get(name), kind.get(name, kind.get(...)))
        if inner is not None or not isinstance(name, str):
            return f"{name}.{inner or ''}".rstrip(".")
    return None
