"""A checkpoint on its way to all ranks: one reads and verifies it, the others receive it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from firecaffe.cluster.agree import broadcast, text_of_first
from firecaffe.cluster.world import World
from firecaffe.errors import AgreementError
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.stored import Stored

WORDS = ("step", "identity", "probe", "history", "numbers", "doubts", "digest")
"""The parts of a checkpoint that are no tensor and no path."""


def pass_on(world: World, found: Checkpoint | None) -> Checkpoint:
    """Gives all ranks rank 0's checkpoint; its tensors follow one at a time, see `PassedOn`. A
    piece that is held in parts stays in its file: each rank reads its own part there.

    found: on rank 0. Raises: PeerLostError.
    """
    if world.group is None:
        assert found is not None
        return found
    said = json.loads(text_of_first(world, "" if found is None else json.dumps(_words(found))))
    kinds = {name: (tuple(shape), getattr(torch, dtype)) for name, shape, dtype in said["tensors"]}
    return Checkpoint(
        tensors=PassedOn(world, kinds, None if found is None else found.tensors),
        piece_files={name: Path(path) for name, path in said["piece_files"].items()},
        folder=Path(said["folder"]),
        **{word: said[word] for word in WORDS},
    )


class PassedOn(Stored):
    """Rank 0's tensors, on all ranks: each is read there and sent when it is asked for, and is not
    kept. So all ranks have to ask for the same tensors in the same order.
    """

    def __init__(
        self,
        world: World,
        kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        source: Stored | None,
    ) -> None:
        """kinds: shape and type of each tensor, in one order on all ranks. source: on rank 0."""
        self._world, self._kinds, self._source = world, kinds, source
        self._numbers = {name: number for number, name in enumerate(kinds)}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._kinds[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._kinds[name][1]

    def __getitem__(self, name: str) -> Tensor:
        """Raises: AgreementError if rank 0 asks for another one; CheckpointError on rank 0, if it
        cannot be read; PeerLostError.
        """
        asked = torch.tensor([self._numbers[name]])
        broadcast(self._world, asked)
        if int(asked) != self._numbers[name]:
            first = list(self._kinds)[int(asked)]
            raise AgreementError(
                f"rank 0 asks the checkpoint for {first}, rank {self._world.rank} for {name}; "
                "all ranks load the same tensors in the same order"
            )
        shape, dtype = self._kinds[name]
        if self._source is None:
            tensor = torch.empty(shape, dtype=dtype)
        else:
            tensor = self._source[name].contiguous()
        if tensor.numel():
            # As bytes: the group does not know every type.
            broadcast(self._world, tensor.reshape(-1).view(torch.uint8))
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def _words(checkpoint: Checkpoint) -> dict[str, object]:
    stored = checkpoint.tensors
    dtypes = {name: str(stored.dtype(name)).removeprefix("torch.") for name in stored}
    return {
        **{word: getattr(checkpoint, word) for word in WORDS},
        "tensors": [[name, stored.shape(name), dtype] for name, dtype in dtypes.items()],
        # Another host may have another working directory.
        "piece_files": {name: str(p.absolute()) for name, p in checkpoint.piece_files.items()},
        "folder": str(checkpoint.folder and checkpoint.folder.absolute()),
    }
