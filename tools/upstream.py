"""Place one system in a clone of pytorch-metric-learning (PML), as a pull request that stands by itself.

    python tools/upstream.py ../pytorch-metric-learning --only energy_confusion [--branch]

Each folder of `upstream/` is one pull request, and mirrors PML's tree:

* `NAME.toml` says how NAME is made from a file of the library: see `made`;
* `NAME.patch` changes the file NAME;
* of `__init__.py`, CONTENTS.md and the documents it holds the lines, rows or section that are inserted where
  PML's order has them;
* `NAME.tex` holds equations, one a line, that are drawn as NAME.png;
* every other file is added.

Nothing is written where something does not fit. A second run changes nothing.
"""

import argparse
import ast
import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "upstream"
LIBRARY = ROOT / "pml_regularizers"
# In the order of the pull requests. None needs another one.
SYSTEMS = (
    "distributed",
    "energy_confusion",
    "variance",
    "horde",
    "joint_similarity",
    "rank_accuracy",
)
PLAIN = "src/pytorch_metric_learning/losses/base_metric_loss_function.py"


class UpstreamError(Exception):
    """The tree cannot take the system; nothing was written."""


def plan(tree: Path, system: str) -> dict[Path, bytes]:
    """What every file of the system is to hold in the tree, by its path there.

    Raises:
        UpstreamError: if `tree` is not PML's, or holds something else in one of these places.
    """
    if not (tree / PLAIN).is_file():
        raise UpstreamError(f"{tree}: expected a clone of PML, with {PLAIN}; git clone it first")
    folder = SOURCES / system
    planned = {}
    for source in sorted(path for path in folder.rglob("*.*") if path.is_file()):
        path = source.relative_to(folder)
        if "__pycache__" in path.parts:
            continue
        text = source.read_bytes()
        if path.suffix == ".toml":
            path = path.with_suffix("")
            new = made(source).encode()
            _check_new(tree, path, new)
        elif path.suffix == ".patch":
            path = path.with_suffix("")
            new = patched(_read(tree, path), path, text.decode()).encode()
        elif path.suffix == ".tex":
            path = path.with_suffix(".png")
            new = _drawn(text.decode())
        elif path.name == "__init__.py":
            new = _with_lines(
                _read(tree, path), text.decode(), r"^from \.(\w+) import .*\n"
            ).encode()
        elif path.name == "CONTENTS.md":
            (page,) = re.findall(r"/(\w+)/#", text.decode())
            rows = rf"^\| \[\*\*(\w+)\*\*\]\(\S+/{page}\b.*\n"
            new = _with_lines(_read(tree, path), text.decode(), rows).encode()
        elif path.suffix == ".md":
            new = _with_section(_read(tree, path), text.decode(), path).encode()
        else:
            new = text
            _check_new(tree, path, new)
        planned[path] = new
    return planned


def _check_new(tree: Path, path: Path, new: bytes) -> None:
    if (tree / path).exists() and (tree / path).read_bytes() != new:
        raise UpstreamError(f"{path}: is there with another content; take a tree without it")


def made(description: Path) -> str:
    """A file for PML, made from a file of the library.

    PML's files have no annotations, short docstrings, imports relative to the package, and call nothing that torch
    1.6 lacks. So annotations, the module's docstring, all but the first paragraph of other docstrings, and
    `if torch.compiler.is_compiling(): ...` are left out. Then ruff drops the imports that nothing uses, sorts the
    others, and formats in black's style.

    Args:
        description: `upstream/.../NAME.py.toml`, with the entries
            source: the file in `pml_regularizers/`;
            replace: pairs [old, new] of text of the library's file, as it is there; each old one occurs once;
            drop: names of definitions that are left out: "function", "CONSTANT", "Class.method";
            docstrings: {name of a definition: its docstring in PML};
            rename: {word: word in PML}.

    Raises:
        UpstreamError: if a text or a name of the description is not in the library's file as often as it should be,
            or if the result uses a name that it does not have, or a module of the library.
    """
    steps = tomllib.loads(description.read_text())
    text = source = (LIBRARY / steps["source"]).read_text()
    for old, new in steps.get("replace", ()):
        if (times := text.count(old)) != 1:
            raise UpstreamError(
                f"{description.name}: expected once in {steps['source']}, is there {times} times: {old.strip()}"
            )
        text = text.replace(old, new)
    names = {*steps.get("drop", ()), *steps.get("docstrings", {})}
    text, seen = _shortened(text, set(steps.get("drop", ())), steps.get("docstrings", {}))
    if missing := names - seen:
        raise UpstreamError(
            f"{description.name}: {steps['source']} has no {', '.join(sorted(missing))}"
        )
    for word, other in steps.get("rename", {}).items():
        text = re.sub(rf"\b{word}\b", other, text)
    imported = re.compile(r"^from pytorch_metric_learning\b(?:\.(\w+))?", re.MULTILINE)
    here = description.parent.name
    text = imported.sub(lambda m: f"from {'.' if m[1] == here else '..' + (m[1] or '')}", text)
    text = _formatted(text, description.name)
    own_import = re.compile(r"^from \.[\w.]+ import", re.MULTILINE)
    if left := {*own_import.findall(source)} & {*own_import.findall(text)}:
        raise UpstreamError(f"{description.name}: PML lacks what is imported: {', '.join(left)}")
    return text


def _shortened(text: str, drop: set[str], docstrings: dict[str, str]) -> tuple[str, set[str]]:
    """The text as PML has it, see `made`, and the names of its definitions."""
    raw, seen = text.encode(), set()
    starts = [0, *itertools.accumulate(map(len, raw.splitlines(keepends=True)))]
    cuts: list[tuple[int, int, str]] = []  # byte offsets, and what stands there instead
    short: dict[ast.AST, str] = {}

    def begin(node: Any) -> int:
        return int(starts[node.lineno - 1] + node.col_offset)

    def end(node: Any) -> int:
        return int(starts[node.end_lineno - 1] + node.end_col_offset)

    def visit(node: Any, name: str) -> None:
        target = next(iter(getattr(node, "targets", [getattr(node, "target", node)])))
        own = getattr(target, "name", getattr(target, "id", None))
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)) and own:
            name = f"{name}.{own}".lstrip(".")
            seen.add(name)
        compiler = isinstance(node, ast.If) and "is_compiling()" in ast.unparse(node.test)
        unset = isinstance(node, ast.AnnAssign) and node.value is None
        if name in drop or compiler or unset:
            first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
            cuts.append((starts[first - 1], starts[node.end_lineno], ""))
            return
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            cuts.append((raw.rindex(b"->", 0, begin(node.returns)), end(node.returns), ""))
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            start = begin(node) + len(node.arg) if isinstance(node, ast.arg) else end(node.target)
            cuts.append((start, end(node.annotation), ""))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
            paragraph, *_ = text.split("\n\n")
            short[node.body[0]] = f'"""{docstrings.get(name, paragraph)}"""'
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            cuts.append((begin(node), end(node), short.get(node, "")))
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(ast.parse(text), "")
    for first, last, new in sorted(cuts, reverse=True):
        raw = raw[:first] + new.encode() + raw[last:]
    return raw.decode(), seen


def _formatted(text: str, where: str) -> str:
    settings = ["--config", str(SOURCES / "ruff.toml"), "--no-cache", "--stdin-filename", "made.py"]
    for command in (
        ["check", "--fix", "--quiet"],
        ["format", "--quiet", "--config", "format.skip-magic-trailing-comma=true"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *settings, "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UpstreamError(f"{where}: {done.stderr.strip() or done.stdout.strip()}")
        text = done.stdout
    return text


def _read(tree: Path, path: Path) -> str:
    if not (tree / path).is_file():
        raise UpstreamError(
            f"{path}: not in {tree}; take a clone, the source distribution lacks it"
        )
    return (tree / path).read_bytes().decode()


def patched(old: str, path: Path, patch: str) -> str:
    """`old`, the text of `path`, with the patch; as it is where it has it already.

    Raises:
        UpstreamError: if the patch does not apply.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / path
        target.parent.mkdir(parents=True)
        target.write_bytes(old.encode())

        def applies(*options: str) -> bool:
            # Inside a repository git would take the paths for that one's.
            outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
            command = ["git", "apply", *options, "-"]
            done = subprocess.run(
                command,
                input=patch.encode(),
                cwd=folder,
                env=outside,
                capture_output=True,
                check=False,
            )
            return done.returncode == 0

        if applies("--reverse", "--check"):
            return old
        if not applies():
            raise UpstreamError(
                f"{path}: {path.name}.patch does not apply; write it anew for this version"
            )
        return target.read_bytes().decode()


def _with_lines(old: str, lines: str, pattern: str) -> str:
    """`old` with these lines among those that match, each before the first that is named after it."""
    for line in lines.splitlines(keepends=True):
        (named,) = re.findall(pattern, line)
        if line in old:
            continue
        places = list(re.finditer(pattern, old, re.MULTILINE))
        if any(place[1] == named for place in places):
            raise UpstreamError(
                f"{named}: is there already, in another line; expected {line.strip()}"
            )
        later = [place.start() for place in places if place[1].lower() > named.lower()]
        at = min(later) if later else places[-1].end()
        old = old[:at] + line + old[at:]
    return old


def _with_section(old: str, section: str, path: Path) -> str:
    """`old` with the section before the first heading that is named after it."""
    level, named = re.findall(r"\A(##+) (\w+)\n", section)[0]
    headings = {
        found[1]: found.start() for found in re.finditer(rf"^{level} +(\w+)", old, re.MULTILINE)
    }
    if named in headings:
        if not old[headings[named] :].startswith(section):
            raise UpstreamError(f"{path}: has another section {named}; remove it first")
        return old
    later = [start for name, start in headings.items() if name.lower() > named.lower()]
    if not later:
        return f"{old.rstrip()}\n\n\n{section}"
    return f"{old[: min(later)]}{section}\n\n{old[min(later) :]}"


def _drawn(equations: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure()
    for number, line in enumerate(equations.splitlines()):
        figure.text(0, -0.22 * number, f"${line}$", fontsize=16, math_fontfamily="stix")
    file = io.BytesIO()
    figure.savefig(file, dpi=150, bbox_inches="tight", metadata={"Software": None})
    return file.getvalue()


def _git(tree: Path, *arguments: str, text: str | None = None) -> str:
    done = subprocess.run(
        ["git", "-C", str(tree), *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UpstreamError(f"git {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def place(tree: Path, system: str, *, branch: bool) -> list[Path]:
    """Place a system, on a branch of its own where asked: the paths that were changed.

    Raises:
        UpstreamError: as `plan`; for a branch also if `tree` is not the root of a repository, its work tree is not
            clean or holds the system already, or git refuses the branch or knows no author.
    """
    planned = plan(tree, system)
    changed = [
        path
        for path, new in planned.items()
        if not (tree / path).exists() or (tree / path).read_bytes() != new
    ]
    if branch:
        if folder := _git(tree, "rev-parse", "--show-prefix").strip():
            raise UpstreamError(
                f"{tree}: expected a clone of PML, is the folder {folder} of another repository"
            )
        _git(tree, "var", "GIT_COMMITTER_IDENT")
        if dirty := _git(tree, "status", "--porcelain"):
            raise UpstreamError(f"{tree}: expected a clean work tree, commit or remove:\n{dirty}")
        if not changed:
            raise UpstreamError(f"{tree}: holds the system already, there is nothing to commit")
        _git(tree, "switch", "--create", system.replace("_", "-"))
    for path in changed:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(planned[path])
    if branch:
        _git(tree, "add", *map(str, changed))
        message = (SOURCES / f"{system}.md").read_text().removeprefix("# ")
        _git(tree, "commit", "--cleanup=whitespace", "--file=-", text=message)
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Place our systems in a clone of pytorch-metric-learning, each a pull request."
    )
    parser.add_argument("tree", type=Path, metavar="TREE", help="a clone of PML")
    parser.add_argument("--only", choices=SYSTEMS, metavar="SYSTEM", help=", ".join(SYSTEMS))
    parser.add_argument(
        "--branch",
        action="store_true",
        help="commit each system on a branch of its own, from HEAD on",
    )
    arguments = parser.parse_args(argv)
    for system in [arguments.only] if arguments.only else SYSTEMS:
        try:
            changed = place(arguments.tree, system, branch=arguments.branch)
        except UpstreamError as error:
            print(f"upstream.py: {system}: {error}", file=sys.stderr)
            return 2
        for path in changed:
            print(path)
        print(f"{system}: {len(changed)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
