"""Schedules of any kind, run by this rank over its group: pieces, lanes, scratch, traffic."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.exchange.pieces import PIECES, pieces
from firecaffe.exchange.schedule import ALL_GATHER, AVERAGE, REDUCE_SCATTER, Schedule
from firecaffe.transport.execute import PieceUnderWay, execute, in_one_call, one_by_one
from firecaffe.transport.rank_rounds import (
    RankRound,
    rounds_of_rank,
    scratch_elements,
    sent_elements,
)

SumInputs = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class _Part:
    """Elements [start, stop) of a vector, and the rounds that they go through."""

    start: int
    stop: int
    rounds: list[RankRound]
    first_input: int


@dataclass(frozen=True)
class _Plan:
    """The work of this rank on a vector."""

    parts: list[_Part]
    is_mean: bool


class Collectives:
    """Runs schedules on vectors. What this rank does is worked out once for each length."""

    def __init__(self, world: Group) -> None:
        self.world = world
        self._plans: dict[Hashable, _Plan] = {}
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}

    def run(
        self,
        name: Hashable,
        make: Callable[[int], Schedule],
        vector: Tensor,
        ranks: Sequence[int],
        lane: int = 0,
        inputs: Sequence[Tensor] = (),
        sum_inputs: SumInputs | None = None,
    ) -> None:
        """Carries out this rank's part, in place.

        Args:
            name: Stands for `make` from one call to the next.
            make: The schedule for so many elements.
            vector: Shape (num_elements,).
            ranks: Which ranks of the world the schedule's are; this one is among them.
            lane: Vectors of one lane go one after the other.
            inputs: This rank's, as long as the vector, if the schedule has inputs; may be changed.
            sum_inputs: See `PieceUnderWay`.

        Raises: PeerLostError.
        """
        group = self.world.exchange_group
        assert group is not None
        is_gloo = not vector.is_cuda
        own = ranks.index(self.world.rank)
        key = name, vector.numel(), vector.dtype
        if key not in self._plans:
            # NCCL tells a pair's messages apart by their order alone and wants a round's at once.
            self._plans[key] = _plan(make, vector.numel(), vector.itemsize, own, cuts=is_gloo)
        plan = self._plans[key]
        parts = plan.parts
        sent = sum(sent_elements(part.rounds) for part in parts)
        self.world.traffic.add(sent * vector.itemsize)
        needed = [scratch_elements(part.rounds) for part in parts]
        scratch = self._scratch_for(vector, sum(needed), lane).split_with_sizes(needed)
        execute(
            [
                PieceUnderWay(
                    vector[part.start : part.stop],
                    part.rounds,
                    scratch[i],
                    one_by_one(self.world, group, ranks, lane * 2 * PIECES + i)
                    if is_gloo
                    else in_one_call(self.world, group, ranks),
                    own,
                    at_once=not is_gloo,
                    inputs={
                        part.first_input + k: each[part.start : part.stop]
                        for k, each in enumerate(inputs)
                    },
                    sum_inputs=sum_inputs,
                )
                for i, part in enumerate(parts)
            ]
        )
        if plan.is_mean:
            vector.div_(len(ranks))

    def _scratch_for(self, vector: Tensor, num_elements: int, lane: int) -> Tensor:
        scratch = self._scratch.get((lane, vector.dtype))
        if scratch is None or scratch.numel() < num_elements:
            scratch = self._scratch[lane, vector.dtype] = vector.new_empty(num_elements)
        return scratch[:num_elements]


def _plan(
    make: Callable[[int], Schedule], num_elements: int, itemsize: int, own: int, cuts: bool
) -> _Plan:
    whole = make(num_elements)
    # Shards that stay with their owners are those of the whole vector; and inputs are many messages
    # as they are (LOG.md).
    stays = whole.kind in (REDUCE_SCATTER, ALL_GATHER) or bool(whole.inputs)
    parts = pieces(whole, itemsize) if cuts and not stays else [(0, num_elements)]
    schedules = {num_elements: whole}
    found = []
    for start, stop in parts:
        length = stop - start
        if length not in schedules:
            schedules[length] = make(length)
        schedule = schedules[length]
        found.append(
            _Part(start, stop, rounds_of_rank(schedule, own), schedule.own_inputs(own).start)
        )
    return _Plan(found, whole.kind == AVERAGE)
