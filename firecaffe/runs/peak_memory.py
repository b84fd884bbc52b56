"""The peak memory of this process."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of the whole process with its libraries on a CPU, of the tensors on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
