"""The protocol of a piece of a training's state; see `training.state`."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from firecaffe.training.stored import Stored
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
