"""A checkpoint on its way to all ranks: one reads and verifies it, the others receive it."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from firecaffe.cluster.agree import broadcast, gather_text, text_of_first
from firecaffe.cluster.world import World
from firecaffe.errors import AgreementError, CheckpointError
from firecaffe.files import open_regular
from firecaffe.training.checkpoint import Checkpoint, digest_of
from firecaffe.training.tensor_file import Stored

WORDS = ("step", "identity", "probe", "history", "numbers", "doubts", "digest")

# bytes of a file that are sent at once
CHUNK_BYTES = 1 << 24


def pass_on(world: World, found: Checkpoint | None) -> Checkpoint:
    """Give all ranks rank 0's checkpoint. Its tensors follow one at a time, see `PassedOn`.

    A piece held in parts stays in its file: each rank reads its part there, or in a copy if it does
    not see the file. Raises: PeerLostError; CheckpointError if a copy cannot be made.
    """
    if world.group is None:
        assert found is not None
        return found
    said = json.loads(text_of_first(world, "" if found is None else json.dumps(_words(found))))
    kinds = {name: (tuple(shape), getattr(torch, dtype)) for name, shape, dtype in said["tensors"]}
    passed = Checkpoint(
        tensors=PassedOn(world, kinds, None if found is None else found.tensors),
        piece_files={name: Path(path) for name, path in said["piece_files"].items()},
        folder=Path(said["folder"]),
        **{word: said[word] for word in WORDS},
    )
    if passed.piece_files:
        assert passed.folder is not None  # it was read from there
        sees = digest_of(passed.folder) == passed.digest
        if not all(gather_text(world, "yes" if sees else "")):
            _copy_pieces(world, passed, sees)
    return passed


def _copy_pieces(world: World, passed: Checkpoint, sees: bool) -> None:
    # All ranks call it. The copies have no name, so nothing of them is left however the process
    # ends.
    for name, path in passed.piece_files.items():
        copy = None if sees else tempfile.TemporaryFile()  # noqa: SIM115
        try:
            _send_file(world, path, copy)
        except OSError as error:
            where = f"{path}: cannot be copied to {world.host}, which does not see it"
            raise CheckpointError(f"{where}: {error.strerror}") from error
        if copy is not None:
            passed.copies.append(copy)
            passed.piece_files[name] = Path(f"/dev/fd/{copy.fileno()}")


def _send_file(world: World, path: Path, copy: IO[bytes] | None) -> None:
    size = torch.tensor([path.stat().st_size if world.is_first else 0])
    broadcast(world, size)
    source = open_regular(path) if world.is_first else None
    try:
        for start in range(0, int(size), CHUNK_BYTES):
            length = min(CHUNK_BYTES, int(size) - start)
            data = bytearray(length if source is None else source.read(length))
            broadcast(world, torch.frombuffer(data, dtype=torch.uint8))
            if copy is not None:
                copy.write(data)
        if copy is not None:
            copy.flush()
    finally:
        if source is not None:
            source.close()


class PassedOn(Stored):
    """Rank 0's tensors on all ranks, each read and sent, but not stored, when all ask for it."""

    def __init__(
        self,
        world: World,
        kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        source: Stored | None,
    ) -> None:
        # kinds: shape and type of each tensor, in one order on all ranks. source: on rank 0.
        self._world, self._kinds, self._source = world, kinds, source
        self._numbers = {name: number for number, name in enumerate(kinds)}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._kinds[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._kinds[name][1]

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor. All ranks have to ask for the same ones in the same order.

        Raises: AgreementError if rank 0 asks for another; CheckpointError on rank 0 if it cannot be
        read.
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
            # As bytes, because the group does not know every type.
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
