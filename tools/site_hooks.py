"""Hooks of `make docs`: pages from files outside docs/, the pages of the API, and equations as MathML.

The pages stay plain Markdown that GitHub renders: equations are its ```math blocks. They become MathML, which browsers
draw themselves, so that the site needs neither a script nor a network.
"""

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

import pml_regularizers

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
API = {
    "losses": (
        "Losses and regularizers",
        "horde joint_similarity jrd energy_confusion variance_attention ensemble_loss binomial_deviance "
        "cosine_contrastive dense_n_pairs feature_loss",
    ),
    "networks": ("Networks", "heads attention_ensemble split_trunk feature_tap"),
    "training": ("Training", "distributed scheduled_losses gradient_ratios optimizer_groups"),
    "mathematics": ("Mathematics", "moments reproducing_kernels"),
    "evaluation": ("Evaluation", "rank_accuracy stratified_parts generalization_bound"),
}


def api_page(title: str, modules: str) -> str:
    """Markdown of a page that describes the public names of some modules."""
    names = [
        f"::: pml_regularizers.{module}.{name}"
        for module in modules.split()
        for name in pml_regularizers.__all__
        if getattr(pml_regularizers, name).__module__ == f"pml_regularizers.{module}"
    ]
    return "\n\n".join([f"# {title}", *names])


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        text = re.sub(r"\]\((?:docs/)?(?=\w)(?!https?:)", "](", (ROOT / source).read_text())
        for name, target in PAGES.items():
            text = text.replace(f"]({name})", f"]({target})")
        files.append(File.generated(config, page, content=text))
    for page, (title, modules) in API.items():
        content = api_page(title, modules)
        files.append(File.generated(config, f"api/{page}.md", content=content))
    return files


def mathml(equations: str) -> str:
    """A display of equations; a newline in LaTeX's alignment is a row."""
    return f'<div class="equations">{convert(equations.strip(), display="block")}</div>'


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"```math\n(.*?)```", lambda found: mathml(found[1]), markdown, flags=re.DOTALL)
