"""Named tensors that ranks hold apart: who holds which, and their way to rank 0 one at a time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World, peers_may_be_lost, waiting
from firecaffe.errors import AgreementError


@dataclass(frozen=True)
class Part:
    """What this rank holds of a named tensor: all of it, or some rows (of dimension 0)."""

    tensor: Tensor
    """The live one, no copy."""
    start: int = 0
    """The first row held here."""
    rows: int | None = None
    """Rows of the whole tensor; None where all of it is here."""
    order: int = 0
    """Its place among the tensors of all ranks; of the same place, rank 0's come first."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        own = tuple(self.tensor.shape)
        return own if self.rows is None else (self.rows, *own[1:])

    @property
    def range(self) -> tuple[int, int] | None:
        """The rows held here, as first and the one after the last; None where it is all of it."""
        return None if self.rows is None else (self.start, self.start + len(self.tensor))


@dataclass(frozen=True)
class Whole:
    """A tensor as a checkpoint has it, and the ranks from which its rows are taken."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: tuple[tuple[int, tuple[int, int] | None], ...]
    """(rank, rows) in the order of rows; the rows are None where the rank gives all."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def list_wholes(world: World, parts: Mapping[str, Part]) -> list[Whole]:
    """The tensors of all ranks in their order, the same list on all; what several hold, the first
    of them gives.

    Raises: AgreementError where ranks differ about a tensor, or nobody holds some of its rows;
    PeerLostError.
    """
    own = [
        [name, part.order, part.shape, str(part.tensor.dtype), part.range]
        for name, part in parts.items()
    ]
    orders: dict[str, int] = {}
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    found: dict[str, list[tuple[int, tuple[int, int] | None]]] = {}
    for rank, text in enumerate(gather_text(world, json.dumps(own))):
        for name, order, shape, dtype, rows in json.loads(text):
            orders.setdefault(name, order)
            kind = tuple(shape), dtype
            if shapes.setdefault(name, kind) != kind:
                raise AgreementError(
                    f"rank {rank} holds {name} as {dtype} {kind[0]}, an earlier rank as "
                    f"{shapes[name][1]} {shapes[name][0]}"
                )
            found.setdefault(name, []).append((rank, None if rows is None else tuple(rows)))
    return [
        Whole(
            name,
            shape,
            getattr(torch, dtype.removeprefix("torch.")),
            _holders(name, shape, found[name]),
        )
        for name, (shape, dtype) in sorted(shapes.items(), key=lambda item: orders[item[0]])
    ]


def collect(
    world: World, listed: Sequence[Whole], parts: Mapping[str, Part]
) -> Iterator[tuple[str, Tensor]]:
    """On rank 0 the listed tensors, whole, in order, on the CPU; the others give theirs and get
    none.

    All ranks have to go through it to the end. parts: this rank's own. Raises: PeerLostError.
    """
    for each in listed:
        own = parts.get(each.name)
        if not world.is_first:
            for _ in (rank for rank, _ in each.holders if rank == world.rank):
                assert own is not None
                with peers_may_be_lost(world), waiting(world):
                    given = own.tensor.detach().cpu().contiguous()
                    dist.send(given, group_dst=0, group=world.group)
            continue
        if each.holders == ((0, None),):
            assert own is not None
            yield each.name, own.tensor.detach().cpu().contiguous()
            continue
        whole = torch.empty(each.shape, dtype=each.dtype)
        for rank, rows in each.holders:
            place = whole if rows is None else whole[slice(*rows)]
            if rank == 0:
                assert own is not None
                place.copy_(own.tensor.detach())
            else:
                with peers_may_be_lost(world), waiting(world):
                    dist.recv(place, group_src=rank, group=world.group)
        yield each.name, whole


def _holders(
    name: str, shape: tuple[int, ...], found: Sequence[tuple[int, tuple[int, int] | None]]
) -> tuple[tuple[int, tuple[int, int] | None], ...]:
    """The first rank that holds all; else ranks that have each row once between them."""
    for rank, rows in found:
        if rows is None:
            return ((rank, None),)
    holders: list[tuple[int, tuple[int, int] | None]] = []
    covered = 0
    for start, stop, rank in sorted((*rows, rank) for rank, rows in found if rows is not None):
        if start == covered < stop:
            holders.append((rank, (start, stop)))
            covered = stop
    if covered != shape[0]:
        raise AgreementError(f"no rank gives row {covered} of {name}, which has {shape[0]}")
    return tuple(holders)
