"""Whole tensors, of which ranks may hold parts: what a rule looks at that goes over all of a layer.

Tensors of the weights' shapes, by this rank's names of the weights, are put together by the names
of whole weights, and taken apart again.
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
    """How whole tensors are had of what this rank holds."""

    def name(self, own: str) -> str:
        """The whole weight's name, by this rank's."""

    def of_own(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of which this rank has a part. All ranks call it. Raises: PeerLostError."""

    def of_all(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of all ranks, in the network's order. All ranks call it. Raises: PeerLostError."""

    def one_by_one(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the same, one at a time, on the host. All ranks go through it to the end."""

    def put(self, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        """Copies what this rank has of whole tensors into its parts, which are of the same type."""


class AllHere:
    """See `Wholes`. This rank holds all of them, as every other does."""

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
    """See `Wholes`. They are exchanged through the host's memory."""

    world: Group
    sharers: Group | None
    """The ranks among which tensors are cut; None if each is whole where it is."""
    in_parts: Callable[[Piece], Piece]
    """A piece of tensors by this rank's names, by those of whole ones."""
    name: Callable[[str], str]

    def of_own(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = self._piece(parts).parts()
        found = dict[str, Tensor]()
        if self.sharers is not None:  # a rank without a part of any helps the others
            cut = {name: part for name, part in held.items() if part.rows is not None}
            found = dict(give_all(self.sharers, cut))
        return {
            name: found[name].to(part.tensor.device) if name in found else part.tensor
            for name, part in held.items()
        }

    def of_all(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.to(self.world.device) for name, each in self.one_by_one(parts)}

    def one_by_one(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return give_all(self.world, self._piece(parts).parts())

    def put(self, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        piece = self._piece(parts)
        piece.load(InMemory({name: wholes[name] for name in piece.parts()}))

    def _piece(self, parts: Mapping[str, Tensor]) -> Piece:
        return self.in_parts(Weights(lambda: parts.items()))
