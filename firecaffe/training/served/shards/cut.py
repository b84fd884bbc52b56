"""How parameters are cut among ranks: each owns a run of the bytes in which they are sent.

A rule that is applied to each element by itself gives the same bits wherever the parameters are
cut, so how many ranks there are changes none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from firecaffe.training.served.parcel import ALIGNMENT, Parcel


@dataclass(frozen=True)
class Shard:
    """A run of a parcel's bytes, on the host of its owner or within the whole parcel."""

    start: int
    stop: int
    pieces: Mapping[str, range]
    """The elements of each tensor that are in it, in the order of the parcel; of a tensor that is
    laid out row by row."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def of(self, parcel: Parcel) -> Tensor:
        """Its bytes in a parcel of all."""
        return parcel.data[self.start : self.stop]

    def views(self, data: Tensor, parcel: Parcel) -> dict[str, Tensor]:
        """The pieces in such bytes, each of one dimension. parcel: any one of all."""
        found = {}
        for name, elements in self.pieces.items():
            dtype = parcel.views[name].dtype
            begin = parcel.places[name] + elements.start * dtype.itemsize - self.start
            found[name] = data[begin : begin + len(elements) * dtype.itemsize].view(dtype)
        return found


def cut(parcel: Parcel, count: int) -> list[Shard]:
    """Cuts a parcel into as many shards, equal but for `ALIGNMENT` bytes. Those of a small parcel
    may be empty.
    """
    total = parcel.data.nbytes
    ends = [total * each // count // ALIGNMENT * ALIGNMENT for each in range(count)] + [total]
    return [Shard(start, stop, _pieces(parcel, start, stop)) for start, stop in pairwise(ends)]


def _pieces(parcel: Parcel, start: int, stop: int) -> dict[str, range]:
    found = {}
    for name, view in parcel.views.items():
        place, size = parcel.places[name], view.dtype.itemsize
        first = max(start - place, 0) // size
        last = min((stop - place) // size, view.numel())
        if first < last:
            found[name] = range(first, last)
    return found
