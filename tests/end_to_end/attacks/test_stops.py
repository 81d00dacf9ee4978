"""Disks that fill up while a run trains: one line, and a true record."""

import json
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, RUN, TIMEOUT, TINY, environment

PROCESSES = 20  # attacks for which one process is started: it takes seconds

SHORT = (*TINY, "--optimization.steps=40", "--checkpoint_every=10", "--report=false")
MOUNT = "mount -t tmpfs -o size={0}k none {1}"
MAY_MOUNT = [*("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")]


@pytest.mark.slow
def test_a_disk_that_fills_up(data: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A run needs about 3,000 KiB."""
    can = shutil.which("unshare") and subprocess.run([*MAY_MOUNT, MOUNT.format(4, tmp_path)])
    if not can or can.returncode != 0:
        pytest.skip("needs a file system of a given size: unshare and tmpfs")
    draw = random.Random(0)
    for number in range(max(2, request.config.getoption("--attacks") // PROCESSES)):
        disk, kept, size = tmp_path / "disk", tmp_path / f"kept{number}", draw.uniform(0.7, 3.4)
        disk.mkdir(exist_ok=True)
        mount = MOUNT.format(round(10**size), disk)
        command = shlex.join([sys.executable, str(RUN), data, *SHORT, f"--output={disk / 'run'}"])
        script = f"{mount}; {command}; code=$?; cp -r {disk}/run {kept}; exit $code"
        options = {"capture_output": True, "text": True, "timeout": TIMEOUT}
        done = subprocess.run([*MAY_MOUNT, script], cwd=ROOT, env=environment(), **options)
        said = f"{mount}: {done.stdout}{done.stderr}"
        assert "Traceback" not in said and done.returncode in (0, 1, 2), said
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == (done.returncode != 0), said
        assert not errors or "No space left" in errors[0] or "disk" in errors[0], said
        if (kept / "run.json").exists():
            status = json.loads((kept / "run.json").read_text())["status"]
            # On a full disk the record may stay as it was.
            assert (status == "finished") == (done.returncode == 0), said
