"""glibc's malloc, told to keep what is freed.

By default glibc maps every large allocation anew and gives it back when freed, so each training
step on a CPU page-faults through all of its activations again. Measured with DDP on NiN, batches
of 64 on each worker: 95 images/s against 135 (benchmarks/results/training.md).
"""

import ctypes
import sys

# Source: glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> bool:
    """Serves large blocks from the heap and never shrinks it. Returns False without glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))
