"""Place the library in a source tree of pytorch-metric-learning (PML), ready to be reviewed there.

    python tools/upstream.py ../pytorch-metric-learning [--dry-run]

* Modules become files of PML's `losses` and `utils`, lowered to the oldest Python and torch that PML tests
  (`upstream_lower.py`) and formatted as PML formats: 88 columns, sorted imports.
* Unit tests in PML's style are copied from `upstream_tests/`.
* Sections of PML's documents are made from the docstrings (`upstream_docs.py`).

Files are added, and lines are added to `losses/__init__.py`, the documents, CONTENTS.md and mkdocs.yml: no line
of PML is changed. What is there with other content is refused before anything is written, so that a second
run changes nothing, and a newer version of the library wants a fresh tree.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import upstream_docs
import upstream_lower
from upstream_lower import COMPAT, OLDEST_PYTHON, PML, Module

TOOLS = Path(__file__).resolve().parent
LIBRARY = TOOLS.parent / upstream_lower.LIBRARY
TESTS = TOOLS / "upstream_tests"
SOURCE = Path("src") / PML
SITE = "https://kevinmusgrave.github.io/pytorch-metric-learning"
LOSSES = Module("losses", "")
EXPORTED = (
    "Loss",
    "Losses",
    "Regularizer",
)  # as PML's, `losses` exports what is called like a loss


class UpstreamError(Exception):
    """The tree cannot take the library; nothing was written."""


@dataclass(frozen=True)
class Place:
    """Where a module goes, and the paper (title, and URL or None) that the documents name."""

    path: str
    paper: tuple[str, str | None] | None = None

    @property
    def module(self) -> Module:
        return Module(*self.path.split("/"))

    @property
    def link(self) -> str:
        title, url = self.paper or ("", None)
        return f"[{title}]({url})" if url else title


ABE = (
    "Attention-based Ensemble for Deep Metric Learning",
    "https://arxiv.org/abs/1804.00382",
)
BINOMIAL = (
    "Deep Metric Learning for Practical Person Re-Identification",
    "https://arxiv.org/abs/1407.4979",
)
ECAML = (
    "Energy Confused Adversarial Metric Learning for Zero-Shot Image Retrieval and Clustering",
    "https://arxiv.org/abs/1901.07169",
)
HORDE = (
    "Metric Learning With HORDE: High-Order Regularizer for Deep Embeddings",
    "https://arxiv.org/abs/1908.02735",
)
JRD = (
    "Distance Metric Learning with Joint Representation Diversification",
    "https://proceedings.mlr.press/v119/chu20a.html",
)
SEAN = (
    "Second-Order Estimation Based Attention Network for Metric Learning",
    None,
)

# What is called with embeddings and labels is a loss to PML: its regularizers see no labels
# (docs/regularizers.md), and ThresholdConsistentMarginLoss, which regularizes, is a loss there too.
PLACES = {
    "attention_ensemble": Place("utils/attention_ensemble", ABE),
    "binomial_deviance": Place("losses/binomial_deviance_loss", BINOMIAL),
    "cosine_contrastive": Place("losses/cosine_contrastive_loss", HORDE),
    "dense_n_pairs": Place("losses/dense_n_pairs_loss", ECAML),
    "distributed": Place("losses/distributed_loss"),
    "energy_confusion": Place("losses/energy_confusion_regularizer", ECAML),
    "ensemble_loss": Place("losses/ensemble_loss", ABE),
    "feature_loss": Place("losses/feature_loss"),
    "feature_maps": Place("utils/feature_maps"),
    "feature_tap": Place("losses/feature_tap"),
    "generalization_bound": Place("utils/generalization_bound", JRD),
    "gradient_ratios": Place("utils/gradient_ratios"),
    "heads": Place("utils/embedding_head"),
    "horde": Place("losses/horde_loss", HORDE),
    "joint_similarity": Place("losses/joint_similarity_regularizer", JRD),
    "jrd": Place("losses/jrd_loss", JRD),
    "loss_copies": Place("losses/wrapper_loss"),
    "moments": Place("utils/high_order_moments", HORDE),
    "optimizer_groups": Place("utils/optimizer_groups"),
    "pair_loss": Place("losses/pair_loss"),
    "precision": Place("utils/precision"),
    "reproducing_kernels": Place("utils/reproducing_kernels", JRD),
    "scheduled_losses": Place("losses/scheduled_losses"),
    "split_trunk": Place("utils/split_trunk"),
    "stratified_parts": Place("utils/stratified_parts", JRD),
    "summed_convolutions": Place("utils/summed_convolutions", HORDE),
    "summed_products": Place("utils/summed_products", HORDE),
    "triton_products": Place("utils/triton_products"),
    "unwrapping": Place("utils/unwrapping"),
    "variance_attention": Place("losses/variance_regularizer", SEAN),
}
# PML has a calculator of its own, and old torch lacks half of what ours is made of.
LEFT_OUT = {"rank_accuracy", "ranks"}
MODULES = {name: place.module for name, place in PLACES.items()}
# How a document starts where the tree has none, as PML's source distribution.
PAGES = {
    "distributed.md": "# Distributed\n",
    "features.md": "# Features\n\nWhat losses read besides embeddings, and the tools around them.\n",
    "losses.md": "# Losses\n",
}
CONTENTS = (
    f"## Library contents\n\n### [Losses]({SITE}/losses)\n| Name | Reference Papers |\n|---|---|\n"
)
RUFF = f"""
line-length = 88
target-version = "py{OLDEST_PYTHON[0]}{OLDEST_PYTHON[1]}"
[lint]
select = ["I", "F401"]
[lint.per-file-ignores]
"!src/**.py" = ["F401"]
[lint.isort]
known-first-party = ["{PML}"]
"""


def plan(tree: Path) -> dict[Path, str]:
    """The text of every file, by its path in the tree, as it is to be there: old ones with lines added.

    Raises:
        UpstreamError: if `tree` is not PML's source, or cannot take a file or a line.
    """
    if not (tree / SOURCE / "losses" / "base_metric_loss_function.py").is_file():
        raise UpstreamError(
            f"{tree}: expected a source tree of {PML}, with {SOURCE / 'losses'}; unpack its source distribution, "
            "or clone its repository"
        )
    paths = [path for path in sorted(LIBRARY.glob("*.py")) if path.stem not in LEFT_OUT]
    sources = {path.stem: path.read_text() for path in paths}
    public = _public_names(sources.pop("__init__"))
    if missing := sources.keys() - PLACES.keys():
        raise UpstreamError(f"PLACES: no place for {', '.join(sorted(missing))}; name it there")
    for name in PLACES.keys() - sources.keys():
        raise UpstreamError(f"PLACES: the library has no module {name}; remove it there")
    exports = {name: _home(name, PLACES[module].module) for name, module in public.items()}
    new = _formatted(_modules(tree, sources, exports) | _unit_tests(tree))
    for path, text in new.items():
        if (tree / path).exists() and _read(tree / path) != text:
            raise UpstreamError(
                f"{path}: is there with another content; take a tree without it, or rename the place"
            )
    init = SOURCE / "losses" / "__init__.py"
    added = {init: _with_exports(tree, init, public, exports)}
    added |= _documents(tree, sources, public, exports)
    return new | added


def _home(name: str, module: Module) -> Module:
    """What users import a public name from: `losses`, or its file."""
    exported = module.folder == "losses" and name.endswith(EXPORTED)
    return LOSSES if exported else module


def _page(home: Module) -> str:
    """The document that describes the names of a module."""
    if home == LOSSES:
        return "losses.md"
    return "distributed.md" if home.name.startswith("distributed") else "features.md"


def _modules(
    tree: Path, sources: Mapping[str, str], exports: Mapping[str, Module]
) -> dict[Path, str]:
    definitions = _exported(_read(tree / SOURCE / "losses" / "__init__.py"))
    texts = {
        SOURCE / f"{COMPAT.folder}/{COMPAT.name}.py": (TOOLS / "upstream_compat.py").read_text()
    }
    for name, source in sources.items():
        try:
            text = upstream_lower.lower(source, PLACES[name].module, MODULES, definitions)
        except upstream_lower.CannotLowerError as error:
            raise UpstreamError(f"{name}.py: {error}") from error
        text = upstream_lower.rename(text, MODULES, exports)
        if upstream_lower.LIBRARY in text:
            raise UpstreamError(f"{name}.py: still speaks of {upstream_lower.LIBRARY} when placed")
        ast.parse(text, feature_version=OLDEST_PYTHON)
        texts[SOURCE / f"{PLACES[name].path}.py"] = text
    return texts


def _unit_tests(tree: Path) -> dict[Path, str]:
    """Ours; a package's __init__.py only where the tree has none."""
    paths = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("*.py"))]
    return {
        Path("tests") / path: (TESTS / path).read_text()
        for path in paths
        if path.name != "__init__.py" or not (tree / "tests" / path).exists()
    }


def _formatted(texts: Mapping[Path, str]) -> dict[Path, str]:
    """As black and isort (profile black) do it; ruff does the same, but for one rule of black's."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "ruff.toml").write_text(RUFF)
        for path, text in texts.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        _ruff("check", "--fix", root)
        _ruff("format", root)
        for path in texts:
            (root / path).write_text(upstream_lower.parenthesize((root / path).read_text()))
        _ruff("format", root)
        return {path: (root / path).read_text() for path in texts}


def _ruff(*command: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UpstreamError(f"ruff: {done.stdout}{done.stderr}")


def _public_names(init: str) -> dict[str, str]:
    """The public names of the library -> their modules."""
    return {
        alias.name: node.module
        for node in ast.parse(init).body
        if isinstance(node, ast.ImportFrom) and node.level and node.module
        for alias in node.names
    }


_exported = _public_names  # PML's __init__.py is written in the same way


def _with_exports(
    tree: Path, init: Path, public: Mapping[str, str], exports: Mapping[str, Module]
) -> str:
    """`losses/__init__.py` with a line for each of our losses, where isort would have it."""
    text = _read(tree / init)
    lines, there = text.splitlines(keepends=True), _exported(text)
    ours: dict[str, list[str]] = {}
    for name in sorted(public):
        file = PLACES[public[name]].module.name
        if exports[name] == LOSSES and there.get(name) != file:
            if name in there:
                raise UpstreamError(f"{init}: {name} is there already, from {there[name]}.py")
            ours.setdefault(file, []).append(name)
    new = _formatted(
        {
            Path(f"{file}.py"): f"from .{file} import {', '.join(names)}\n"
            for file, names in ours.items()
        }
    )
    # From the last to the first, so that line numbers stay right.
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    for path in sorted(new, reverse=True):
        later = [node.lineno for node in imports if (node.module or "") > path.stem]
        lines.insert(min(later) - 1 if later else len(lines), new[path])
    return "".join(lines)


def _documents(
    tree: Path, sources: Mapping[str, str], public: Mapping[str, str], exports: Mapping[str, Module]
) -> dict[Path, str]:
    """A section for every public class and function, a row in CONTENTS.md, and the new page in mkdocs.yml."""
    texts = {
        Path("docs") / page: _read(tree / "docs" / page, start) for page, start in PAGES.items()
    }
    contents = _read(tree / "CONTENTS.md", CONTENTS)
    for name, module in sorted(public.items()):
        place, source = PLACES[module], ast.parse(sources[module])
        definitions = [node for node in source.body if getattr(node, "name", "") == name]
        if not definitions or name.endswith("Error"):
            continue
        node = definitions[0]
        assert isinstance(node, ast.ClassDef | ast.FunctionDef)
        home = exports[name]
        called = ".".join(filter(None, [home.folder, home.name, name]))
        first = next(other for other, of in sorted(public.items()) if of == module)
        equation = upstream_docs.equations(ast.get_docstring(source) or "") if name == first else ""
        text = upstream_docs.section(node, called, place.link, equation)
        text = upstream_lower.rename(text, MODULES, exports)
        page = Path("docs") / _page(home)
        try:
            texts[page] = upstream_docs.insert(texts[page], name, text)
        except ValueError as error:
            raise UpstreamError(f"{page}: {error}") from error
        if home == LOSSES and place.paper:
            contents = _with_row(contents, name, place)
    navigation = tree / "mkdocs.yml"
    if navigation.exists():
        texts[Path("mkdocs.yml")] = _with_page(_read(navigation))
    return {**texts, Path("CONTENTS.md"): contents}


def _with_row(contents: str, name: str, place: Place) -> str:
    """CONTENTS.md with a row in its table of losses, which is sorted by name."""
    row = f"| [**{name}**]({SITE}/losses/#{name.lower()}) | {place.link}\n"
    if row in contents:
        return contents
    if f"[**{name}**]" in contents or "### [Losses]" not in contents:
        raise UpstreamError(f"CONTENTS.md: has another row {name}, or no table of losses")
    lines = contents.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith("### [Losses]")) + 3
    while at < len(lines) and lines[at].startswith("| [") and lines[at].lower() < row.lower():
        at += 1
    return "".join([*lines[:at], row, *lines[at:]])


def _with_page(navigation: str) -> str:
    """mkdocs.yml with the page of features behind that of distributed training."""
    if "features.md" in navigation:
        return navigation
    lines = navigation.splitlines(keepends=True)
    for at, line in enumerate(lines):
        if line.rstrip().endswith("distributed.md"):
            indent = line[: line.index("-")]
            return "".join(
                [*lines[: at + 1], f"{indent}- Features: features.md\n", *lines[at + 1 :]]
            )
    raise UpstreamError("mkdocs.yml: no line of distributed.md to put features.md behind")


def _read(path: Path, default: str | None = None) -> str:
    """The text with its line ends as they are."""
    if default is not None and not path.exists():
        return default
    return path.read_bytes().decode()


def write(tree: Path, texts: Mapping[Path, str]) -> None:
    """Write all files, or none: each beside its place first, then all are renamed."""
    staged: list[tuple[Path, Path]] = []
    try:
        for path, text in texts.items():
            target = tree / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                dir=target.parent, prefix=f".{target.name}.", delete=False
            ) as file:
                staged.append((Path(file.name), target))
                file.write(text.encode())
            mode = target.stat().st_mode if target.exists() else 0o644
            Path(file.name).chmod(mode)
        for temporary, target in staged:
            temporary.replace(target)
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Place the library in a source tree of pytorch-metric-learning."
    )
    parser.add_argument("tree", type=Path, metavar="DIR", help="the tree, with src/ in it")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    arguments = parser.parse_args()
    try:
        texts = plan(arguments.tree)
    except UpstreamError as error:
        print(f"upstream.py: {error}", file=sys.stderr)
        return 2
    there = {path for path in texts if (arguments.tree / path).exists()}
    changed = {
        path: text
        for path, text in texts.items()
        if path not in there or text != _read(arguments.tree / path)
    }
    for path in sorted(changed):
        print(f"{'add lines to' if path in there else 'add'} {path}")
    print(f"{len(changed)} files, and {len(texts) - len(changed)} that are as they should be")
    if not arguments.dry_run:
        write(arguments.tree, changed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
