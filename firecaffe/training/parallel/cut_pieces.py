"""Pieces of a training's state whose tensors are cut among ranks, under the whole tensors' names.

The wrapped piece has them under this rank's names, such as `classifier.1.parts.2.weight`, or
`classifier.1.parts.2.weight/momentum_buffer` for what an optimizer keeps. The wrapper has the
latter as rows of `classifier.1.weight/momentum_buffer`, a name that suits any layout of ranks.
When the first weights are drawn, each rank keeps its own parts.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import broadcast, broadcast_text, digest, gather_json, gather_text
from firecaffe.cluster.group import Group
from firecaffe.cluster.world import World
from firecaffe.data import Dataset
from firecaffe.errors import RecipeError
from firecaffe.models.drawing import Drawing, follow, named_tensors
from firecaffe.parallel.cut import Cut
from firecaffe.parallel.layers_in_parts import Piece as LayerPiece
from firecaffe.recipe.sections import Recipe
from firecaffe.training.given_parts import Parts, make_model, place_model
from firecaffe.training.piece import Numbers, Piece, Weights
from firecaffe.training.tensor_file import InMemory, Stored
from firecaffe.transport.collect import HeldPart, gather_all


@dataclass(frozen=True)
class PieceSource:
    """The place of one of this rank's tensors in a whole tensor."""

    whole: str
    dim: int = 0
    cut: Cut = ()
    """The cut of dimension `dim` of the whole tensor; empty if it is not cut."""
    part: int = 0

    @property
    def num_parts(self) -> int:
        return max(1, len(self.cut) - 1)

    @property
    def range(self) -> range:
        return range(self.cut[self.part], self.cut[self.part + 1])


@dataclass(frozen=True)
class Names:
    sources: Mapping[str, PieceSource]
    """The parts of split layers that this rank has, by its own names."""
    places: Mapping[str, int]
    elsewhere: frozenset[str]
    """The whole tensors that only other ranks have."""

    def source(self, path: str) -> tuple[PieceSource, str]:
        """Return the source of a piece's tensor, and its path under the whole tensor's name."""
        name, slash, key = path.partition("/")
        source = self.sources.get(name, PieceSource(name))
        return source, source.whole + slash + key

    def place(self, path: str) -> int:
        return self.places[path.partition("/")[0]]

    def own(self, path: str) -> list[str]:
        """Return this rank's paths for a path under the whole tensor's name."""
        name, slash, key = path.partition("/")
        if name in self.elsewhere:
            return []
        return [local_name + slash + key for local_name in self._own.get(name, [name])]

    @cached_property
    def _own(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name, source in self.sources.items():
            names.setdefault(source.whole, []).append(name)
        return names


class Naming(Protocol):
    def source(self, path: str) -> tuple[PieceSource, str]: ...
    def place(self, path: str) -> int: ...
    def own(self, path: str) -> list[str]: ...


class PieceInParts:
    """A piece under whole tensors' names; implements `Piece`."""

    held_by_all = False

    def __init__(self, piece: Piece, names: Naming) -> None:
        self._piece, self._names = piece, names

    @property
    def is_result(self) -> bool:
        return self._piece.is_result

    def parts(self) -> dict[str, HeldPart]:
        by_whole: dict[str, list[tuple[PieceSource, Tensor]]] = {}
        for path, part in self._piece.parts().items():
            source, whole = self._names.source(path)
            by_whole.setdefault(whole, []).append((source, part.tensor))
        return {path: _held(parts, self._names.place(path)) for path, parts in by_whole.items()}

    def load(self, stored: Stored) -> None:
        self._piece.load(_ByOwnNames(stored, self._names))


def _held(parts: Sequence[tuple[PieceSource, Tensor]], place: int) -> HeldPart:
    source, first = parts[0]
    # An optimizer's counts are no rows of a weight.
    if not source.cut or first.ndim <= source.dim or first.shape[source.dim] != len(source.range):
        return HeldPart(first, order=place)
    rest = tuple((other.range, tensor) for other, tensor in parts[1:])
    return HeldPart(first, source.range, source.cut[-1], place, source.dim, rest)


@dataclass(frozen=True)
class GatheredWholes:
    """Implements `Wholes` by exchanges through the host's memory."""

    world: Group
    sharers: Group | None
    """The ranks among which tensors are cut; None if each tensor is whole on one rank."""
    names: Names

    def name(self, own: str) -> str:
        return self.names.source(own)[0].whole

    def of_own(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = self._piece(parts).parts()
        wholes = dict[str, Tensor]()
        if self.sharers is not None:  # even a rank without a part calls it
            cut = {name: part for name, part in held.items() if part.rows is not None}
            wholes = dict(gather_all(self.sharers, cut))
        return {
            name: wholes[name].to(part.tensor.device) if name in wholes else part.tensor
            for name, part in held.items()
        }

    def of_all(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.world.device) for name, tensor in self.one_by_one(parts)}

    def one_by_one(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return gather_all(self.world, self._piece(parts).parts())

    def put(self, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        piece = self._piece(parts)
        piece.load(InMemory({name: wholes[name] for name in piece.parts()}))

    def _piece(self, parts: Mapping[str, Tensor]) -> Piece:
        return PieceInParts(Weights(parts.items), self.names)


class NumbersInParts:
    """Numbers under whole names, equal for all parts of a tensor; implements `Numbers`."""

    def __init__(self, numbers: Numbers, names: Names) -> None:
        self._numbers, self._names = numbers, names

    def state_dict(self) -> dict[str, Any]:
        return {self._names.source(path)[1]: v for path, v in self._numbers.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._numbers.load_state_dict(
            {own: value for path, value in state.items() for own in self._names.own(path)}
        )


class NumbersOfRow(NumbersInParts):
    """Numbers of all parts of a row. All its ranks call `state_dict`, and get equal results."""

    def __init__(self, numbers: Numbers, names: Names, row: Group) -> None:
        super().__init__(numbers, names)
        self._row = row

    def state_dict(self) -> dict[str, Any]:
        stated = gather_json(self._row, super().state_dict())
        numbers = {path: value for of_rank in stated for path, value in of_rank.items()}
        return dict(sorted(numbers.items(), key=lambda item: self._names.place(item[0])))


class _ByOwnNames(Stored):
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

    @staticmethod
    def _is_cut(source: PieceSource, shape: Sequence[int]) -> bool:
        return bool(source.cut) and len(shape) > source.dim and shape[source.dim] == source.cut[-1]


Own = Mapping[str, Sequence[LayerPiece]]
"""A rank's parts of tensors that it does not have whole, by name; a tensor may have none here."""


@dataclass(frozen=True)
class Drawn:
    network: nn.Module
    """The network. Tensors that are not whole here are zeros that take no memory."""
    pieces: Mapping[str, Sequence[Tensor]]
    replaced_ranks: list[int]
    """The ranks whose first weights differed from rank 0's, and were replaced by rank 0's."""


class FreshNetwork:
    """A recipe's network before its first weights are drawn."""

    def __init__(self, recipe: Recipe, parts: Parts, dataset: Dataset) -> None:
        """Make the outline. Raises: RecipeError; OwnCodeError for errors in a user's code."""
        self._recipe = recipe
        self._make = partial(make_model, recipe, parts, dataset)
        self._drawing = follow(self._make)
        self.outline = self._make() if self._drawing is None else self._drawing.outline
        """The shapes on the meta device; the network itself if it has to be made whole."""

    def draw(self, world: World, own_of: Callable[[nn.Module], Own]) -> Drawn:
        """Draw the first weights. All ranks call it. `own_of` returns this rank's parts.

        Raises: RecipeError, which `own_of` may raise; OwnCodeError; PeerLostError.
        """
        is_alone = world.group is None
        keeper = None
        if self._drawing is not None:
            keeper = self._keep(self._drawing, own_of, is_alone)
        if keeper is None:
            keeper = self._whole(is_alone)
        digests = gather_text(world, keeper.digest)
        others = [rank for rank, text in enumerate(digests) if text != digests[0]]
        if others:
            keeper.copy_from_first(world)
        network = keeper.network
        for name, tensor in named_tensors(network):
            if name in keeper.own:
                zero = torch.zeros((), dtype=tensor.dtype, device=world.device)
                tensor.data = zero.expand(tensor.shape)
        place_model(network, self._recipe, world.device)
        pieces = {n: [piece.to(world.device) for piece in has] for n, has in keeper.pieces.items()}
        return Drawn(network, pieces, others)

    def _keep(
        self, drawing: Drawing, own_of: Callable[[nn.Module], Own], is_alone: bool
    ) -> "_Collector | None":
        try:
            local_pieces = own_of(drawing.outline)
        except RecipeError:
            return None  # the error may be about the outline only; else it is raised again
        keeper = _Collector(
            local_pieces, drawing.order, lambda take: drawing.draw([], take), is_alone
        )
        whole = [name for name in drawing.kept if name not in local_pieces]
        network = drawing.draw(whole, keeper.take)
        if network is None:
            return None
        keeper.network = network
        return keeper

    def _whole(self, is_alone: bool) -> "_Collector":
        network = self.outline if self._drawing is None else self._make()
        named = dict(named_tensors(network))
        if any(tensor.is_meta for tensor in named.values()):
            raise RecipeError(
                "model() returned the network that it had made before; one that is split or in "
                "stages is made more than once, so return a new one each time"
            )

        def again(take: Callable[[str, Tensor], None]) -> None:
            for name, tensor in named.items():
                take(name, tensor.detach())

        keeper = _Collector({}, list(named), again, is_alone)
        keeper.network = network
        again(keeper.take)
        return keeper


class _Collector:
    network: nn.Module

    def __init__(
        self,
        own: Own,
        order: Sequence[str],
        again: Callable[[Callable[[str, Tensor], None]], object],
        is_alone: bool,
    ) -> None:
        self.own, self._order, self._again = own, order, again
        self._is_alone = is_alone
        self.pieces: dict[str, Sequence[Tensor]] = {}
        self._digests: dict[str, str] = {}

    def take(self, name: str, whole: Tensor) -> None:
        self._digests[name] = "" if self._is_alone else digest([(name, whole)])
        self._keep(name, whole)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self._digests, sort_keys=True).encode()).hexdigest()

    def copy_from_first(self, world: World) -> None:
        order: Iterable[str] = json.loads(broadcast_text(world, json.dumps(self._order)))
        if world.is_first:
            self._again(lambda _, whole: broadcast(world, whole.contiguous()))
            return
        named = dict(named_tensors(self.network))
        for name in order:
            tensor = named[name]
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            broadcast(world, whole)
            self._keep(name, whole)
            if name not in self.own:
                tensor.detach().copy_(whole)

    def _keep(self, name: str, whole: Tensor) -> None:
        # A separate copy, because alignment may change bits.
        self.pieces[name] = [
            whole.narrow(dim, rows.start, len(rows)).clone(memory_format=torch.contiguous_format)
            for dim, rows in self.own.get(name, ())
        ]
