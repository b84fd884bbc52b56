"""The protocol of a piece of a training's state; see `training.state`.

Weights and buffers as pieces of a training's state: every rank holds all of them.

One digest of the losses of all steps.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from firecaffe.errors import UnfitCheckpointError
from firecaffe.training.tensor_file import Stored
from firecaffe.transport.collect import HeldPart


class Piece(Protocol):
    """Named tensors of a training, and who holds them."""

    @property
    def held_by_all(self) -> bool:
        """Whether every rank holds all of them, the same bits; the same answer on all ranks."""

    @property
    def is_result(self) -> bool:
        """Whether they are what the training comes to: they enter its digests, and none with an
        infinity or a NaN is saved.
        """

    def parts(self) -> dict[str, HeldPart]:
        """The parts of them that this rank holds: the live tensors, no copies. Their order is that
        of the digests; if ranks have other names, `HeldPart.order` tells it.
        """

    def load(self, stored: Stored) -> None:
        """Takes what this rank holds, and reads no more: one tensor at a time, and if all hold the
        piece, in the same order on all ranks. Raises: CheckpointError if names, shapes or types
        are those of something else.
        """


class Numbers(Protocol):
    """State that is no tensor: JSON, alike on all ranks."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class NumbersOfParts(ABC):
    """Numbers that are those of parts, by name."""

    @property
    @abstractmethod
    def _parts(self) -> dict[str, Numbers]: ...

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


class Weights:
    """A network's parameters, or its buffers; see `training.piece.Piece`."""

    held_by_all = True

    def __init__(
        self, named: Callable[[], Iterable[tuple[str, Tensor]]], is_result: bool = True
    ) -> None:
        """named: `model.named_parameters` or `model.named_buffers`."""
        self._named, self.is_result = named, is_result

    def parts(self) -> dict[str, HeldPart]:
        return {name: HeldPart(tensor.detach()) for name, tensor in self._named()}

    def load(self, stored: Stored) -> None:
        load_parts(self.parts(), stored)


@torch.no_grad()
def load_parts(parts: dict[str, HeldPart], stored: Stored) -> None:
    """Loads into each part the rows that it holds, one tensor at a time, and reads no others.

    Raises: UnfitCheckpointError if names, shapes or types are not the same.
    """
    strangers = stored.keys() - parts.keys()
    if strangers:
        name = next(name for name in stored if name in strangers)
        raise UnfitCheckpointError(
            f"checkpoint holds {stored.full_name(name)}, which the model does not have"
        )
    for name, part in parts.items():
        if name not in stored:
            raise UnfitCheckpointError(f"checkpoint lacks {name}, which the model has")
        shape, dtype = stored.shape(name), stored.dtype(name)
        if shape != part.shape or dtype != part.tensor.dtype:
            raise UnfitCheckpointError(
                f"{name} is {dtype} {shape} in the checkpoint, "
                f"{part.tensor.dtype} {part.shape} in the model"
            )
        take_rows(part, stored, name)


@torch.no_grad()
def take_rows(part: HeldPart, stored: Stored, name: str) -> None:
    """Takes what this rank holds of a stored tensor of the same shape, and reads no more."""
    for rows, tensor in part.runs:
        tensor.copy_(stored[name] if rows is None else stored.rows(name, rows, part.dim))


@dataclass
class Losses:
    """The history of losses that a training carries; all ranks hold it alike."""

    history: str = ""
    """The digest of all losses so far; empty before the first."""

    def add(self, loss: float) -> None:
        """Extends the history by a step's loss."""
        self.history = extend_history(self.history, loss)


def extend_history(history: str, loss: float) -> str:
    """The digest of all losses so far: SHA-256 of the one before and the loss's exact value."""
    exact = loss.hex() if math.isfinite(loss) else repr(loss)
    return hashlib.sha256(f"{history} {exact}".encode()).hexdigest()
