"""Is it the sum? Vectors whose sum over ranks is known, and exchanges held against it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from firecaffe.comm.agree import gather_text
from firecaffe.comm.exchange import Exchange
from firecaffe.comm.interpret import interpret
from firecaffe.comm.world import World
from firecaffe.errors import NotIdenticalError
from firecaffe.exchange import tree
from firecaffe.exchange.order import adds_in_tree_order

BYTES_PER_ELEMENT = 4
MOST_INTERPRETED_BYTES = 2**22
"""Over all ranks: above it the tree's bits are not computed in one process beside the exchange."""

# A prime number of elements, which no shard's length is a multiple of.
_PERIOD = 65521
_MOST_PATTERN = 15
_MOST_WEIGHT = 255


def summand(rank: int, world_size: int, num_elements: int) -> Tensor:
    """Rank's float32 vector of whole numbers, shape (num_elements,).

    It is a pattern times a weight of the rank, plus another pattern times another weight: the sum
    has a closed form, and a rank that is missing or counted twice shows. No sum of a part of the
    ranks exceeds 2^24 up to 2193 ranks, so every order of addition gives the same bits.
    """
    return _combine(_weights(world_size)[:, rank], num_elements)


def true_sum(world_size: int, num_elements: int) -> Tensor:
    """The sum of all ranks' summands, in closed form."""
    return _combine(_weights(world_size).sum(1), num_elements)


def checks_bits(algorithm: str, world_size: int, num_elements: int) -> bool:
    """Whether the exchange is to give the tree's own bits, and the vectors are small enough."""
    small = num_elements * BYTES_PER_ELEMENT * world_size <= MOST_INTERPRETED_BYTES
    return small and adds_in_tree_order(algorithm, world_size)


def check_exchanges(world: World, exchanges: Mapping[str, Exchange], sizes: Sequence[int]) -> None:
    """Holds every exchange, at every number of float32 elements, against the true sum.

    Exchanges that add in tree order at this world size must also give the bits of the tree over
    random numbers, where the vectors are small.

    Raises: NotIdenticalError, on every rank, where one differs; PeerLostError.
    """
    fault = ""
    for num_elements in sizes:
        found = _fault_at(world, exchanges, num_elements)
        fault = fault or found
    for rank, stated in enumerate(gather_text(world, fault)):
        if stated:
            raise NotIdenticalError(f"{stated} on rank {rank}; no time of a wrong sum is shown")


def difference(found: Tensor, expected: Tensor) -> str:
    """The first element whose bits differ and both values; empty where there is none."""
    differs = found.view(torch.int32) != expected.view(torch.int32)
    if not bool(differs.any()):
        return ""
    first = int(differs.nonzero()[0])
    return (
        f"element {first} of {found.numel()} is {float(found[first]):.9g} "
        f"instead of {float(expected[first]):.9g}"
    )


def _fault_at(world: World, exchanges: Mapping[str, Exchange], num_elements: int) -> str:
    """What the first exchange that is wrong on this rank did wrong; all have had their turn."""
    ranks = range(world.world_size)
    names = [name for name in exchanges if checks_bits(name, world.world_size, num_elements)]
    inputs = [_random(rank, num_elements) for rank in ranks] if names else []
    by_tree = interpret(tree.schedule(world.world_size, num_elements), inputs) if names else []
    own = summand(world.rank, world.world_size, num_elements)
    expected = true_sum(world.world_size, num_elements)
    faults = []
    for name, exchange in exchanges.items():
        what = f"{name} over {len(ranks)} ranks, {num_elements * BYTES_PER_ELEMENT} bytes"
        wrong = _difference_after(exchange, own, expected, world.device)
        faults.append(f"{what}: the sum is wrong: {wrong}" if wrong else "")
        if name in names:
            wrong = _difference_after(
                exchange, inputs[world.rank], by_tree[world.rank], world.device
            )
            faults.append(f"{what}: the bits are not the tree's: {wrong}" if wrong else "")
    return next(filter(None, faults), "")


def _difference_after(
    exchange: Exchange, own: Tensor, expected: Tensor, device: torch.device
) -> str:
    vector = own.to(device, copy=True)
    exchange.all_reduce(vector)
    return difference(vector.cpu(), expected)


def _weights(world_size: int) -> Tensor:
    """Two weights for each rank, shape (2, world_size)."""
    generator = torch.Generator().manual_seed(world_size)
    return torch.randint(1, _MOST_WEIGHT + 1, (2, world_size), generator=generator)


def _combine(weights: Tensor, num_elements: int) -> Tensor:
    generator = torch.Generator().manual_seed(_PERIOD)
    patterns = torch.randint(1, _MOST_PATTERN + 1, (2, _PERIOD), generator=generator)
    block = (weights[0] * patterns[0] + weights[1] * patterns[1]).to(torch.float32)
    return block.repeat(-(-num_elements // _PERIOD))[:num_elements]


def _random(rank: int, num_elements: int) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(rank))
