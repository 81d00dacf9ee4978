"""Disks that fill up while a run trains: one line, and a true record."""

import json
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT, RUN, TIMEOUT, TINY, environment

PROCESSES = 20  # attacks for which one process is started: it takes seconds

SHORT = (*TINY, "--optimization.steps=40", "--checkpoint_every=10", "--report=false")


def small_disks(seed: int, count: int) -> Iterator[int]:
    """Sizes in KiB: a run needs about 3,000."""
    draw = random.Random(seed)
    return (round(10 ** draw.uniform(0.7, 3.4)) for _ in range(count))


MOUNT = "mount -t tmpfs -o size={0}k none {1}"
MAY_MOUNT = [*("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")]


def may_mount(folder: Path) -> bool:
    try:
        done = subprocess.run([*MAY_MOUNT, MOUNT.format(4, folder)], capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.slow
def test_a_disk_that_fills_up(data: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not may_mount(tmp_path):
        pytest.skip("needs a file system of a given size: unshare and tmpfs")
    attacks = max(2, request.config.getoption("--attacks") // PROCESSES)
    for number, size in enumerate(small_disks(0, attacks)):
        disk, kept = tmp_path / "disk", tmp_path / f"kept{number}"
        disk.mkdir(exist_ok=True)
        command = shlex.join([sys.executable, str(RUN), data, *SHORT, f"--output={disk / 'run'}"])
        script = (
            f"{MOUNT.format(size, disk)}; {command}; code=$?; cp -r {disk}/run {kept}; exit $code"
        )
        done = subprocess.run(
            [*MAY_MOUNT, script],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        said = f"{size} KiB: {done.stdout}{done.stderr}"
        assert "Traceback" not in said, said
        assert done.returncode in (0, 1, 2), said
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == (done.returncode != 0), said
        if (kept / "run.json").exists():
            status = json.loads((kept / "run.json").read_text())["status"]
            # On a full disk the record may stay as it was.
            assert (status == "finished") == (done.returncode == 0), said
        if done.returncode:
            assert "No space left" in errors[0] or "disk" in errors[0], said
