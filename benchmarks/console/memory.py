"""The C library's memory."""

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Options of glibc's `mallopt`."""


def keep_memory() -> bool:
    """Keep freed memory for the next tensor; True if it is kept.

    glibc would hand large tensors back after each use, and Linux clear their pages for the next one. Other systems
    stay as they are, and so does an environment that sets this (MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_).
    """
    given = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys()
    if given or sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # another C library
        return False
    return bool(library.mallopt(MMAP_MAX, 0) and library.mallopt(TRIM_THRESHOLD, -1))  # -1: never
