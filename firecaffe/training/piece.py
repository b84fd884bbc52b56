"""Pieces of a training's state (see `training.state`), and a digest of the losses of all steps.

For rules that need whole layers, `Wholes` assembles the parts of tensors that ranks hold, renames
them from this rank's names to those of the whole weights, and divides them again.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
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
        """Whether every rank holds all of them, the same bits. All ranks give the same answer."""

    @property
    def is_result(self) -> bool:
        """Whether these are results: digested, and never saved with an infinity or a NaN."""

    def parts(self) -> dict[str, HeldPart]:
        """Return this rank's live tensors in digest order; see `HeldPart.order` for exceptions."""

    def load(self, stored: Stored) -> None:
        """Load this rank's tensors or rows, one tensor at a time, and read nothing else.

        If all ranks hold the piece, they load in the same order. Raises: CheckpointError.
        """


class Numbers(Protocol):
    """State that is not tensors: JSON, the same on all ranks."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class NumbersOfParts(ABC):
    @property
    @abstractmethod
    def _parts(self) -> dict[str, Numbers]: ...

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


class Weights:
    """Parameters or buffers that every rank holds; implements `Piece`."""

    held_by_all = True

    def __init__(
        self, named: Callable[[], Iterable[tuple[str, Tensor]]], is_result: bool = True
    ) -> None:
        self._named, self.is_result = named, is_result

    def parts(self) -> dict[str, HeldPart]:
        return {name: HeldPart(tensor.detach()) for name, tensor in self._named()}

    def load(self, stored: Stored) -> None:
        load_parts(self.parts(), stored)


@torch.no_grad()
def load_parts(parts: dict[str, HeldPart], stored: Stored) -> None:
    """Load each part's rows, and read no other rows. Raises: UnfitCheckpointError."""
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
    """Copy this rank's rows of a stored tensor of the same shape, and read no more."""
    for rows, tensor in part.runs:
        tensor.copy_(stored[name] if rows is None else stored.rows(name, rows, part.dim))


@dataclass
class Losses:
    history: str = ""
    """The digest of all losses so far; empty before the first."""

    def add(self, loss: float) -> None:
        """Digest the digest so far and the loss's exact value."""
        exact = loss.hex() if math.isfinite(loss) else repr(loss)
        self.history = hashlib.sha256(f"{self.history} {exact}".encode()).hexdigest()


class Wholes(Protocol):
    """Makes whole tensors from the parts that ranks hold, and copies them back."""

    def name(self, own: str) -> str:
        """Return the whole weight's name for this rank's name of it."""

    def of_own(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole tensors of which this rank has a part. All ranks call it."""

    def of_all(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all ranks' whole tensors, in the network's order. All ranks call it."""

    def one_by_one(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all whole tensors on the host, one at a time. All ranks iterate to the end."""

    def put(self, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts from whole tensors, which are of the same type."""


class LocalWholes:
    """Implements `Wholes` for tensors that every rank holds."""

    def name(self, own: str) -> str:
        return own

    def of_own(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(parts)

    of_all = of_own

    def one_by_one(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return iter(parts.items())

    def put(self, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            part.copy_(wholes[name])
