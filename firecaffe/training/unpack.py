"""A .fcz file's tensors as safetensors, one after the other, without a network."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from firecaffe.compression import fcz
from firecaffe.training.tensor_file import write_tensors
from firecaffe.transport.collect import Whole


def unpack(file: fcz.Opened, target: Path) -> None:
    """Writes all tensors, so that under its final name the file is never seen in part.

    Raises: CheckpointError if the .fcz file is damaged; OSError.
    """
    listed = [
        Whole(each.name, each.shape, getattr(torch, each.dtype), ()) for each in file.outlines
    ]
    aside = target.with_name(f".partial.{target.name}")
    try:
        problem = write_tensors(aside, listed, _decoded(file))
        if problem is not None:
            raise problem
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def _decoded(file: fcz.Opened) -> Iterator[tuple[str, Tensor]]:
    for name, array in file.tensors():
        yield name, torch.from_numpy(array)
        del array  # before the next one is decoded
