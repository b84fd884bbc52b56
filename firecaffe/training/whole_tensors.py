"""Whole tensors, of which ranks may hold parts: for rules that look at all of a layer.

Tensors of the weights' shapes, by this rank's names, are combined under the whole weights' names,
and divided again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.training.piece import Piece, Weights
from firecaffe.training.tensor_file import InMemory
from firecaffe.transport.collect import give_all


class Wholes(Protocol):
    """Makes whole tensors of the parts that ranks hold."""

    def name(self, own: str) -> str:
        """Return the whole weight's name for this rank's name of it."""

    def of_own(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of which this rank has a part. All ranks call it."""

    def of_all(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all ranks' tensors, in the network's order. All ranks call it."""

    def one_by_one(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all ranks' tensors on the host, one at a time. All ranks iterate to the end."""

    def put(self, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts from whole tensors, which are of the same type."""


class AllHere:
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


@dataclass(frozen=True)
class OfRanks:
    """Implements `Wholes` by exchanges through the host's memory."""

    world: Group
    sharers: Group | None
    """The ranks among which tensors are cut; None if each is whole where it is."""
    in_parts: Callable[[Piece], Piece]
    """Renames a piece's tensors from this rank's names to those of whole ones."""
    name: Callable[[str], str]

    def of_own(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = self._piece(parts).parts()
        wholes = dict[str, Tensor]()
        if self.sharers is not None:  # also a rank without a part calls it
            cut = {name: part for name, part in held.items() if part.rows is not None}
            wholes = dict(give_all(self.sharers, cut))
        return {
            name: wholes[name].to(part.tensor.device) if name in wholes else part.tensor
            for name, part in held.items()
        }

    def of_all(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.world.device) for name, tensor in self.one_by_one(parts)}

    def one_by_one(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return give_all(self.world, self._piece(parts).parts())

    def put(self, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        piece = self._piece(parts)
        piece.load(InMemory({name: wholes[name] for name in piece.parts()}))

    def _piece(self, parts: Mapping[str, Tensor]) -> Piece:
        return self.in_parts(Weights(lambda: parts.items()))
