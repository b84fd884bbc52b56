"""A .fcz file's tensors as safetensors, one after the other, without a network."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from firecaffe.compression import fcz
from firecaffe.errors import CheckpointError
from firecaffe.files import written_aside
from firecaffe.training.tensor_file import write_tensors
from firecaffe.transport.collect import Whole

# what safetensors reads as facts about the file, and not as a tensor
METADATA = "__metadata__"


def unpack(file: fcz.Opened, target: Path) -> None:
    """Write all tensors. The file is never seen in part under its final name.

    Raises: CheckpointError if the .fcz file is damaged, or safetensors cannot have a tensor;
    OSError.
    """
    if any(outline.name == METADATA for outline in file.outlines):
        raise CheckpointError(f"{target}: safetensors cannot have a tensor called {METADATA}")
    listed = [
        Whole(outline.name, outline.shape, getattr(torch, outline.dtype), ())
        for outline in file.outlines
    ]
    with written_aside(target) as aside:
        problem = write_tensors(aside, listed, _decoded(file))
        if problem is not None:
            raise problem


def _decoded(file: fcz.Opened) -> Iterator[tuple[str, Tensor]]:
    for name, array in file.tensors():
        yield name, torch.from_numpy(array)
        del array  # free it before the next one is decoded
