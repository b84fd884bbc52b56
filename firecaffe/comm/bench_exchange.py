"""Times exchanges side by side: checked first, then in turns, every result checked again.

In each repetition all exchanges have their turn, so that whatever else the machine does meets all
of them alike. The words algbw and busbw are those of nccl-tests.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.comm.agree import gather_text
from firecaffe.comm.check_exchange import (
    BYTES_PER_ELEMENT,
    check_exchanges,
    difference,
    summand,
    true_sum,
)
from firecaffe.comm.exchange import Exchange
from firecaffe.comm.measure import finish
from firecaffe.comm.world import World, peers_may_be_lost
from firecaffe.errors import NotIdenticalError

WARM_UP = 1
"""Repetitions of each size before those that count; the check's own calls come before them."""


@dataclass(frozen=True)
class Timing:
    """One exchange at one size. A sample is the time of the slowest rank in one repetition."""

    algorithm: str
    world_size: int
    size_bytes: int
    samples_s: tuple[float, ...]

    @property
    def time_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def algbw_bytes_per_s(self) -> float:
        """Source: nccl-tests, doc/PERFORMANCE.md: size / time."""
        return self.size_bytes / self.time_s

    @property
    def busbw_bytes_per_s(self) -> float:
        """Source: nccl-tests, doc/PERFORMANCE.md: algbw · 2 (p - 1) / p for an all-reduce."""
        return self.algbw_bytes_per_s * 2 * (self.world_size - 1) / self.world_size

    def ratio_to(self, control: "Timing") -> float:
        """Median over repetitions of this time / the control's in the same repetition."""
        pairs = zip(self.samples_s, control.samples_s, strict=True)
        return statistics.median(own / other for own, other in pairs)

    def share_of_bound(self, link_bytes_per_s: float) -> float:
        """The least time that any all-reduce needs on such links / the median time.

        Source: Patarasuk and Yuan 2009, theorem 1: 2 (p - 1) / p · size / link.
        """
        return self.busbw_bytes_per_s / link_bytes_per_s


def time_exchanges(
    world: World,
    algorithms: Sequence[str],
    sizes_bytes: Sequence[int],
    repetitions: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Timing]:
    """Times each algorithm at each size (a multiple of 4), over all ranks, which all call this.

    Timings come size by size, in the order of the algorithms. Making a schedule is not in them.

    Raises: NotIdenticalError, on every rank and before any time is known, where a sum is wrong;
    PeerLostError.
    """
    exchanges = {name: Exchange(world, name) for name in algorithms}
    progress("is every sum right?")
    check_exchanges(world, exchanges, [size // BYTES_PER_ELEMENT for size in sizes_bytes])
    own_s: list[list[list[float]]] = []
    wrong = ""
    for size_bytes in sizes_bytes:
        progress(f"{size_bytes} bytes")
        samples_s, fault = _time_size(world, exchanges, size_bytes, repetitions)
        own_s.append(samples_s)
        wrong = wrong or fault
    stated = [json.loads(text) for text in gather_text(world, json.dumps([wrong, own_s]))]
    for rank, (fault, _) in enumerate(stated):
        if fault:
            raise NotIdenticalError(
                f"{fault} on rank {rank}, after a first sum that was right; "
                "no time of a wrong sum is shown"
            )
    return [
        Timing(name, world.world_size, size_bytes, _slowest([rank_s[i][j] for _, rank_s in stated]))
        for i, size_bytes in enumerate(sizes_bytes)
        for j, name in enumerate(algorithms)
    ]


def _time_size(
    world: World, exchanges: dict[str, Exchange], size_bytes: int, repetitions: int
) -> tuple[list[list[float]], str]:
    """This rank's seconds, by exchange and repetition; and the first wrong sum, if any."""
    num_elements = size_bytes // BYTES_PER_ELEMENT
    own = summand(world.rank, world.world_size, num_elements).to(world.device)
    expected = true_sum(world.world_size, num_elements).to(world.device)
    vector = torch.empty_like(own)
    samples_s: dict[str, list[float]] = {name: [] for name in exchanges}
    wrong = ""
    for repetition in range(-WARM_UP, repetitions):
        turns = list(exchanges.items())
        # Back and forth, so that nobody follows the same one every time.
        for name, exchange in turns if repetition % 2 == 0 else reversed(turns):
            vector.copy_(own)
            taken_s = _time_once(world, exchange, vector)
            if repetition >= 0:
                samples_s[name].append(taken_s)
            if not torch.equal(vector, expected) and not wrong:
                what = difference(vector.cpu(), expected.cpu())
                wrong = f"{name} over {world.world_size} ranks, {size_bytes} bytes: {what}"
    return list(samples_s.values()), wrong


def _time_once(world: World, exchange: Exchange, vector: Tensor) -> float:
    finish(world.device)
    with peers_may_be_lost():
        # A sum on the CPU: no rank has it before all are here. On a GPU's group dist.barrier
        # would go by NCCL.
        dist.all_reduce(torch.zeros(1), group=world.group)
    start_s = time.perf_counter()
    exchange.all_reduce(vector)
    finish(world.device)
    return time.perf_counter() - start_s


def _slowest(by_rank: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(max(samples_s) for samples_s in zip(*by_rank, strict=True))
