"""Schedules of any kind, run by this rank over its group: pieces, lanes, scratch, traffic."""

import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.exchange.schedule import (
    ALL_GATHER,
    ALL_TO_ALL,
    AVERAGE,
    PIECES,
    REDUCE_SCATTER,
    Schedule,
    pieces,
)
from firecaffe.transport.execute import (
    ActivePiece,
    RankRound,
    execute,
    in_one_call,
    one_by_one,
    rounds_of_rank,
    scratch_elements,
    sent_elements,
)

SumInputs = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class _Part:
    start: int
    stop: int
    rounds: list[RankRound]
    first_input: int

    def some(self, numbers: Container[int]) -> "_Part":
        return replace(self, rounds=[round_ for round_ in self.rounds if round_.number in numbers])


@dataclass(frozen=True)
class _Plan:
    parts: list[_Part]
    is_mean: bool
    num_rounds: int
    early_rounds: int


@dataclass(frozen=True)
class Begun:
    """A schedule whose early rounds are done."""

    scratch: Tensor
    inputs: Mapping[int, Tensor]
    """This rank's inputs that have been sent, by their index among its own."""


class Collectives:
    """Runs schedules on vectors. This rank's part is planned once for each vector length."""

    def __init__(self, world: Group) -> None:
        self.world = world
        self._plans: dict[Hashable, _Plan] = {}
        self._scratch: dict[tuple[Hashable, torch.dtype], Tensor] = {}
        self.seconds = 0.0
        """Seconds that exchanges of vectors on the host have taken so far."""

    def run(
        self,
        name: Hashable,
        make: Callable[[int], Schedule],
        vector: Tensor,
        lane: int = 0,
        inputs: Mapping[int, Tensor] | None = None,
        sum_inputs: SumInputs | None = None,
        begun: Begun | None = None,
    ) -> None:
        """Carry out this rank's part of a schedule in place. Raises: PeerLostError.

        name: the key of `make`'s plan. lane: vectors of one lane go one after the other. inputs:
        this rank's, by their index among its own, as long as the vector; they may be changed.
        begun: the early rounds, if all ranks have done them.
        """
        plan = self._plan_for(name, make, vector)
        parts, all_inputs = plan.parts, dict(inputs or {})
        if begun is not None:
            late = range(plan.early_rounds, plan.num_rounds)
            parts = [part.some(late) for part in parts]
            all_inputs |= begun.inputs
        needed = sum(scratch_elements(part.rounds) for part in parts)
        scratch = begun.scratch if begun else self._scratch_for(vector, needed, lane)
        self._execute(parts, vector, lane, scratch, all_inputs, sum_inputs)
        if plan.is_mean:
            vector.div_(self.world.world_size)

    def begin(
        self,
        name: Hashable,
        make: Callable[[int], Schedule],
        vector: Tensor,
        inputs: Mapping[int, Tensor],
        number: int,
        place: Hashable,
        begun: Begun | None,
    ) -> Begun:
        """Carry out one early round, with arguments as of `run`; `vector` gives only the length."""
        plan = self._plan_for(name, make, vector)
        needed = sum(scratch_elements(part.rounds) for part in plan.parts)
        scratch = self._scratch_for(vector, needed, place)
        parts = [part.some((number,)) for part in plan.parts]
        self._execute(parts, vector, 0, scratch, inputs)
        return Begun(scratch, {**(begun.inputs if begun else {}), **inputs})

    def _plan_for(self, name: Hashable, make: Callable[[int], Schedule], vector: Tensor) -> _Plan:
        key = name, vector.numel(), vector.dtype
        if key not in self._plans:
            # NCCL matches a pair's messages by order alone, and needs a round's in one call.
            cuts = not vector.is_cuda
            self._plans[key] = _plan(make, vector.numel(), vector.itemsize, self.world.rank, cuts)
        return self._plans[key]

    def _execute(
        self,
        parts: Sequence[_Part],
        vector: Tensor,
        lane: int,
        whole_scratch: Tensor,
        inputs: Mapping[int, Tensor],
        sum_inputs: SumInputs | None = None,
    ) -> None:
        group = self.world.exchange_group
        assert group is not None
        is_gloo, begun_s = not vector.is_cuda, time.perf_counter()
        sent = sum(sent_elements(part.rounds) for part in parts)
        self.world.traffic.add(sent * vector.itemsize)
        # A single part with inputs may have more scratch, with elements of earlier rounds.
        needed = [scratch_elements(part.rounds) for part in parts]
        scratch = whole_scratch.split_with_sizes(needed) if len(parts) > 1 else [whole_scratch]
        execute(
            [
                ActivePiece(
                    vector[part.start : part.stop],
                    part.rounds,
                    scratch[i],
                    one_by_one(self.world, group, lane * 2 * PIECES + i)
                    if is_gloo
                    else in_one_call(self.world, group),
                    self.world.rank,
                    at_once=not is_gloo,
                    inputs={
                        part.first_input + k: input_vector[part.start : part.stop]
                        for k, input_vector in inputs.items()
                    },
                    sum_inputs=sum_inputs,
                )
                for i, part in enumerate(parts)
            ]
        )
        if is_gloo:
            self.seconds += time.perf_counter() - begun_s

    def _scratch_for(self, vector: Tensor, num_elements: int, place: Hashable) -> Tensor:
        scratch = self._scratch.get((place, vector.dtype))
        if scratch is None or scratch.numel() < num_elements:
            scratch = self._scratch[place, vector.dtype] = vector.new_empty(num_elements)
        return scratch[:num_elements]


def _plan(
    make: Callable[[int], Schedule], num_elements: int, itemsize: int, rank: int, cuts: bool
) -> _Plan:
    make = cache(make)  # most parts have one length
    whole = make(num_elements)
    # Shards that stay with their owners are cut from the whole vector, and inputs are already many
    # messages without pieces (LOG.md).
    stays = whole.kind in (REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL) or bool(whole.inputs)
    parts = pieces(whole, itemsize) if cuts and not stays else [(0, num_elements)]
    planned = [
        _Part(start, stop, rounds_of_rank(schedule, rank), schedule.own_inputs(rank).start)
        for start, stop in parts
        for schedule in [make(stop - start)]
    ]
    return _Plan(planned, whole.kind == AVERAGE, whole.num_rounds, whole.early_rounds)
