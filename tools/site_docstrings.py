"""Docstrings as griffe parses them: it knows a section "Examples", and ours are called "Example"."""

from typing import Any

import griffe


class Examples(griffe.Extension):  # type: ignore[misc]
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
