"""Shards: the rows of each parameter that a rank updates, if ranks share the update.

Each bucket of gradients is cut into consecutive shards, one for each rank, so that all ranks take
part in each reduce-scatter. Cuts lie between rows of a parameter. They lie between whole parameters
if the update needs whole ones for the same bits (norms, pruning, shared values), or if parameters
are parts of split layers, which need not be rows. A large parameter then has one owner.

Source: Rajbhandari et al. 2020, arXiv 1910.02054 (ZeRO stage 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from firecaffe.gradients.buckets import ALIGNMENT, members_of, places


class Span(NamedTuple):
    start: int
    rows: int
    """The number of rows between which the parameter may be cut, at least 1."""
    row: int
    """The elements of each row; 0 if the parameter has none."""


@dataclass(frozen=True)
class Shards:
    cuts: Mapping[tuple[int, ...], tuple[int, ...]]
    """The starts of a bucket's shards and the end of the last one, by the bucket's members."""
    rows: Mapping[str, tuple[int, ...]]
    """The starts of the ranks' rows and the end of the last, by parameter, in network order."""
    rank: int
    own: dict[str, nn.Parameter] = field(default_factory=dict)
    """This rank's rows, as views; only parameters of which it has some."""

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a tensor with a parameter's shape; all rows without shards."""
        if name not in self.rows:
            return tensor
        start, stop = self.rows[name][self.rank : self.rank + 2]
        if (start, stop) == (0, self.rows[name][-1]):
            return tensor
        return tensor[start:stop] if start < stop else tensor.new_empty(0)

    def in_bucket(self, members: tuple[int, ...]) -> slice:
        start, stop = self.cuts[members][self.rank : self.rank + 2]
        return slice(start, stop)


def all_of(named: Mapping[str, nn.Parameter]) -> Shards:
    return Shards({}, {}, 0, dict(named))


def make_shards(
    named: Mapping[str, nn.Parameter],
    ready_order: Sequence[int],
    bucket_bytes: int,
    world_size: int,
    rank: int,
    whole: bool,
    alignment: int = ALIGNMENT,
) -> Shards:
    """Assign rows to ranks, with the reducer's arguments. `whole`: a parameter has one owner."""
    names, parameters = list(named), list(named.values())
    if not names:  # a stage may have no weights
        return Shards({}, {}, rank)
    buckets = members_of(parameters, [ready_order], bucket_bytes)
    rows_in = [
        (1, parameter.numel()) if whole else _rows_in_memory(parameter) for parameter in parameters
    ]
    found_spans = (spans_of([rows_in[m] for m in bucket], alignment) for bucket in buckets)
    spans, ends = zip(*found_spans, strict=True)
    cuts = dict(zip(buckets, cut_buckets(spans, ends, world_size), strict=True))
    rows_of = {
        names[member]: _rows(span, cuts[members])
        for members, in_bucket in zip(buckets, spans, strict=True)
        for member, span in zip(members, in_bucket, strict=True)
    }
    rows = {name: rows_of[name] for name in names}
    shards = Shards(cuts, rows, rank)
    for name, parameter in named.items():
        start, stop = rows[name][rank : rank + 2]
        if start < stop:
            shards.own[name] = nn.Parameter(shards.own_part(name, parameter.detach()))
    return shards


def cut_buckets(
    buckets: Sequence[Sequence[Span]], ends: Sequence[int], parts: int
) -> list[tuple[int, ...]]:
    """Cut buckets of `ends` elements into `parts`, the largest first, with totals nearly equal."""
    held, cuts_of = [0] * parts, dict[int, tuple[int, ...]]()
    for index in sorted(range(len(buckets)), key=lambda index: -ends[index]):
        total = sum(held) + ends[index]
        wanted = [max(0, total - parts * count) for count in held]
        cuts, before = [0], 0
        for share in wanted[:-1]:
            before += share
            place = ends[index] * before // max(1, sum(wanted))
            cuts.append(_nearest(buckets[index], ends[index], place))
        cuts.append(ends[index])
        held = [had + b - a for had, (a, b) in zip(held, pairwise(cuts), strict=True)]
        cuts_of[index] = tuple(cuts)
    return [cuts_of[index] for index in range(len(buckets))]


def _nearest(spans: Sequence[Span], end: int, place: int) -> int:
    starts = [span.start for span in spans]
    number = max(index for index, start in enumerate(starts) if start <= place)
    span, after = spans[number], [*starts, end][number + 1]
    row = (2 * (place - span.start) + span.row) // (2 * span.row) if span.row else 0
    return span.start + row * span.row if row < span.rows else after


def spans_of(rows: Sequence[tuple[int, int]], alignment: int = ALIGNMENT) -> tuple[list[Span], int]:
    *starts, end = places([number * row for number, row in rows], alignment)
    return [Span(start, *counts) for start, counts in zip(starts, rows, strict=True)], end


def held_elements(spans: Sequence[Span], cuts: Sequence[int]) -> tuple[int, ...]:
    held = [0] * (len(cuts) - 1)
    for span in spans:
        for rank, (start, stop) in enumerate(pairwise(_rows(span, cuts))):
            held[rank] += (stop - start) * span.row
    return tuple(held)


def _rows_in_memory(tensor: Tensor) -> tuple[int, int]:
    """Return the number of rows and their elements; (1, all) if rows are not consecutive."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if tensor.ndim and tensor.numel() and is_dense:
        row = tensor.stride(0)
        if row * tensor.shape[0] == tensor.numel():
            return tensor.shape[0], row
    return 1, tensor.numel()


def _rows(span: Span, cuts: Sequence[int]) -> tuple[int, ...]:
    if not span.row:  # an empty parameter belongs to rank 0
        return (0, *[span.rows] * (len(cuts) - 1))
    return tuple(max(0, min((cut - span.start) // span.row, span.rows)) for cut in cuts)
