"""World sizes that are not a power of two, for the algorithms that need one.

With q the largest power of two up to p and r = p - q, the first 2 r ranks pair up: the odd one
gives its vector to the even one and waits; q ranks run the algorithm; the even ones hand the result
on. This costs two more rounds of the whole vector. Source: Rabenseifner 2004; Thakur, Rabenseifner,
Gropp 2005.
"""

from collections.abc import Callable, Iterator

from firecaffe.exchange.schedule import OwnRound, Transfer


def around(
    p: int, n: int, num_rounds: int, rounds: Callable[[int], Iterator[OwnRound]], rank: int
) -> Iterator[OwnRound]:
    """Yield a rank's rounds: pairing up, `num_rounds` among q renumbered ranks, handing on."""
    extra = p - largest_power_of_two(p)
    is_paired = rank < 2 * extra
    even = rank - rank % 2
    if is_paired:
        yield 0, [Transfer(even + 1, even, 0, n, reduce=True)]
    if not is_paired or rank == even:
        for number, transfers in rounds(rank // 2 if is_paired else rank - extra):
            yield (
                1 + number,
                [
                    Transfer(_active(extra, t.source), _active(extra, t.destination), *t[2:])
                    for t in transfers
                ],
            )
    if is_paired:
        yield 1 + num_rounds, [Transfer(even, even + 1, 0, n, reduce=False)]


def active_ranks(world_size: int) -> list[int]:
    q = largest_power_of_two(world_size)
    return [_active(world_size - q, index) for index in range(q)]


def _active(extra: int, index: int) -> int:
    return 2 * index if index < extra else index + extra


def is_tree_after_pairing(world_size: int) -> bool:
    """Whether doubling after pairing up adds as the tree over all ranks does: at 2^a - 2^b."""
    # The tree's left side has q ranks, the first half of the active ones. These stand for q ranks
    # only if all are pairs, or none is; and so on to the right.
    lowest = world_size & -world_size
    return (world_size + lowest) & world_size == 0


def largest_power_of_two(world_size: int) -> int:
    return 1 << (world_size.bit_length() - 1)
