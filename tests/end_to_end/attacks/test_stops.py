"""Signals before a run trains, and full disks: one line, and a true record."""

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT, RUN, TIMEOUT, TINY, environment, rows, start

PROCESSES = 20  # attacks for which one process is started: it takes seconds

SHORT = (*TINY, "--optimization.steps=40", "--checkpoint_every=10", "--report=false")


def caught(process: subprocess.Popen[str]) -> bool:
    """True if a process has its own handler for SIGTERM, as the runner has from its first line on."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    mask = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(mask >> (signal.SIGTERM - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks the kernel for handlers")
def test_signals_before_the_training(
    data: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    draw, longest = random.Random(0), 8.0
    for number in range(max(1, request.config.getoption("--attacks") // PROCESSES)):
        folder, which = tmp_path / str(number), draw.choice([signal.SIGINT, signal.SIGTERM])
        process = start([data, *SHORT, f"--output={folder}"], start_new_session=True)
        while not caught(process):
            time.sleep(0.01)
        begun, wait = time.monotonic(), draw.uniform(0, longest)
        while time.monotonic() - begun < wait and not rows(folder):
            time.sleep(0.01)
        longest = min(longest, time.monotonic() - begun) if rows(folder) else longest
        process.send_signal(which)
        output, _ = process.communicate(timeout=TIMEOUT)
        what = f"{which.name} after {wait:.2f} s: {output}"
        assert process.returncode in (128 + which, 0), what  # 0: it came behind the end
        assert "Traceback" not in output, what
        assert "KeyboardInterrupt" not in output, what
        assert "stopped" in output or process.returncode == 0, what
        if (folder / "run.json").exists():
            status = json.loads((folder / "run.json").read_text())["status"]
            assert status == ("stopped" if process.returncode else "finished"), what


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
