"""Cuts parameters among ranks: each owns a run of the bytes in which they are sent.

A rule for each element by itself gives the same bits wherever parameters are cut, so the number of
ranks changes none. For a rule that needs whole parameters (their norms, or what a codec keeps back
of them), the cuts are between parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from firecaffe.training.served.messages import ALIGNMENT, Parcel


@dataclass(frozen=True)
class Shard:
    """A run of a parcel's bytes, on its owner's host or within the whole parcel."""

    start: int
    stop: int
    pieces: Mapping[str, range]
    """Its elements of each tensor, laid out row by row, in the order of the parcel."""

    def has_whole(self, name: str, tensor: Tensor) -> bool:
        return len(self.pieces[name]) == tensor.numel()

    def run_of(self, name: str, tensor: Tensor) -> Tensor:
        """Return its part of a tensor: the tensor itself if it is whole, else of one dimension."""
        if self.has_whole(name, tensor):
            return tensor
        elements = self.pieces[name]
        return tensor.reshape(-1)[elements.start : elements.stop]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def of(self, parcel: Parcel) -> Tensor:
        return parcel.data[self.start : self.stop]

    def views(self, data: Tensor, parcel: Parcel) -> dict[str, Tensor]:
        """Return the pieces in its bytes, shaped as by `run_of`. `parcel` is any one of all."""
        views = {}
        for name, elements in self.pieces.items():
            whole = parcel.views[name]
            dtype = whole.dtype
            begin = parcel.places[name] + elements.start * dtype.itemsize - self.start
            views[name] = data[begin : begin + len(elements) * dtype.itemsize].view(dtype)
            if self.has_whole(name, whole):
                views[name] = views[name].view(whole.shape)
        return views


def cut(parcel: Parcel, count: int, whole: bool = False) -> list[Shard]:
    """Cut a parcel into shards of equal size but for `ALIGNMENT` bytes. Some may be empty.

    If `whole`, the cuts are between tensors, where that is nearest to equal.
    """
    total = parcel.data.nbytes
    ends = [total * number // count // ALIGNMENT * ALIGNMENT for number in range(count)] + [total]
    if whole:
        between = [*parcel.places.values(), total]
        ends = [_nearest(between, end) for end in ends]
    return [Shard(start, stop, _pieces(parcel, start, stop)) for start, stop in pairwise(ends)]


def _nearest(places: Sequence[int], wanted: int) -> int:
    return min(places, key=lambda place: abs(place - wanted))


def _pieces(parcel: Parcel, start: int, stop: int) -> dict[str, range]:
    pieces = {}
    is_last = start < stop == parcel.data.nbytes
    for name, view in parcel.views.items():
        place, size = parcel.places[name], view.dtype.itemsize
        first = max(start - place, 0) // size
        last = min((stop - place) // size, view.numel())
        is_empty = not view.numel() and (start <= place < stop or (place == stop and is_last))
        if first < last or is_empty:
            pieces[name] = range(first, last) if first < last else range(0)
    return pieces
