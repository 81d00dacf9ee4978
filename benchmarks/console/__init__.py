"""Parts that all commands share: progress bars, arguments, stopping, and files that are complete or absent."""

import sys

if sys.platform == "win32":  # no sessions, forks and POSIX signals
    print(
        "error: the runner needs Linux or macOS; on Windows use WSL 2 or the library",
        file=sys.stderr,
    )
    raise SystemExit(2)
