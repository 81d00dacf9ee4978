"""Commands as processes of their own, bound to the one that starts them."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

RUN = Path(__file__).parents[1] / "run.py"

POLL = 0.2  # seconds between two looks at what runs

# On Linux a command that gets a SIGTERM as soon as the thread that started it is gone, however that ended.
BOUND = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def start(command: Sequence[str], log: Path, folder: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a command in a folder, its output behind what the log holds; it ends with the thread that calls."""
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        # A session of its own: a terminal's Ctrl-C reaches this process alone, which passes it on once.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOUND, str(os.getpid()), *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
