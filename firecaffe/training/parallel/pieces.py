"""Pieces of a training's state whose tensors are cut among ranks, by the whole tensors' names.

Another piece keeps them by this rank's own names, `classifier.1.parts.2.weight`, or with what an
optimizer keeps of it behind, `classifier.1.parts.2.weight/momentum_buffer`. Here that is rows of
`classifier.1.weight/momentum_buffer`, as any layout of ranks, and one rank, has it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.parallel.cut import Cut
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.stored import Stored
from firecaffe.transport.collect import HeldPart


@dataclass(frozen=True)
class Source:
    """Where a tensor of this rank's comes from."""

    whole: str
    """The whole tensor's name."""
    dim: int = 0
    cut: Cut = ()
    """How that dimension of the whole is cut; empty if it is not."""
    part: int = 0

    @property
    def range(self) -> range:
        """The rows that this part is."""
        return range(self.cut[self.part], self.cut[self.part + 1])


@dataclass(frozen=True)
class Names:
    """The tensors of a network whose layers are split, parameters and buffers."""

    sources: Mapping[str, Source]
    """Those of split layers that this rank has a part of, by its own names."""
    places: Mapping[str, int]
    """The place of each whole tensor in the network."""
    elsewhere: frozenset[str]
    """The whole tensors that other ranks have alone."""

    def source(self, path: str) -> tuple[Source, str]:
        """Where a tensor of a piece comes from, and its path by the whole tensor's name."""
        name, slash, key = path.partition("/")
        source = self.sources.get(name, Source(name))
        return source, source.whole + slash + key

    def place(self, path: str) -> int:
        """The place among all of what has the path by the whole tensor's name."""
        return self.places[path.partition("/")[0]]

    def own(self, path: str) -> list[str]:
        """This rank's paths of what has the path by the whole tensor's name."""
        name, slash, key = path.partition("/")
        if name in self.elsewhere:
            return []
        return [each + slash + key for each in self._own.get(name, [name])]

    @cached_property
    def _own(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, source in self.sources.items():
            found.setdefault(source.whole, []).append(name)
        return found


class Naming(Protocol):
    """The names of a piece's tensors, as `Names` has them of a network's."""

    def source(self, path: str) -> tuple[Source, str]: ...
    def place(self, path: str) -> int: ...
    def own(self, path: str) -> list[str]: ...


class InParts:
    """A piece, by whole names; see `training.piece.Piece`."""

    held_by_all = False

    def __init__(self, piece: Piece, names: Naming) -> None:
        self._piece, self._names = piece, names

    @property
    def is_result(self) -> bool:
        return self._piece.is_result

    def parts(self) -> dict[str, HeldPart]:
        found: dict[str, list[tuple[Source, Tensor]]] = {}
        for path, part in self._piece.parts().items():
            source, whole = self._names.source(path)
            found.setdefault(whole, []).append((source, part.tensor))
        return {path: _held(parts, self._names.place(path)) for path, parts in found.items()}

    def load(self, stored: Stored) -> None:
        self._piece.load(_ByOwnNames(stored, self._names))


def _held(parts: Sequence[tuple[Source, Tensor]], place: int) -> HeldPart:
    source, first = parts[0]
    # What an optimizer counts is no row of a weight.
    if not source.cut or first.ndim <= source.dim or first.shape[source.dim] != len(source.range):
        return HeldPart(first, order=place)
    rest = tuple((other.range, tensor) for other, tensor in parts[1:])
    return HeldPart(first, source.range, source.cut[-1], place, source.dim, rest)


class NumbersInParts:
    """Numbers of parts, by whole names; those of all parts of a tensor are the same. See
    `training.piece.Numbers`.
    """

    def __init__(self, numbers: Numbers, names: Names) -> None:
        self._numbers, self._names = numbers, names

    def state_dict(self) -> dict[str, Any]:
        return {
            self._names.source(path)[1]: value for path, value in self._numbers.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._numbers.load_state_dict(
            {each: value for path, value in state.items() for each in self._names.own(path)}
        )


class NumbersOfRow(NumbersInParts):
    """Numbers of all parts that the ranks of a row have between them; all of them ask, and get the
    same, in the network's order.
    """

    def __init__(self, numbers: Numbers, names: Names, row: Group) -> None:
        super().__init__(numbers, names)
        self._row = row

    def state_dict(self) -> dict[str, Any]:
        told = gather_text(self._row, json.dumps(super().state_dict()))
        found = {path: value for own in told for path, value in json.loads(own).items()}
        return dict(sorted(found.items(), key=lambda each: self._names.place(each[0])))


class _ByOwnNames(Stored):
    """Whole tensors that are stored, as this rank's parts of them."""

    def __init__(self, stored: Stored, names: Naming) -> None:
        self._stored, self._names = stored, names

    def full_name(self, name: str) -> str:
        return self._stored.full_name(self._names.source(name)[1])

    def shape(self, name: str) -> tuple[int, ...]:
        source, whole = self._names.source(name)
        shape = list(self._stored.shape(whole))
        if self._is_cut(source, shape):
            shape[source.dim] = len(source.range)
        return tuple(shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored.dtype(self._names.source(name)[1])

    def __getitem__(self, name: str) -> Tensor:
        source, whole = self._names.source(name)
        if self._is_cut(source, self._stored.shape(whole)):
            return self._stored.rows(whole, source.range, source.dim)
        return self._stored[whole]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._names.source(name)[1] in self._stored

    def __iter__(self) -> Iterator[str]:
        for path in self._stored:
            yield from self._names.own(path)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @staticmethod
    def _is_cut(source: Source, shape: Sequence[int]) -> bool:
        return bool(source.cut) and len(shape) > source.dim and shape[source.dim] == source.cut[-1]
