"""Hooks of `make docs`: pages from files outside docs/, the pages of the API, and equations as MathML.

The pages stay plain Markdown that GitHub renders: equations are its ```math blocks, $$ blocks and words between $.
They become MathML, which browsers draw themselves, so that the site needs neither a script nor a network.
"""

import ast
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SOURCES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
for path in sorted((ROOT / "examples").glob("*.ipynb")):
    SOURCES[f"examples/{path.stem}.md"] = f"examples/{path.name}"
PAGES = {source: page for page, source in SOURCES.items()}
PAGES["examples"] = "examples/photographs_in_pml_trainer.md"  # first in the navigation
HOMES = {  # of the public names
    alias.name: node.module
    for node in ast.walk(ast.parse((ROOT / "pml_regularizers" / "__init__.py").read_text()))
    if isinstance(node, ast.ImportFrom) and node.level == 1
    for alias in node.names
}
HOMES |= {  # and of those that are imported from their modules
    "ReproducingKernel": "functional.kernels",
    "joint_kernel": "regularizers.joint_similarity",
    "FeatureTap": "features.feature_tap",
    "trunk_output": "heads.trunk_output",
    "capture_loss_terms": "gradient_ratios",
    "gradient_norm_ratios": "gradient_ratios",
}
API = {
    "losses": ("Losses", "losses."),
    "regularizers": ("Regularizers", "regularizers."),
    "networks": ("Networks", "heads."),
    "features": ("How features reach a loss", "features."),
    "training": ("Training", "distributed gradient_cache optimizer_groups gradient_ratios"),
    "mathematics": ("Mathematics", "functional."),
    "evaluation": ("Evaluation", "metrics."),
}
"""Pages: their title, and the folders or modules whose public names they describe."""
ADDRESS = "ADDRESS_OF_THIS_REPOSITORY"
BADGE = re.compile(r"\[!\[[^\]]*\]\(\.\./\.\./[^)]*\)\]\([^)]*\)\s?")
"""An image that GitHub draws at addresses of its own; the site fetches nothing."""


def on_config(config: Any) -> None:
    """The repository's address, which the header links to, is that of REPOSITORY in the environment."""
    config.repo_url = os.environ.get("REPOSITORY")


def on_files(files: Files, config: Any) -> Files:
    for page, source in SOURCES.items():
        text = (ROOT / source).read_text()
        content = notebook(text) if source.endswith(".ipynb") else text
        files.append(File.generated(config, page, content=content))
    for page, (title, modules) in API.items():
        content = api_page(title, modules)
        files.append(File.generated(config, f"api/{page}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    name = page.file.src_uri
    address = os.environ.get("REPOSITORY", ADDRESS)
    markdown = BADGE.sub("", markdown.replace(ADDRESS, address))
    parts = re.split(r"(```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [formulas(relinked(text, name)) for text in parts[::2]]
    for place, part in enumerate(parts):
        if part.startswith("```math\n"):
            parts[place] = equations(part.removeprefix("```math\n").removesuffix("```"))
    return "".join(parts)


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """No 404.html: its links would be absolute, and break where the site lies in a subfolder."""
    return "" if template_name == "404.html" else output_content


def api_page(title: str, modules: str) -> str:
    """Markdown of a page that describes the public names of some modules or folders."""
    names = [
        f"::: pml_regularizers.{home}.{name}"
        for module in modules.split()
        for name, home in HOMES.items()
        if home == module or (module.endswith(".") and home.startswith(module))
    ]
    return "\n\n".join([f"# {title}", *names])


def notebook(text: str) -> str:
    """Markdown of a notebook, with the outputs that it keeps."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        outputs = cell.get("outputs", [])
        printed = "".join("".join(output.get("text", "")) for output in outputs).rstrip()
        if printed:
            parts.append(f"```text\n{printed}\n```")
        for output in outputs:
            data = output.get("data", {})
            if "image/png" in data:
                image = f"data:image/png;base64,{data['image/png'].strip()}"
                parts.append(f'<img alt="" src="{image}">')
    return "\n\n".join(parts)


def relinked(text: str, page: str) -> str:
    """A page whose links to files of the repository lead to pages; of a link to another file, its words."""
    source = SOURCES.get(page, f"docs/{page}")
    text = re.sub(r" · \[[^\]]*\]\(docs\)", "", text)  # the navigation lists all pages

    def link(found: re.Match[str]) -> str:
        words, path, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if "://" in path or not (ROOT / target).exists():
            return found[0]
        if target not in PAGES and not target.startswith("docs/"):
            return words
        there = PAGES.get(target, target.removeprefix("docs/"))
        return f"[{words}]({posixpath.relpath(there, posixpath.dirname(page))}{anchor or ''})"

    return re.sub(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)", link, text)


def formulas(text: str) -> str:
    """The text with its formulas between $$ and $ as MathML; code between backquotes stays."""

    def drawn(found: re.Match[str]) -> str:
        code, block, inline, mark = found.groups()
        if code:
            return code
        if block:
            return equations(block)
        # Without the span, Markdown takes a formula that begins a line for a block; it also keeps the comma.
        return f'<span class="formula">{convert(" ".join(inline.split()))}{mark}</span>'

    pattern = r"(`[^`]+`)|^\$\$$(.+?)^\$\$$|\$([^$]+)\$([).,;:]*)"
    return re.sub(pattern, drawn, text, flags=re.DOTALL | re.MULTILINE)


def equations(latex: str) -> str:
    return f'<div class="equations">{convert(latex.strip(), display="block")}</div>'
