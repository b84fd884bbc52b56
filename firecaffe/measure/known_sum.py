"""Checks exchanges with vectors of a known sum, and with schedules run in a single process."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from firecaffe.cluster.agree import digest, gather_text, ranks_that_differ
from firecaffe.cluster.world import World
from firecaffe.errors import NotIdenticalError
from firecaffe.exchange import tree
from firecaffe.exchange.proof import outcome
from firecaffe.exchange.route import Route
from firecaffe.exchange.schedule import AVERAGE, BYTES_PER_ELEMENT, Schedule
from firecaffe.transport.exchange import Exchange


def interpret(schedule: Schedule, vectors: list[Tensor]) -> list[Tensor]:
    """Run a schedule on the vector of each rank, or input; return all ranks' vectors after it."""
    lengths = [stop - start for start, stop in pairwise(schedule.ends)]
    nothing = torch.full_like(vectors[0], torch.nan)
    slices = [vector.split_with_sizes(lengths) for vector in (nothing, *vectors)]
    # torch joins no empty list, which is all that an empty vector has.
    held = [
        torch.cat([nothing[:0], *parts])
        for parts in outcome(schedule, slices[1:], slices[0], torch.add)
    ]
    return [v / schedule.world_size for v in held] if schedule.kind == AVERAGE else held


MAX_INTERPRETED_BYTES = 2**22
"""The most bytes over all ranks for which one process also computes the tree's bits."""

# A prime, so that no shard's length is a multiple of it.
_PERIOD = 65521
_MAX_PATTERN = 15
_MAX_WEIGHT = 255

_ROUNDING = 2.0**-20


class EncodedSum(Protocol):
    """A sum of one vector of each rank, sent encoded, plus the remainders of earlier sums."""

    @property
    def bound(self) -> float:
        """Bound of a first sum's L2 error, as a multiple of the sum of the summands' norms."""

    @property
    def wire_bytes(self) -> int: ...

    def empty(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def all_reduce(self, vector: Tensor, lane: int = 0) -> None:
        """Replace `vector`, which `empty` has made, by the sum over ranks."""

    def alone(self, vectors: Sequence[Tensor]) -> Tensor:
        """Compute the first sum of all ranks' vectors in this process."""


SumsByName = Mapping[str, Exchange | EncodedSum]


def summand(rank: int, world_size: int, num_elements: int) -> Tensor:
    """Return the rank's float32 vector of whole numbers, shape (num_elements,).

    It is a pattern times a weight of the rank, plus a second such product, so a missing or doubled
    rank changes the sum. Up to 2193 ranks no partial sum exceeds 2^24, so every order of addition
    gives the same bits.
    """
    return _combine(_weights(world_size)[:, rank], num_elements)


def true_sum(world_size: int, num_elements: int) -> Tensor:
    return _combine(_weights(world_size).sum(1), num_elements)


def noise(rank: int, num_elements: int) -> Tensor:
    """Return the rank's normal random numbers, which resemble gradients, for timing codecs."""
    block = _random(rank, min(num_elements, _PERIOD))
    return block.repeat(-(-num_elements // _PERIOD))[:num_elements]


def is_small(world_size: int, num_elements: int) -> bool:
    return num_elements * BYTES_PER_ELEMENT * world_size <= MAX_INTERPRETED_BYTES


def checks_bits(route: Route, num_elements: int) -> bool:
    """Whether the sum should have the tree's bits, and is small enough to check that."""
    return is_small(route.world_size, num_elements) and route.is_invariant


def check_exchanges(world: World, make: Callable[[int], SumsByName], sizes: Sequence[int]) -> None:
    """Compare every sum with the true sum, for every number of float32 elements in `sizes`.

    make: makes the sums for a number of elements. Small sums in tree order must have the tree's
    bits. Encoded ones must be within their bound, equal on all ranks and, if small, to a single
    process's. Raises: PeerLostError; NotIdenticalError on every rank.
    """
    fault = ""
    for num_elements in sizes:
        next_fault = _fault_at(world, make(num_elements), num_elements)
        fault = fault or next_fault
    raise_any_fault(world, fault)


def raise_any_fault(world: World, fault: str) -> None:
    for rank, stated in enumerate(gather_text(world, fault)):
        if stated:
            raise NotIdenticalError(f"{stated} on rank {rank}; no time of a wrong sum is shown")


def difference(found: Tensor, expected: Tensor) -> str:
    differs = found.view(torch.int32) != expected.view(torch.int32)
    if not bool(differs.any()):
        return ""
    first = int(differs.nonzero()[0])
    return (
        f"element {first} of {found.numel()} is {float(found[first]):.9g} "
        f"instead of {float(expected[first]):.9g}"
    )


def _fault_at(world: World, sums: SumsByName, num_elements: int) -> str:
    """Run every exchange, and return the fault of the first that is wrong on this rank, or ""."""
    ranks = range(world.world_size)
    exchanges = {name: way for name, way in sums.items() if isinstance(way, Exchange)}
    names = [name for name, way in exchanges.items() if checks_bits(way.route, num_elements)]
    inputs = [_random(rank, num_elements) for rank in ranks] if names else []
    by_tree = interpret(tree.schedule(world.world_size, num_elements), inputs) if names else []
    local_input = summand(world.rank, world.world_size, num_elements)
    expected = true_sum(world.world_size, num_elements)
    faults = []
    for name, way in sums.items():
        what = f"{name} over {len(ranks)} ranks, {num_elements * BYTES_PER_ELEMENT} bytes"
        vector = way.empty(num_elements, torch.float32, world.device)
        if not isinstance(way, Exchange):
            wrong = _fault_of_encoded(world, way, vector)
            faults.append(f"{what}: {wrong}" if wrong else "")
            continue
        wrong = _difference_after(way, vector, local_input, expected)
        faults.append(f"{what}: the sum is wrong: {wrong}" if wrong else "")
        if name in names:
            wrong = _difference_after(way, vector, inputs[world.rank], by_tree[world.rank])
            faults.append(f"{what}: the bits are not the tree's: {wrong}" if wrong else "")
    return next(filter(None, faults), "")


def _difference_after(
    exchange: Exchange, vector: Tensor, local_input: Tensor, expected: Tensor
) -> str:
    vector.copy_(local_input)
    exchange.all_reduce(vector)
    return difference(vector.cpu(), expected)


def _fault_of_encoded(world: World, way: EncodedSum, vector: Tensor) -> str:
    inputs = [noise(rank, vector.numel()) for rank in range(world.world_size)]
    vector.copy_(inputs[world.rank])
    way.all_reduce(vector)
    total = vector.cpu()
    different = ranks_that_differ(world, digest([("total", total)]))
    if different:
        return f"rank {', '.join(map(str, different))} ended in other bits than most"
    true_total = torch.zeros(total.numel(), dtype=torch.float64)
    scale = 0.0
    for summand_of_rank in inputs:
        true_total += summand_of_rank
        scale += float(summand_of_rank.norm())
    error, most = float((total - true_total).norm()), (way.bound + _ROUNDING) * scale
    if not error <= most:
        return f"the sum is off by {error:.3g} in the L2 norm; its codec allows {most:.3g}"
    if not is_small(world.world_size, total.numel()):
        return ""
    wrong = difference(total, way.alone([tensor.to(world.device) for tensor in inputs]).cpu())
    return f"the bits are not those of one process: {wrong}" if wrong else ""


def _weights(world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(world_size)
    return torch.randint(1, _MAX_WEIGHT + 1, (2, world_size), generator=generator)


def _combine(weights: Tensor, num_elements: int) -> Tensor:
    generator = torch.Generator().manual_seed(_PERIOD)
    patterns = torch.randint(1, _MAX_PATTERN + 1, (2, _PERIOD), generator=generator)
    block = (weights[0] * patterns[0] + weights[1] * patterns[1]).to(torch.float32)
    return block.repeat(-(-num_elements // _PERIOD))[:num_elements]


def _random(rank: int, num_elements: int) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(rank))
