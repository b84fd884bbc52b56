"""Named tensors that ranks hold in parts: which rank holds what, and how to get them whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.agree import broadcast, gather_json
from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost, waiting
from firecaffe.errors import AgreementError


@dataclass(frozen=True)
class HeldPart:
    """A rank's part of a named tensor: all of it, or some rows."""

    tensor: Tensor
    """The live tensor, no copy."""
    rows: range | None = None
    """The rows of the whole tensor that these are; None if all of it is here."""
    num_rows: int = 0
    """Rows of the whole tensor, if only some are here."""
    order: int = 0
    """The position in the list of all ranks' tensors; in a tie, rank 0's come first."""
    dim: int = 0
    """The dimension along which the rows are cut."""
    rest: tuple[tuple[range, Tensor], ...] = ()
    """Further runs of rows, each with its live tensor."""

    @property
    def runs(self) -> tuple[tuple[range | None, Tensor], ...]:
        return (self.rows, self.tensor), *self.rest

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for _, tensor in self.runs)

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = list(self.tensor.shape)
        if self.rows is not None:
            sizes[self.dim] = self.num_rows
        return tuple(sizes)

    def on_host(self, rows: range | None) -> Tensor:
        """Return these rows on the CPU: the live tensor itself if possible."""
        tensor = next(tensor for run_rows, tensor in self.runs if run_rows == rows)
        return tensor.detach().cpu().contiguous()


Holder = tuple[int, range | None]
"""A rank, and the rows that it has; None for all."""


@dataclass(frozen=True)
class Whole:
    """A tensor as a checkpoint stores it, and the ranks that supply it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: tuple[Holder, ...]
    """One holder of each row, in the order of rows."""
    dim: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def list_wholes(world: Group, parts: Mapping[str, HeldPart]) -> list[Whole]:
    """List the tensors of all ranks, in the same order on all; its first holder gives each.

    Raises: AgreementError if ranks differ about a tensor, or none holds some row; PeerLostError.
    """
    stated = [
        [name, part.order, part.shape, str(part.tensor.dtype), part.dim, _ends(part)]
        for name, part in parts.items()
    ]
    kinds: dict[str, tuple[int, tuple[int, ...], str, int]] = {}
    holders: dict[str, list[Holder]] = {}
    for rank, of_rank in enumerate(gather_json(world, stated)):
        for name, order, shape, dtype, dim, runs in of_rank:
            kind = order, tuple(shape), dtype, dim
            if kinds.setdefault(name, kind) != kind:
                raise AgreementError(
                    f"rank {rank} holds {name} as {dtype} {kind[1]} at place {order}, another rank "
                    f"as {kinds[name][2]} {kinds[name][1]} at place {kinds[name][0]}"
                )
            held = [(rank, None if ends is None else range(*ends)) for ends in runs]
            holders.setdefault(name, []).extend(held)
    return [
        Whole(name, shape, _dtype(dtype), _holders(name, shape[dim : dim + 1], holders[name]), dim)
        for name, (_, shape, dtype, dim) in sorted(kinds.items(), key=lambda item: item[1][0])
    ]


def collect(
    world: Group, listed: Sequence[Whole], parts: Mapping[str, HeldPart]
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors on rank 0's CPU; all ranks iterate to the end. Raises: PeerLostError."""
    for entry in listed:
        if not world.is_first:
            for rows in (rows for rank, rows in entry.holders if rank == world.rank):
                with waiting(world), peers_may_be_lost(world):
                    dist.send(parts[entry.name].on_host(rows), group_dst=0, group=world.group)
            continue
        if entry.holders == ((0, None),):
            yield entry.name, parts[entry.name].on_host(None)
            continue
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for rank, rows in entry.holders:
            place = whole if rows is None else whole.narrow(entry.dim, rows.start, len(rows))
            if rank == 0:
                place.copy_(parts[entry.name].on_host(rows))
                continue
            arrived = place.contiguous()
            with waiting(world), peers_may_be_lost(world):
                dist.recv(arrived, group_src=rank, group=world.group)
            if not place.is_contiguous():  # rows of another dimension than the first
                place.copy_(arrived)
        yield entry.name, whole


def gather_all(world: Group, parts: Mapping[str, HeldPart]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors on each rank's CPU; all iterate to the end. Raises: as `list_wholes`."""
    for entry in list_wholes(world, parts):
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for rank, rows in entry.holders:
            place = whole if rows is None else whole.narrow(entry.dim, rows.start, len(rows))
            if rank == world.rank:
                place.copy_(parts[entry.name].on_host(rows))
            if world.group is None:
                continue
            sent = place.contiguous()
            broadcast(world, sent.reshape(-1).view(torch.uint8), rank)
            if not place.is_contiguous():  # rows of another dimension than the first
                place.copy_(sent)
        yield entry.name, whole


def _holders(
    name: str, rows_shape: tuple[int, ...], candidates: Sequence[Holder]
) -> tuple[Holder, ...]:
    # The first rank that holds all rows; else ranks that hold each row once between them.
    for rank, rows in candidates:
        if rows is None:
            return ((rank, None),)
    holders: list[Holder] = []
    covered = 0
    parts = [(rows, rank) for rank, rows in candidates if rows is not None]
    for rows, rank in sorted(parts, key=lambda part: (part[0].start, part[1])):
        if rows.start == covered < rows.stop:
            holders.append((rank, rows))
            covered = rows.stop
    num_rows = rows_shape[0]
    if covered != num_rows:
        raise AgreementError(f"no rank gives row {covered} of {name}, which has {num_rows}")
    return tuple(holders)


def _ends(part: HeldPart) -> list[tuple[int, int] | None]:
    return [None if rows is None else (rows.start, rows.stop) for rows, _ in part.runs]


def _dtype(text: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, text.removeprefix("torch."))
    return dtype
