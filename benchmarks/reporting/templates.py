"""Fills the templates of pages and cards."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup


def fill(template: Path, **values: Any) -> str:
    """Fill a template; in HTML, everything except `Markup` is escaped, and a missing value is an error."""
    is_html = template.suffix == ".html"
    environment = Environment(
        autoescape=is_html,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    text = environment.from_string(template.read_text(encoding="utf-8")).render(values)
    return Markup(text) if is_html else text
