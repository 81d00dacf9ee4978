"""Fills the templates of pages and cards."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined


def fill(template: Path, **values: Any) -> str:
    """Fill a template; in HTML, values are escaped, and a missing value is an error."""
    environment = Environment(
        autoescape=template.suffix == ".html",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)
