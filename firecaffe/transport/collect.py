"""Named tensors that ranks hold in parts: who holds which, and how rank 0 gets them one by one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost, waiting
from firecaffe.errors import AgreementError


@dataclass(frozen=True)
class HeldPart:
    """What this rank holds of a named tensor: all of it, or some rows (of dimension 0)."""

    tensor: Tensor
    """The live tensor, no copy."""
    rows: range | None = None
    """The rows of the whole tensor that these are; None if all of it is here."""
    num_rows: int = 0
    """The number of rows of the whole tensor, if only some are here."""
    order: int = 0
    """The place among the tensors of all ranks; of the same place, rank 0's come first."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        own = tuple(self.tensor.shape)
        return own if self.rows is None else (self.num_rows, *own[1:])


Holder = tuple[int, range | None]
"""A rank, and the rows that it has; None for all."""


@dataclass(frozen=True)
class Whole:
    """A tensor as a checkpoint has it, and the ranks from which it is taken."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: tuple[Holder, ...]
    """One holder of each row, in the order of rows."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def list_wholes(world: Group, parts: Mapping[str, HeldPart]) -> list[Whole]:
    """Lists the tensors of all ranks in their order, the same list on all. If several ranks hold
    something, the first of them gives it.

    Raises: AgreementError if ranks differ about a tensor, or nobody holds some of its rows;
    PeerLostError.
    """
    own = [
        [name, part.order, part.shape, str(part.tensor.dtype), _ends(part.rows)]
        for name, part in parts.items()
    ]
    kinds: dict[str, tuple[int, tuple[int, ...], str]] = {}
    found: dict[str, list[Holder]] = {}
    for rank, text in enumerate(gather_text(world, json.dumps(own))):
        for name, order, shape, dtype, ends in json.loads(text):
            kind = order, tuple(shape), dtype
            if kinds.setdefault(name, kind) != kind:
                raise AgreementError(
                    f"rank {rank} holds {name} as {dtype} {kind[1]} at place {order}, another rank "
                    f"as {kinds[name][2]} {kinds[name][1]} at place {kinds[name][0]}"
                )
            found.setdefault(name, []).append((rank, None if ends is None else range(*ends)))
    return [
        Whole(name, shape, _dtype(dtype), _holders(name, shape, found[name]))
        for name, (_, shape, dtype) in sorted(kinds.items(), key=lambda item: item[1][0])
    ]


def collect(
    world: Group, listed: Sequence[Whole], parts: Mapping[str, HeldPart]
) -> Iterator[tuple[str, Tensor]]:
    """Yields on rank 0 the listed tensors, whole, in order, on the CPU; the others send theirs and
    get none.

    All ranks have to go through it to the end. parts: this rank's own. Raises: PeerLostError.
    """
    for each in listed:
        own = parts.get(each.name)
        if not world.is_first:
            for _ in (rank for rank, _ in each.holders if rank == world.rank):
                assert own is not None
                with waiting(world), peers_may_be_lost(world):
                    given = own.tensor.detach().cpu().contiguous()
                    dist.send(given, group_dst=0, group=world.group)
            continue
        if each.holders == ((0, None),):
            assert own is not None
            yield each.name, own.tensor.detach().cpu().contiguous()
            continue
        whole = torch.empty(each.shape, dtype=each.dtype)
        for rank, rows in each.holders:
            place = whole if rows is None else whole[rows.start : rows.stop]
            if rank == 0:
                assert own is not None
                place.copy_(own.tensor.detach())
            else:
                with waiting(world), peers_may_be_lost(world):
                    dist.recv(place, group_src=rank, group=world.group)
        yield each.name, whole


def _holders(name: str, shape: tuple[int, ...], found: Sequence[Holder]) -> tuple[Holder, ...]:
    """The first rank that holds all rows; else ranks that hold each row once between them."""
    for rank, rows in found:
        if rows is None:
            return ((rank, None),)
    holders: list[Holder] = []
    covered = 0
    parts = [(rows, rank) for rank, rows in found if rows is not None]
    for rows, rank in sorted(parts, key=lambda part: (part[0].start, part[1])):
        if rows.start == covered < rows.stop:
            holders.append((rank, rows))
            covered = rows.stop
    if covered != shape[0]:
        raise AgreementError(f"no rank gives row {covered} of {name}, which has {shape[0]}")
    return tuple(holders)


def _ends(rows: range | None) -> tuple[int, int] | None:
    return None if rows is None else (rows.start, rows.stop)


def _dtype(text: str) -> torch.dtype:
    """torch's type by its printed name."""
    found: torch.dtype = getattr(torch, text.removeprefix("torch."))
    return found
