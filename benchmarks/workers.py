"""Data-loader workers that a signal to the whole process group does not end before their time."""

import multiprocessing
import signal


def ignore_signals(worker: int) -> None:
    """For `DataLoader(worker_init_fn=...)`: outlive a Ctrl-C until the run has saved and dismisses the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def dismiss_workers() -> None:
    """End the workers that an error left behind.

    Python would wait for them at its exit, after a SIGTERM that they ignore.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker ends
    for worker in multiprocessing.active_children():
        worker.kill()
