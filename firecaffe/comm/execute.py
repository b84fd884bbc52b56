"""Executes a schedule: this rank's sends, receives and additions over a process group."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from firecaffe.exchange.schedule import Schedule, fold


@dataclass(frozen=True)
class Addition:
    """The parts that arrive for one slice of this rank in one round, in order of source."""

    start: int
    stop: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class RankRound:
    """One round as one rank sees it. Slices are (peer, start, stop)."""

    sends: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    additions: list[Addition] = field(default_factory=list)

    @property
    def scratch_elements(self) -> int:
        return sum((a.stop - a.start) * len(a.sources) for a in self.additions)


def rounds_of_rank(schedule: Schedule, rank: int) -> list[RankRound]:
    """What one rank does in each round in which it does anything.

    Sends and receives stand in the order of the schedule, so between each two ranks they match.
    """
    rounds = []
    for round_ in schedule.rounds:
        sends = [(t.destination, t.start, t.stop) for t in round_ if t.source == rank]
        arriving = [t for t in round_ if t.destination == rank]
        copies = [(t.source, t.start, t.stop) for t in arriving if not t.reduce]
        sources: dict[tuple[int, int], list[int]] = defaultdict(list)
        for t in arriving:
            if t.reduce:
                sources[t.start, t.stop].append(t.source)
        additions = [Addition(*slice_, tuple(sorted(s))) for slice_, s in sources.items()]
        if sends or arriving:
            rounds.append(RankRound(sends, copies, additions))
    return rounds


def execute(
    rounds: list[RankRound], rank: int, vector: Tensor, scratch: Tensor, group: ProcessGroup
) -> None:
    """Carries out one rank's part of a schedule, in place.

    vector: shape (num_elements,), contiguous. scratch: same dtype and device, at least as long as
    the `scratch_elements` of every round.
    """
    for round_ in rounds:
        operations = [
            P2POp(dist.isend, vector[start:stop], group_peer=peer, group=group)
            for peer, start, stop in round_.sends
        ]
        operations += [
            P2POp(dist.irecv, vector[start:stop], group_peer=peer, group=group)
            for peer, start, stop in round_.copies
        ]
        received: list[dict[int, Tensor]] = []
        offset = 0
        for addition in round_.additions:
            length = addition.stop - addition.start
            parts = {}
            for source in addition.sources:
                parts[source] = scratch[offset : offset + length]
                offset += length
                operations.append(P2POp(dist.irecv, parts[source], group_peer=source, group=group))
            received.append(parts)
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for addition, parts in zip(round_.additions, received, strict=True):
            own = vector[addition.start : addition.stop]
            _add_in_order(own, rank, parts)


def _add_in_order(own: Tensor, rank: int, parts: dict[int, Tensor]) -> None:
    """own becomes the fold, over rank, of itself and the received parts."""
    in_order = [part for _, part in sorted([*parts.items(), (rank, own)])]
    # The sum of two is the common case; it needs no second pass over memory.
    if len(in_order) == 2:
        torch.add(in_order[0], in_order[1], out=own)
        return
    total = fold(in_order, lambda left, right: left.add_(right))
    if total is not own:
        own.copy_(total)
