"""glibc's malloc, set to keep freed memory or to give it back.

By default glibc maps every large allocation anew and gives it back when freed, so each training
step on a CPU page-faults through all of its activations again. Measured with DDP on NiN, batches of
64 on each worker: 95 images/s against 135 (benchmarks/results/training.md).
"""

import ctypes
import sys
from functools import cache
from typing import Any

# Source: glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> bool:
    """Serve large blocks from the heap and never shrink it. Return False without glibc."""
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))


def give_back_freed_memory() -> None:
    """Give back the pages of all memory that is free now."""
    # Small blocks soon take a part of a large one that was freed. The next large block then goes
    # elsewhere, and both places count.
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _glibc(name: str) -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL("libc.so.6"), name)
    except (OSError, AttributeError):
        return None
