"""Parts with their halos: each rank's parts, and the neighbours' elements that are computed from.

| forward | backward |
|---|---|
| each part gets what it sees of the others | the sum of an element's gradients goes back |

A window is what one part sees of the dimension that is cut. Gradients are added in the order of
parts, whoever holds them, so the number of ranks changes no bit.

Source: Dryden et al. 2019 (IPDPS, arXiv 1903.06681), spatial parallelism.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from firecaffe.exchange.schedule import ALL_TO_ALL, Schedule, Transfer, from_rounds
from firecaffe.parallel.cut import Cut
from firecaffe.parallel.parts import PartGroup

Windows = tuple[range, ...]
"""What each part sees: consecutive elements of the whole dimension, one at least."""


def with_halos(
    group: PartGroup, own: Sequence[Tensor], cut: Cut, windows: Windows, dim: int
) -> tuple[Tensor, ...]:
    """What this rank's parts see of dimension `dim`; of several micro-batches, one by one.

    Raises: PeerLostError.
    """
    made: list[Tensor] = []
    for start in range(0, len(own), len(group.own)):
        parts = own[start : start + len(group.own)]
        made += _WithHalos.apply(group, cut, windows, dim, *parts)  # type: ignore[no-untyped-call]
    return tuple(made)


class _Piece(NamedTuple):
    """Elements of one part that are in the window of one: of itself, or of another."""

    source: int
    window: int
    start: int
    """Among the elements of the whole dimension."""
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor, first: int, dim: int) -> Tensor:
        """These elements of a tensor that begins with element `first`."""
        return tensor.narrow(dim, self.start - first, self.length)


class _WithHalos(Function):
    @staticmethod
    def forward(
        ctx: Any, group: PartGroup, cut: Cut, windows: Windows, dim: int, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.cut, ctx.windows, ctx.dim = group, cut, windows, dim
        pieces = _pieces(cut, windows)
        part_of = dict(zip(group.own, own, strict=True))
        known = {
            each: each.of(part_of[each.source], cut[each.source], dim)
            for each in pieces
            if each.source in part_of
        }
        known |= _exchange(group, pieces, known, own[0], dim)
        return tuple(
            torch.cat([known[each] for each in pieces if each.window == number], dim)
            for number in group.own
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group, cut, dim = ctx.group, ctx.cut, ctx.dim
        pieces = _pieces(cut, ctx.windows)
        gradient_of = dict(zip(group.own, gradients, strict=True))
        known = {
            each: each.of(gradient_of[each.window], ctx.windows[each.window].start, dim)
            for each in pieces
            if each.window in gradient_of
        }
        known |= _exchange(group, pieces, known, gradients[0], dim, back=True)
        totals = []
        for number in group.own:
            shape = list(gradients[0].shape)
            shape[dim] = cut[number + 1] - cut[number]
            total = gradients[0].new_zeros(shape)
            for each in pieces:
                if each.source == number:
                    each.of(total, cut[number], dim).add_(known[each])
            totals.append(total)
        return None, None, None, None, *totals


def _pieces(cut: Cut, windows: Windows) -> list[_Piece]:
    """Of each window in turn, the elements of each part."""
    found = []
    for window, seen in enumerate(windows):
        for source in range(len(cut) - 1):
            start, stop = max(seen.start, cut[source]), min(seen.stop, cut[source + 1])
            if start < stop:
                found.append(_Piece(source, window, start, stop))
    return found


def _exchange(
    group: PartGroup,
    pieces: Sequence[_Piece],
    known: Mapping[_Piece, Tensor],
    like: Tensor,
    dim: int,
    *,
    back: bool = False,
) -> dict[_Piece, Tensor]:
    """The pieces that other ranks have and this one needs.

    known: this rank's. like: any of them, but for the length of `dim`. back: from where the window
    is to where the part is.
    """
    rank_of = {part: rank for rank, share in enumerate(group.shares) for part in share}

    def way(piece: _Piece) -> tuple[int, int]:
        source, window = rank_of[piece.source], rank_of[piece.window]
        return (window, source) if back else (source, window)

    crossing = sorted((each for each in pieces if len({*way(each)}) == 2), key=way)
    if not crossing:
        return {}
    # One vector that holds what crosses and no more, each rank's pieces for another side by side.
    row = like.numel() // like.shape[dim]
    lengths = [each.length * row for each in crossing]
    vector = like.new_empty(sum(lengths))
    shape = list(like.shape)
    places = {}
    for each, place in zip(crossing, vector.split_with_sizes(lengths), strict=True):
        shape[dim] = each.length
        places[each] = place.view(shape)
        if way(each)[0] == group.group.rank:
            places[each].copy_(known[each])
    group.collectives.run(
        ("halos", tuple(crossing), back, row),
        _schedule(group.group.world_size, [(way(each), each.length * row) for each in crossing]),
        vector,
        range(group.group.world_size),
    )
    return {each: place for each, place in places.items() if way(each)[1] == group.group.rank}


def _schedule(
    world_size: int, crossing: Sequence[tuple[tuple[int, int], int]]
) -> Callable[[int], Schedule]:
    """One round, with one message for each rank that has something for another. crossing: the two
    ranks, and how many elements, one after the other.
    """

    def make(num_elements: int) -> Schedule:
        transfers, start = [], 0
        for (source, destination), same in groupby(crossing, key=lambda each: each[0]):
            stop = start + sum(length for _, length in same)
            transfers.append(Transfer(source, destination, start, stop, reduce=False))
            start = stop
        made = from_rounds("halos", world_size, num_elements, [transfers])
        return replace(made, kind=ALL_TO_ALL)

    return make
