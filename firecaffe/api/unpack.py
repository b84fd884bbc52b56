"""`firecaffe.unpack`: the weights of a .fcz file as safetensors."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firecaffe.api.answer import Answer, check_target
from firecaffe.api.argument_checks import path_of
from firecaffe.cluster.from_script import from_script
from firecaffe.compression import fcz
from firecaffe.errors import CheckpointError
from firecaffe.files import written_aside
from firecaffe.resume_advice import option
from firecaffe.training.tensor_file import write_tensors
from firecaffe.transport.collect import Whole

METADATA = "__metadata__"
"""The name of what safetensors reads as facts about the file, and not as a tensor."""


def write_unpacked(file: fcz.Opened, target: Path) -> None:
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


@dataclass(frozen=True, repr=False)
class Unpacked(Answer):
    """A file of weights, and what the .fcz file says of its network."""

    path: Path
    """The file of weights."""
    tensors: int
    """The number of tensors."""
    bytes: int
    """The bytes of the file of weights."""
    coded_bytes: int
    """The bytes of the .fcz file."""
    network: dict[str, Any]
    """The facts about the network in the .fcz file."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return {**self.__dict__, "path": str(self.path)}

    def _parts(self) -> Iterator[str]:
        yield (
            f"{self.path}: {self.tensors} tensors, {self.bytes:,} bytes; as .fcz "
            f"{self.coded_bytes:,}"
        )
        yield f"network: {json.dumps(self.network)}"


@from_script
def unpack(file: str | Path, *, to: str | Path = "", overwrite: bool = False) -> Unpacked:
    """Write the weights of a .fcz file as safetensors, bit for bit. No code of the file is run.

    Args:
        file: The .fcz file.
        to: The file to write; else the same name with .safetensors.
        overwrite: Write over a file that exists.

    Raises: RecipeError for a wrong argument; RunError; CheckpointError for a damaged file.
    """
    path = path_of("file", file)
    target = path.with_suffix(".safetensors") if to == "" else path_of("to", to)
    with fcz.read(path) as opened:
        check_target(option("to"), str(target), overwrite, (".safetensors",))
        write_unpacked(opened, target)
        network, count = dict(opened.network), len(opened.outlines)
    return Unpacked(target, count, target.stat().st_size, path.stat().st_size, network)
