"""Images in parts of rows, with their halos, and what a kernel or a pool sees of them.

A window is the range of the cut dimension that one part sees. In forward, a halo gives a part the
elements of other parts in its window. Backward returns the sum of each element's gradients. It adds
them in the order of parts, whichever rank holds these, so the number of ranks changes no bit.

Output rows are cut anew, equally. Each part receives the rows that its own are made from, and the
padding beyond the image's edges. Columns stay whole. Source: Dryden et al. 2019
(IPDPS, arXiv 1903.06681), spatial parallelism.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, groupby, pairwise
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from firecaffe.exchange.schedule import ALL_TO_ALL, Schedule, Transfer, from_rounds
from firecaffe.parallel.cut import Cut, Slide, cut, pair, pool_slide, windows_of
from firecaffe.parallel.flow import PartGroup, with_conjugate

if TYPE_CHECKING:
    from firecaffe.parallel.tensor import TensorInParts


Windows = tuple[range, ...]
"""The range that each part sees: consecutive elements of the whole dimension, at least one."""


def with_halos(x: "TensorInParts", windows: Windows) -> tuple[Tensor, ...]:
    """Return what this rank's parts see, for each micro-batch. Raises: PeerLostError."""
    group, own, cut, dim = x.group, x.own, x.cut, x.cut_dim
    pieces = _pieces(cut, windows)

    def seen(*parts: Tensor) -> list[Tensor]:
        part_of = dict(zip(group.own, parts, strict=True))
        known = {
            piece: piece.of(part_of[piece.source], cut[piece.source], dim)
            for piece in pieces
            if piece.source in part_of
        }
        known |= _exchange(group, pieces, known, parts[0], dim)
        return [
            torch.cat([known[piece] for piece in pieces if piece.window == number], dim)
            for number in group.own
        ]

    def summed(*gradients: Tensor) -> list[Tensor]:
        gradient_of = dict(zip(group.own, gradients, strict=True))
        known = {
            piece: piece.of(gradient_of[piece.window], windows[piece.window].start, dim)
            for piece in pieces
            if piece.window in gradient_of
        }
        known |= _exchange(group, pieces, known, gradients[0], dim, back=True)
        totals = []
        for number in group.own:
            shape = list(gradients[0].shape)
            shape[dim] = cut[number + 1] - cut[number]
            total = gradients[0].new_zeros(shape)
            for piece in pieces:
                if piece.source == number:
                    piece.of(total, cut[number], dim).add_(known[piece])
            totals.append(total)
        return totals

    made: list[Tensor] = []
    for start in range(0, len(own), len(group.own)):
        made += with_conjugate(seen, summed, *own[start : start + len(group.own)])
    return tuple(made)


class _Piece(NamedTuple):
    # Elements of one part that are in the window of a part: of itself or of another.
    source: int
    window: int
    # Counted in the whole dimension.
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor, first: int, dim: int) -> Tensor:
        # Returns these elements of a tensor that begins with element `first`.
        return tensor.narrow(dim, self.start - first, self.length)


def _pieces(cut: Cut, windows: Windows) -> list[_Piece]:
    pieces = []
    for window, seen in enumerate(windows):
        for source in range(len(cut) - 1):
            start, stop = max(seen.start, cut[source]), min(seen.stop, cut[source + 1])
            if start < stop:
                pieces.append(_Piece(source, window, start, stop))
    return pieces


def _exchange(
    group: PartGroup,
    pieces: Sequence[_Piece],
    known: Mapping[_Piece, Tensor],
    like: Tensor,
    dim: int,
    *,
    back: bool = False,
) -> dict[_Piece, Tensor]:
    # Returns the pieces that other ranks have and this one needs. `known` are this rank's. `like`
    # has a piece's shape but for `dim`. If `back`, the window's rank sends to the part's.
    rank_of = {part: rank for rank, share in enumerate(group.shares) for part in share}

    def way(piece: _Piece) -> tuple[int, int]:
        source, window = rank_of[piece.source], rank_of[piece.window]
        return (window, source) if back else (source, window)

    crossing = sorted((piece for piece in pieces if len({*way(piece)}) == 2), key=way)
    if not crossing:
        return {}
    # One vector with only what crosses; the pieces of one rank for another are contiguous.
    row = like.numel() // like.shape[dim]
    lengths = [piece.length * row for piece in crossing]
    vector = like.new_empty(sum(lengths))
    shape = list(like.shape)
    places = {}
    for piece, place in zip(crossing, vector.split_with_sizes(lengths), strict=True):
        shape[dim] = piece.length
        places[piece] = place.view(shape)
        if way(piece)[0] == group.group.rank:
            places[piece].copy_(known[piece])
    group.collectives.run(
        ("halos", tuple(crossing), back, row),
        _schedule(group.group.world_size, [(way(piece), piece.length * row) for piece in crossing]),
        vector,
    )
    return {piece: place for piece, place in places.items() if way(piece)[1] == group.group.rank}


def _schedule(
    world_size: int, crossing: Sequence[tuple[tuple[int, int], int]]
) -> Callable[[int], Schedule]:
    # One round, with one message for each rank that has something for another. `crossing` holds
    # both ranks and the number of elements, one after the other.
    def make(num_elements: int) -> Schedule:
        transfers, start = [], 0
        for (source, destination), same in groupby(crossing, key=lambda entry: entry[0]):
            stop = start + sum(length for _, length in same)
            transfers.append(Transfer(source, destination, start, stop, reduce=False))
            start = stop
        made = from_rounds("halos", world_size, num_elements, [transfers])
        return replace(made, kind=ALL_TO_ALL)

    return make


def is_in_rows(x: "TensorInParts") -> bool:
    return x.ndim in (3, 4) and x.cut_dim == x.ndim - 2


def input_rows_of(x: "TensorInParts", slide: Slide, fill: float) -> tuple[Cut, list[Tensor]]:
    """Return the cut of the output rows, and own parts' input rows, padded with `fill`."""
    rows = x.shape[x.cut_dim]
    ends = cut(slide.outputs(rows), x.group.num_parts)
    seen = [slide.seen(range(start, stop)) for start, stop in pairwise(ends)]
    windows = windows_of(seen, rows)
    given = with_halos(x, windows)
    padded = []
    for number, part in zip(cycle(x.group.own), given, strict=False):
        most = len(seen[number])
        before = min(max(windows[number].start - seen[number].start, -1), most)
        after = min(max(seen[number].stop - windows[number].stop, -1), most)
        is_whole = before == after == 0
        padded.append(part if is_whole else F.pad(part, (0, 0, before, after), value=fill))
    return ends, padded


def max_pool(
    x: "TensorInParts",
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Apply `F.max_pool2d` in parts; NotImplemented if it needs the whole."""
    slide = pool_slide(kernel_size, stride, padding, dilation, ceil_mode)
    if return_indices or not _can_stay_in_rows(x, slide):
        return NotImplemented
    ends, seen = input_rows_of(x, slide, -inf)
    settings = kernel_size, stride, (0, pair(padding)[1]), dilation, ceil_mode
    return x.with_parts([F.max_pool2d(part, *settings) for part in seen], ends)


def average_pool(
    x: "TensorInParts",
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    slide = pool_slide(kernel_size, stride, padding, 1, ceil_mode)
    if not _can_stay_in_rows(x, slide):
        return NotImplemented
    ends, seen = input_rows_of(x, slide, 0.0)
    settings = kernel_size, stride, (0, pair(padding)[1]), ceil_mode, count_include_pad
    averages = [F.avg_pool2d(part, *settings, divisor_override) for part in seen]
    if divisor_override is None:
        low, high = -slide.before, x.shape[x.cut_dim] + slide.after
        if not count_include_pad:
            low, high = low + slide.before, high - slide.after
        averages = [
            _rescaled_means(part, slide, range(ends[number], ends[number + 1]), low, high)
            for number, part in zip(cycle(x.group.own), averages, strict=False)
        ]
    return x.with_parts(averages, ends)


def _rescaled_means(means: Tensor, slide: Slide, outputs: range, low: int, high: int) -> Tensor:
    # Divides by the number of rows that count, which are those in [low, high), instead of all.
    counts = []
    for output in outputs:
        seen = slide.seen(range(output, output + 1))
        counts.append(min(seen.stop, high) - max(seen.start, low))
    if all(count == slide.kernel for count in counts):
        return means
    by = [slide.kernel / count for count in counts]
    return means * torch.tensor(by, dtype=means.dtype, device=means.device).view(-1, 1)


def _can_stay_in_rows(x: "TensorInParts", slide: Slide) -> bool:
    return is_in_rows(x) and slide.outputs(x.shape[x.cut_dim]) >= x.group.num_parts
