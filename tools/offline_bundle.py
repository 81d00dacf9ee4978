"""One folder with all that a machine without a network needs beside a copy of the tracked files.

    python tools/offline_bundle.py make DIR --python 3.12 --photographs FOLDER --weights FILE
    python tools/offline_bundle.py open DIR TARGET

`make` runs in the project's environment, on a commit without changes. It writes

    wheels/                      packages that the benchmarks need and the machine lacks
    weights/FILE                 weights of a timm model, as they are
    photographs/NAME.tar.gz      images, a folder per class; NAME_test_classes.txt: a file of test classes
    repository/                  all commits and the last one's folders, without the files' contents
    manifest.json                the commit, the version of Python, and the SHA-256 of each file

`open` runs on that machine, before anything is installed, and needs Python's standard library alone. It makes

    TARGET/site                  for PYTHONPATH: the packages of the wheels
    TARGET/weights, TARGET/photographs/NAME
    .git                         beside the tracked files, where there is none: git then knows commit and changes;
                                 that of an older bundle is replaced, unless somebody has committed in it

`make gpu BUNDLE=DIR` opens a bundle by itself. A second `open` finds all in place.
"""

import argparse
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = "{}.{}".format(*sys.version_info)

PRESENT = (
    *("torch", "torchvision", "timm", "accelerate", "scikit-learn", "scipy", "matplotlib"),
    *("pandas", "jinja2", "joblib", "tabulate", "tensorboard", "tqdm", "psutil", "pillow"),
    "protobuf",
    *("faiss-cpu", "faiss-gpu"),  # too large; accuracies by rank do not need it
)
"""Packages that are not brought, with all that they need."""

MANIFEST = "manifest.json"
PARTS = {MANIFEST, "repository", "wheels", "weights", "photographs", "site"}
KEYS = {"commit", "python", "files"}  # of the manifest
BRANCH = "bundle"
MARK = "offline-bundle"
"""A file in a repository that `open` has put in place: the commit it was made at."""

CONFIG = (
    "[core]\n\trepositoryformatversion = 0\n\tfilemode = false\n\tbare = false\n[gc]\n\tauto = 0\n"
)


say = partial(print, flush=True)


def run(command: Sequence[str | Path], **options: Any) -> str:
    """Standard output; the end of what was printed, if the command fails."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
        raise SystemExit(f"{' '.join(words[:4])}: exit status {done.returncode}: {lines[-1]}")
    return done.stdout.rstrip()


def git(*arguments: str | Path, **options: Any) -> str:
    return run(["git", "-C", ROOT, *arguments], **options)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_other(folder: Path) -> None:
    """Refuse to take the place of anything else than a bundle, made or opened, with nothing beside it."""
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    if names and not (MANIFEST in names <= PARTS and read_manifest(folder).keys() >= KEYS):
        raise SystemExit(f"{folder}: is neither empty nor a bundle alone; name another folder")


def make_whole(path: Path, fill: Callable[[Path], object]) -> None:
    """Fill a folder, which takes its name and the place of an older one only once it is complete."""
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        fill(part)
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------- make


def make(arguments: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT))
    folder: Path = arguments.folder.resolve()
    refuse_other(folder)
    if changed := git("status", "--porcelain", "--untracked-files=no").splitlines():
        raise SystemExit(f"{ROOT}: tracked files have changes, commit them: {changed[0]}")
    make_whole(folder, partial(collect, arguments))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    say(f"{folder}: {size:.1f} MiB; --side shrinks photographs")


def collect(arguments: argparse.Namespace, part: Path) -> None:
    fetch_wheels(part / "wheels", arguments.python, arguments.present)
    if arguments.weights:
        (part / "weights").mkdir()
        shutil.copyfile(arguments.weights, part / "weights" / arguments.weights.name)
    if arguments.photographs:
        name = arguments.photographs.resolve().name
        pack(arguments.photographs, part / "photographs" / f"{name}.tar.gz", arguments.side)
        if arguments.test_classes:
            listed = part / "photographs" / f"{name}_test_classes.txt"
            shutil.copyfile(arguments.test_classes, listed)
    copy_commits(part / "repository")
    files = sorted(path for path in part.rglob("*") if path.is_file())
    manifest = {
        "commit": git("rev-parse", "HEAD"),
        "python": arguments.python,
        "files": {path.relative_to(part).as_posix(): digest(path) for path in files},
    }
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def missing_packages(python: str, present: Sequence[str]) -> list[str]:
    """The packages of the extra `benchmarks`, and all that they need, without those of the machine, by name."""
    import tomllib
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["runner"], *extras["benchmarks"]]

    def walk(texts: Sequence[str], extra: str, seen: set[tuple[str, str]]) -> None:
        for text in texts:
            need = Requirement(text)
            name = canonicalize_name(need.name)
            machine = {"python_version": python, "python_full_version": f"{python}.0"}
            if need.marker and not need.marker.evaluate({**machine, "extra": extra}):
                continue
            for inner in ("", *need.extras):
                if (name, inner) not in seen and name != canonicalize_name(project["name"]):
                    seen.add((name, inner))
                    with suppress(metadata.PackageNotFoundError):  # the other faiss
                        walk(metadata.requires(name) or (), inner, seen)

    needed: set[tuple[str, str]] = set()
    there: set[tuple[str, str]] = set()
    walk(named, "", needed)
    walk(present, "", there)
    return sorted({name for name, _ in needed} - {name for name, _ in there})


def fetch_wheels(folder: Path, python: str, present: Sequence[str]) -> None:
    """Download the wheels in the versions of constraints.txt."""
    names = missing_packages(python, present)
    say(f"wheels: {', '.join(names)}")
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", folder]
    run([*pip, *options, "--constraint", ROOT / "constraints.txt", *names])


def pack(source: Path, archive: Path, side: int | None) -> None:
    """Pack the images below a folder: as they are, or with the shorter side shrunk to `side` pixels."""
    from benchmarks.console.printing import progress_bar
    from benchmarks.datasets.image_files import walk

    paths = [folder / image for folder, _, images, _ in walk(source.resolve()) for image in images]
    if not paths:
        raise SystemExit(f"{source}: holds no images; expected a folder for each class")
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as file:
        for path in progress_bar(paths, desc=f"photographs of {source.resolve().name}"):
            content = path.read_bytes() if side is None else shrunk(path, side)
            entry = tarfile.TarInfo(path.relative_to(source.resolve()).as_posix())
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))


def shrunk(path: Path, side: int) -> bytes:
    """The file of an image whose shorter side has at most `side` pixels, upright; of a smaller one, the same."""
    from PIL import Image

    from benchmarks.datasets.image_files import read_image

    image = read_image(path, upright=True)
    if min(image.size) <= side:
        return path.read_bytes()
    scale = side / min(image.size)
    size = tuple(round(length * scale) for length in image.size)
    buffer, kind = io.BytesIO(), Image.registered_extensions()[path.suffix.lower()]
    image.resize(size, Image.Resampling.LANCZOS).save(buffer, kind, quality=90)
    return buffer.getvalue()


def copy_commits(folder: Path) -> None:
    """A git repository that knows all commits and the files' hashes, which is all that `git status` needs."""
    (folder / "objects" / "pack").mkdir(parents=True)
    (folder / "refs" / "heads").mkdir(parents=True)
    commit = git("rev-parse", "HEAD")
    (folder / "refs" / "heads" / BRANCH).write_text(f"{commit}\n")
    (folder / "HEAD").write_text(f"ref: refs/heads/{BRANCH}\n")
    (folder / "config").write_text(CONFIG)
    (folder / MARK).write_text(f"{commit}\n")
    folders = ["--objects", "--no-walk", "--no-object-names", "--filter=blob:none"]
    listed = f"{git('rev-list', commit)}\n{git('rev-list', *folders, commit)}\n"
    git("pack-objects", "-q", folder / "objects" / "pack" / "pack", input=listed)


# ---------------------------------------------------------------------------------------------------------- open


def open_bundle(arguments: argparse.Namespace) -> None:
    folder, target = arguments.folder.resolve(), arguments.target.resolve()
    manifest = read_manifest(folder)
    if not (target / MANIFEST).exists() or read_manifest(target) != manifest:
        refuse_other(target)
        check(folder, manifest)
        make_whole(target, partial(unpack, folder))
    place_repository(folder / "repository", manifest["commit"])


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: is missing or damaged; is this a bundle?") from error
    return manifest


def check(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuse another version of Python, and any file that is missing or not as it was made."""
    if (python := manifest["python"]) != HERE:
        raise SystemExit(f"{folder}: is for Python {python}; make it with --python {HERE}")
    for name, expected in manifest["files"].items():
        if not (folder / name).is_file() or digest(folder / name) != expected:
            raise SystemExit(f"{folder / name}: is missing or damaged; copy the bundle again")


def unpack(folder: Path, part: Path) -> None:
    wheels = sorted(folder.glob("wheels/*.whl"))
    say(f"installing {len(wheels)} packages")
    (part / "site").mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if wheels:
        run([*pip, "--no-index", "--no-deps", "--target", part / "site", *wheels])
    for path in [*folder.glob("weights/*"), *folder.glob("photographs/*")]:
        place = part / path.parent.name / path.name.removesuffix(".tar.gz")
        place.parent.mkdir(exist_ok=True)
        if place.name == path.name:
            shutil.copyfile(path, place)
        else:
            say(f"unpacking {place.name}")
            with tarfile.open(path) as file:
                file.extractall(place, filter="data")
    shutil.copyfile(folder / MANIFEST, part / MANIFEST)


def place_repository(repository: Path, commit: str) -> None:
    """Give the tracked files their commit, where they have no `.git`; never change one of another origin."""
    place = ROOT / ".git"
    if place.exists():
        here = git("rev-parse", "HEAD")
        if here == commit:
            return
        if not (place / MARK).is_file() or (place / MARK).read_text().strip() != here:
            say(f"note: the bundle was made at {commit[:7]}, these files are a clone at {here[:7]}")
            return
    if shutil.which("git") is None:
        say("note: there is no git here: runs will not know their commit")
        return
    make_whole(place, partial(fill_repository, repository))
    changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
    say(f"commit {commit[:7]}, {len(changed)} files differ from it")
    for line in changed[:10]:
        say(f"  {line}")


def fill_repository(repository: Path, part: Path) -> None:
    shutil.copytree(repository, part, dirs_exist_ok=True)
    there = ["git", "--git-dir", part, "--work-tree", ROOT]
    run([*there, "read-tree", "HEAD"])
    # Exit status 1: some files differ, which is said afterwards.
    subprocess.run([*there, "update-index", "-q", "--refresh"], capture_output=True, check=False)


# ------------------------------------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> None:
    about = "Make or open a folder for a machine without a network."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("make", help="write the folder, where there is a network")
    made.set_defaults(command=make)
    made.add_argument("folder", type=Path, metavar="DIR")
    made.add_argument("--python", default=HERE, metavar="3.X", help="of that machine")
    about = f"of that machine, with all that they need (default: {' '.join(PRESENT)})"
    made.add_argument("--present", nargs="+", default=PRESENT, metavar="PACKAGE", help=about)
    made.add_argument("--weights", type=Path, metavar="FILE", help="of a timm model")
    made.add_argument("--photographs", type=Path, metavar="FOLDER", help="a folder per class")
    made.add_argument("--test-classes", type=Path, metavar="FILE", help="one name per line")
    made.add_argument("--side", type=int, metavar="N", help="shrink their shorter side to N pixels")
    opened = commands.add_parser("open", help="unpack it, where there is none")
    opened.set_defaults(command=open_bundle)
    opened.add_argument("folder", type=Path, metavar="DIR")
    opened.add_argument("target", type=Path, metavar="TARGET")
    arguments = parser.parse_args(argv)
    arguments.command(arguments)


if __name__ == "__main__":
    main()
