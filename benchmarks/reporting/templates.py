"""Fills the templates of pages and cards."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def fill(template: Path, **values: Any) -> str:
    """Fill a template, which may include files beside it; a missing value is an error.

    In HTML, values are escaped.
    """
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=template.suffix == ".html",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template.name).render(values)
