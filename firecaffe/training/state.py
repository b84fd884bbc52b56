"""The state that a training carries from step to step, in pieces that say who holds them.

A *piece* is a set of named tensors: parameters, buffers, optimizer state, a compressor's memory.
Either every rank holds all of a piece, the same bits, or each rank holds a part: some of the
tensors (a node's memory, a replica, a server's weights), or some rows of them (a layer that is
split among ranks). `parts` returns what this rank has. Thus

- rank 0 alone writes a checkpoint, tensor by tensor, each whole and by its name. Nothing is
  gathered on a rank that does not write;
- a rank that loads reads only what it holds. So any layout of ranks resumes any other's checkpoint;
- digests are of whole tensors, however ranks hold them.

In a checkpoint, state.safetensors has the pieces that all hold, as PIECE/NAME. Each other piece has
its own file, PIECE.safetensors, with NAME. Loading looks at both, because a piece that four ranks
hold in parts may be held by all if there is one rank.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from firecaffe.cluster.agree import (
    broadcast_text,
    copy_from_first,
    differing_ranks,
    digest,
    digest_each,
    gather_json,
    gather_text,
    ranks_that_differ,
)
from firecaffe.cluster.world import World
from firecaffe.errors import CheckpointError, NotFiniteError, UnfitCheckpointError
from firecaffe.training.checkpoint import STATE, Checkpoint
from firecaffe.training.parallel.cut_pieces import NumbersInParts
from firecaffe.training.piece import Losses, Numbers, Piece
from firecaffe.training.tensor_file import Stored, TensorFile, Under
from firecaffe.transport.collect import Whole, collect, list_wholes

WEIGHTS = ("parameter", "buffer")
"""The pieces that `weights_sha256` digests."""


ORDER = (
    *WEIGHTS,
    "optimizer",
    *("ema", "mask", "dense", "code"),
    *("server", "batch_norm", "outer", "replica", "compressor"),
)


def _place_of(name: str) -> int:
    kind = name.partition("-")[0]
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


class State:
    def __init__(
        self, world: World, pieces: dict[str, Piece], numbers: dict[str, Numbers] | None = None
    ) -> None:
        # numbers: by their keys in meta.json.
        self.world = world
        self.pieces = {name: pieces[name] for name in sorted(pieces, key=_place_of)}
        self.numbers = numbers or {}
        self.losses = Losses()
        self._infinite_at_start = set[str]()
        self._resumed: Checkpoint | None = None

    def add(self, name: str, piece: Piece) -> None:
        """Add a piece that is made later than others, and load it if the training is resumed."""
        self.pieces[name] = piece
        if self._resumed is not None:
            piece.load(stored_piece(self._resumed, name, piece.held_by_all))

    def copy_from_first(self) -> list[int]:
        """Give all ranks rank 0's pieces that all hold. Returns the ranks whose values differed."""
        return copy_from_first(self.world, self.tensors_held_by_all())

    def load(self, checkpoint: Checkpoint) -> None:
        """Load all pieces from a checkpoint, on all ranks. Raises: UnfitCheckpointError."""
        for full_name in checkpoint.tensors:
            if full_name.partition("/")[0] not in self.pieces:
                raise UnfitCheckpointError(
                    f"checkpoint holds {full_name}, which the model does not have"
                )
        for name, piece in self.pieces.items():
            piece.load(stored_piece(checkpoint, name, piece.held_by_all))
        for word, numbers in self.numbers.items():
            if checkpoint.numbers.get(word):
                _take(word, numbers, checkpoint.numbers[word])
        self.losses.history = checkpoint.history
        self._resumed = checkpoint

    def check_all_loaded(self) -> None:
        """Raise UnfitCheckpointError if the resumed checkpoint holds more than was loaded."""
        if self._resumed is None:
            return
        resumed = {word for word, values in self._resumed.numbers.items() if values}
        left = {
            *(self._resumed.piece_files.keys() - self.pieces.keys()),
            *(resumed - self.numbers.keys()),
        }
        if left:
            names = ", ".join(sorted(left))
            raise UnfitCheckpointError(
                f"checkpoint holds {names}, which this training does not have"
            )

    def tensors_held_by_all(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the live tensors of pieces that all ranks hold, by PIECE/NAME."""
        return {
            f"{name}/{key}": part.tensor
            for name in (self.pieces if names is None else names)
            if self.pieces[name].held_by_all
            for key, part in self.pieces[name].parts().items()
        }

    def own_bytes(self, name: str) -> int:
        parts = self.pieces[name].parts().values()
        return sum(tensor.nbytes for part in parts for tensor in part.tensors)

    def names_held_in_parts(self) -> list[str]:
        return [name for name, piece in self.pieces.items() if not piece.held_by_all]

    def listed(self, name: str) -> list[Whole]:
        """List the tensors of a piece held in parts, equal on all ranks. Raises: AgreementError."""
        return list_wholes(self.world, self.pieces[name].parts())

    def collect(self, name: str, listed: Sequence[Whole]) -> Iterator[tuple[str, Tensor]]:
        """Yield a piece's whole tensors on rank 0, one by one. All ranks iterate to the end."""
        return collect(self.world, listed, self.pieces[name].parts())

    def collect_numbers(self) -> dict[str, dict[str, Any]]:
        """Return all numbers by their keys, on rank 0. All ranks call it. Raises: PeerLostError."""
        collected: dict[str, dict[str, Any]] = {}
        for word, numbers in self.numbers.items():
            if isinstance(numbers, NumbersInParts):
                stated = gather_json(self.world, numbers.state_dict())
                collected[word] = {n: v for of_rank in stated for n, v in of_rank.items()}
            elif self.world.is_first:
                collected[word] = numbers.state_dict()
        return collected

    def begin(self) -> None:
        """Remember buffers that are not finite before the first step, as a mask of infinities."""
        self._infinite_at_start = {
            name
            for name, tensor in self._own_results().items()
            if name.startswith("buffer/") and first_not_finite({name: tensor})
        }

    def check_finite(self) -> None:
        """Check results for infinities and NaN, except tensors that had some at the beginning.

        Each rank checks its parts, rank 0 also what all hold. Raises: NotFiniteError on all ranks.
        """
        local_results = self._own_results()
        for name in self._infinite_at_start:
            local_results.pop(name, None)
        said = gather_text(self.world, first_not_finite(local_results))
        broken = next((text for text in said if text), "")
        if broken:
            raise NotFiniteError(f"after the update {broken} is not finite")

    def _own_results(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": part.tensor
            for name in self._results()
            if self.world.is_first or not self.pieces[name].held_by_all
            for key, part in self.pieces[name].parts().items()
        }

    @property
    def has_all_weights(self) -> bool:
        """Whether every rank holds all parameters and buffers."""
        return all(piece.held_by_all for name, piece in self.pieces.items() if name in WEIGHTS)

    def compare_weights(self) -> tuple[str, list[int]]:
        """Return the digest of all weights, this rank's if it holds all, and ranks that differ.

        A rank differs if most ranks that hold the same tensor, or rows, have other bits of it.
        """
        if self.has_all_weights:
            local_digest = weights_digest(self.tensors_held_by_all(WEIGHTS))
            return local_digest, ranks_that_differ(self.world, local_digest)
        by_part: dict[str, dict[int, str]] = {}
        for rank, digests in enumerate(gather_json(self.world, self._digests_of_parts())):
            for part, value in digests.items():
                by_part.setdefault(part, {})[rank] = value
        different = {
            [*values][place]
            for values in by_part.values()
            for place in differing_ranks([*values.values()])
        }
        return self._digest(WEIGHTS), sorted(different)

    def _digests_of_parts(self) -> dict[str, str]:
        return {
            f"{kind}/{name} {rows} {part.dim}": digest([(name, tensor)])[:16]
            for kind in WEIGHTS
            for name, part in self.pieces[kind].parts().items()
            for rows, tensor in part.runs
        }

    def sha256(self) -> str:
        """Return the digest of all results of the training, and of the losses of all steps."""
        tensors = self._digest(self._results())
        return state_digest(tensors, self.losses.history)

    def digest_each(self) -> dict[str, str]:
        """Return digests of all tensors and losses, 16 hex digits, on rank 0. All ranks call it."""
        return _short(digest_each(self._wholes(self._results())), self.losses.history)

    def digest_each_of(self, checkpoint: Checkpoint) -> dict[str, str]:
        digests: dict[str, str] = {}
        for name in self._results():
            stored = stored_piece(checkpoint, name, self.pieces[name].held_by_all)
            digests |= digest_each((f"{name}/{key}", stored[key]) for key in stored)
        return _short(digests, checkpoint.history)

    def _results(self) -> list[str]:
        return [name for name, piece in self.pieces.items() if piece.is_result]

    def _digest(self, names: Sequence[str]) -> str:
        if all(self.pieces[name].held_by_all for name in names):
            return digest(self.tensors_held_by_all(names).items())
        return broadcast_text(self.world, digest(self._wholes(names)))

    def _wholes(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if not self.pieces[name].held_by_all:
                for key, tensor in self.collect(name, self.listed(name)):
                    yield f"{name}/{key}", tensor
            elif self.world.is_first:
                yield from self.tensors_held_by_all([name]).items()


def _short(digests: Mapping[str, str], history: str) -> dict[str, str]:
    return {name: value[:16] for name, value in {**digests, "losses": history}.items()}


def _take(word: str, numbers: Numbers, state: dict[str, Any]) -> None:
    # Numbers of torch and of plug-ins raise various errors for an invalid state.
    try:
        numbers.load_state_dict(state)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        said = str(error) if isinstance(error, ValueError) else repr(error)
        raise CheckpointError(f"checkpoint's {word} cannot be taken ({said:.200})") from error


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of the parameters and buffers among tensors by PIECE/NAME."""
    return digest(item for item in tensors.items() if item[0].partition("/")[0] in WEIGHTS)


def state_digest(tensors: str, history: str) -> str:
    return hashlib.sha256(f"{tensors} {history}".encode()).hexdigest()


def first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor with an infinity or a NaN; empty if none has."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor)
            if not (math.isfinite(low) and math.isfinite(high)):
                return name
    return ""


def stored_piece(checkpoint: Checkpoint, name: str, held_by_all: bool = True) -> Stored:
    """Return a piece's stored tensors, from its own file or from those that rank 0 passes on."""
    if name in checkpoint.piece_files:
        return TensorFile(checkpoint.piece_files[name])
    passed_on = Under(checkpoint.tensors, name)
    if held_by_all or not len(passed_on) or checkpoint.folder is None:
        return passed_on
    # Ranks that hold parts need different tensors, but rank 0 passes the same ones on to all.
    return Under(TensorFile(checkpoint.folder / STATE), name)
