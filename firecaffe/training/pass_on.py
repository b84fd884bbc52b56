"""A checkpoint on its way to all ranks: one reads and verifies it, the others receive it."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from firecaffe.cluster.agree import broadcast, text_of_first
from firecaffe.cluster.world import World
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.stored import Stored

WORDS = ("step", "identity", "probe", "history", "numbers", "doubts", "digest")
"""The parts of a checkpoint that are no tensor and no path."""


def pass_on(world: World, found: Checkpoint | None) -> Checkpoint:
    """Rank 0's checkpoint, on all ranks; the tensors go one after the other. A piece that is
    held in parts stays in its file: each rank reads its own part there.

    found: on rank 0. Raises: CheckpointError on rank 0, if a tensor cannot be read;
    PeerLostError.
    """
    if world.group is None:
        assert found is not None
        return found
    said = json.loads(text_of_first(world, "" if found is None else json.dumps(_words(found))))
    received = {}
    for name, shape, dtype in said["tensors"]:
        if found is None:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        else:
            tensor = found.tensors[name].contiguous()
        if tensor.numel():
            # As bytes: the group does not know every type.
            broadcast(world, tensor.reshape(-1).view(torch.uint8))
        if found is None:
            received[name] = tensor
    if found is not None:
        return found
    return Checkpoint(
        tensors=Received(received),
        piece_files={name: Path(path) for name, path in said["piece_files"].items()},
        folder=Path(said["folder"]),
        **{word: said[word] for word in WORDS},
    )


class Received(Stored):
    """Tensors that are there, and go when they are read: the training holds them then."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._known = {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._known[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._known[name][1]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors.pop(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _words(checkpoint: Checkpoint) -> dict[str, object]:
    stored = checkpoint.tensors
    dtypes = {name: str(stored.dtype(name)).removeprefix("torch.") for name in stored}
    return {
        **{word: getattr(checkpoint, word) for word in WORDS},
        "tensors": [[name, stored.shape(name), dtype] for name, dtype in dtypes.items()],
        "piece_files": {name: str(path) for name, path in checkpoint.piece_files.items()},
        "folder": str(checkpoint.folder),
    }
