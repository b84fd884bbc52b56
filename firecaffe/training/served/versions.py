"""A copy of the weights: in memory, or in a file that is mapped into it.

A server keeps a version of the weights for each learner that computes with it. Of many learners, or
of a large network, these are more than memory should hold. The pages of a mapped file are the
system's to write out and to read again, and its tensors are used as any others. The file is in the
folder for temporary files (TMPDIR) and has no name, so nothing is left of it however the process
ends.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor

from firecaffe.errors import RunError

ALIGNMENT = 64
"""Bytes between whose multiples tensors begin."""


def copy_in_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in tensors.items()}


def copy_in_file(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """tensors: on the host, each in one piece of memory. The copies have their strides, on which
    the bits of a convolution may depend. Raises: RunError if there is no room.
    """
    places, end = {}, 0
    for name, each in tensors.items():
        places[name] = end
        end += -(-each.nbytes // ALIGNMENT) * ALIGNMENT
    data, copies = bytes_in_file(end), {}
    for name, each in tensors.items():
        run = data[places[name] : places[name] + each.nbytes].view(each.dtype)
        copies[name] = run.as_strided(each.shape, each.stride()).copy_(each)
    return copies


def bytes_in_file(size: int) -> Tensor:
    """So many zeros. Raises: RunError if there is no room."""
    return torch.frombuffer(_mapped(max(size, 1)), dtype=torch.uint8)[:size]


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Bytes."""
    return sum(each.nbytes for each in tensors.values())


def _mapped(size: int) -> mmap.mmap:
    try:
        with tempfile.TemporaryFile() as file:
            if sys.platform.startswith("linux"):  # or a full disk would kill the process
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise RunError(
            f"{tempfile.gettempdir()}: no room for a version of the weights, {size:,} bytes "
            f"({error.strerror}); another folder for temporary files is set by TMPDIR, and fewer "
            "learners have fewer versions"
        ) from error
