"""Classes that settings name, with their arguments."""

from typing import Any

from jsonargparse.typing import register_type


class ClassSpec:
    """{class_path: dotted.path.of.a.Class, init_args: {its arguments}}, as it was written.

    The parser does not look inside: `build` checks it, once the sizes are known.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        if not isinstance(description, dict):
            raise ValueError(f"expected {{class_path: ..., init_args: ...}}, got {description!r}")
        self.description = description

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassSpec) and self.description == other.description


register_type(ClassSpec, serializer=lambda spec: spec.description, deserializer=ClassSpec)
