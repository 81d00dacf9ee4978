"""Place one system in a clone of pytorch-metric-learning (PML), as a pull request that stands by itself.

    python tools/upstream.py ../pytorch-metric-learning --only energy_confusion [--branch]

Each folder of `upstream/` is one pull request, and mirrors PML's tree. The modules that it adds to PML are the
library's own, in `pml_regularizers/offered`, with relative imports. In the folder,

* `NAME.patch` changes the file NAME;
* of `__init__.py`, CONTENTS.md and the documents it holds the lines, rows or section that are inserted where
  PML's order has them;
* `NAME.tex` holds equations, one a line, that are drawn as NAME.png;
* every other file is added.

Nothing is written where something does not fit. A second run changes nothing.
"""

import argparse
import functools
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "upstream"
OFFERED = ROOT / "pml_regularizers" / "offered"
# Each pull request with its files of OFFERED, in their order. None needs another one.
SYSTEMS: dict[str, tuple[str, ...]] = {
    "distributed": (),
    "multiple_losses": (),
    "loss_wrappers": (),
    "energy_confusion": ("losses/energy_confusion_loss.py",),
    "variance": ("losses/variance_estimation_loss.py", "utils/variance_attention.py"),
    "horde": ("losses/horde_loss.py",),
    "joint_similarity": ("losses/jrs_loss.py",),
    "rank_accuracy": ("utils/rank_accuracy_calculator.py",),
}
PACKAGE = "src/pytorch_metric_learning"
PLAIN = f"{PACKAGE}/losses/base_metric_loss_function.py"


class UpstreamError(Exception):
    """The tree cannot take the system; nothing was written."""


def plan(tree: Path, system: str) -> dict[Path, bytes]:
    """What every file of the system is to hold in the tree, by its path there.

    Raises:
        UpstreamError: if `tree` is not PML's, or holds something else in one of these places.
    """
    if not (tree / PLAIN).is_file():
        raise UpstreamError(f"{tree}: expected a clone of PML, with {PLAIN}; git clone it first")
    folder, planned = SOURCES / system, {}
    for name in SYSTEMS[system]:
        path, text = Path(PACKAGE, name), with_relative_imports(OFFERED / name)
        _refuse_another(tree, path, text)
        planned[path] = text.encode()
    for source in sorted(path for path in folder.rglob("*.*") if path.is_file()):
        path = source.relative_to(folder)
        if "__pycache__" in path.parts:
            continue
        text = source.read_bytes().decode()
        if path.suffix == ".tex":
            planned[path.with_suffix(".png")] = _drawn(text)
            continue
        if path.suffix == ".patch":
            path = path.with_suffix("")
            text = patched(_read(tree, path), path, text)
        elif path.name == "__init__.py":
            text = _with_lines(_read(tree, path), text, r"^from \.(\w+) import .*\n")
        elif path.name == "CONTENTS.md":
            (page,) = re.findall(r"/(\w+)/#", text)
            rows = rf"^\| \[\*\*(\w+)\*\*\]\(\S+/{page}\b.*\n"
            text = _with_lines(_read(tree, path), text, rows)
        elif path.suffix == ".md":
            text = _with_section(_read(tree, path), text, path)
        else:
            _refuse_another(tree, path, text)
        planned[path] = text.encode()
    return planned


def with_relative_imports(source: Path) -> str:
    """The text of an offered file as it stands in PML, whose modules import each other by relative names."""
    here = re.escape(source.parent.name)  # "losses" or "utils"
    text = source.read_text()
    # What black wraps fits on a line again.
    text = re.sub(
        r"(?m)^(from pytorch_metric_learning\S+ import )\(\n    (\w+),?\n\)$", r"\1\2", text
    )
    text = re.sub(rf"(?m)^from pytorch_metric_learning\.{here}(\.?)(?=[ \w])", "from .", text)
    return re.sub(r"(?m)^from pytorch_metric_learning\.", "from ..", text)


def _refuse_another(tree: Path, path: Path, text: str) -> None:
    if (tree / path).exists() and _read(tree, path) != text:
        raise UpstreamError(f"{path}: is there with another content; take a tree without it")


def _read(tree: Path, path: Path) -> str:
    if not (tree / path).is_file():
        raise UpstreamError(f"{path}: not in {tree}; take a clone, no source distribution")
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
        # Inside a repository git would take the paths for that one's.
        outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
        told = {"input": patch.encode(), "cwd": folder, "env": outside, "capture_output": True}

        def applies(*options: str) -> bool:
            command = ["git", "apply", *options, "-"]
            return subprocess.run(command, check=False, **told).returncode == 0

        if not applies("--reverse", "--check") and not applies():
            raise UpstreamError(f"{path}: {path.name}.patch does not apply; write it anew")
        return target.read_bytes().decode()


def _with_lines(old: str, lines: str, pattern: str) -> str:
    """`old` with these lines among those that match, each before the first that is named after it."""
    for line in lines.splitlines(keepends=True):
        if line not in old:
            (named,) = re.findall(pattern, line)
            places = list(re.finditer(pattern, old, re.MULTILINE))
            if any(place[1] == named for place in places):
                raise UpstreamError(f"{named}: is there in another line; expected {line.strip()}")
            later = [place.start() for place in places if place[1].lower() > named.lower()]
            at = min(later) if later else places[-1].end()
            old = old[:at] + line + old[at:]
    return old


def _with_section(old: str, section: str, path: Path) -> str:
    """`old` with the section before the first heading that is named after it."""
    if section in old:
        return old
    level, named = re.findall(r"\A(##+) (\w+)\n", section)[0]
    headings = list(re.finditer(rf"^{level} +(\w+)", old, re.MULTILINE))
    if any(found[1] == named for found in headings):
        raise UpstreamError(f"{path}: has another section {named}; remove it first")
    later = [found.start() for found in headings if found[1].lower() > named.lower()]
    if not later:
        return f"{old.rstrip()}\n\n\n{section}"
    return f"{old[: min(later)]}{section}\n\n{old[min(later) :]}"


@functools.cache
def _drawn(equations: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure()
    for number, line in enumerate(equations.splitlines()):
        figure.text(0, -0.22 * number, f"${line}$", fontsize=16, math_fontfamily="stix")
    file = io.BytesIO()
    figure.savefig(file, dpi=150, bbox_inches="tight", metadata={"Software": None})
    return file.getvalue()


def _git(tree: Path, *arguments: str, text: str | None = None) -> str:
    command = ["git", "-C", str(tree), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
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
    there = {path: (tree / path).read_bytes() for path in planned if (tree / path).exists()}
    changed = [path for path, new in planned.items() if there.get(path) != new]
    if branch:
        if folder := _git(tree, "rev-parse", "--show-prefix").strip():
            raise UpstreamError(f"{tree}: is the folder {folder} of another repository")
        _git(tree, "var", "GIT_COMMITTER_IDENT")
        if dirty := _git(tree, "status", "--porcelain"):
            names = [line[3:] for line in dirty.splitlines()]
            names[5:] = [f"{len(names) - 5} more"] if len(names) > 5 else []
            listed = ", ".join(names)
            raise UpstreamError(f"{tree}: expected a clean work tree, commit or remove {listed}")
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
    about = "commit each system on a branch of its own, from HEAD on"
    parser.add_argument("--branch", action="store_true", help=about)
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
