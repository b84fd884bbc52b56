"""World sizes that are no power of two, for the algorithms that need one.

With q the largest power of two up to p and r = p - q, the first 2 r ranks pair up: the odd one
gives its vector to the even one and waits; q ranks do the algorithm; the even ones hand the
result on. This costs two more rounds of the whole vector.

Source: Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005.
"""

from firecaffe.exchange.schedule import Transfer


def active_ranks(world_size: int) -> list[int]:
    """The q ranks that do the algorithm, in rank order."""
    extra = world_size - largest_power_of_two(world_size)
    return [*range(0, 2 * extra, 2), *range(2 * extra, world_size)]


def pair_up(world_size: int, num_elements: int) -> list[Transfer]:
    """The round before: odd ranks of the pairs give their vector away."""
    extra = world_size - largest_power_of_two(world_size)
    return [Transfer(2 * i + 1, 2 * i, 0, num_elements, reduce=True) for i in range(extra)]


def hand_on(world_size: int, num_elements: int) -> list[Transfer]:
    """The round after: odd ranks of the pairs receive the result."""
    extra = world_size - largest_power_of_two(world_size)
    return [Transfer(2 * i, 2 * i + 1, 0, num_elements, reduce=False) for i in range(extra)]


def largest_power_of_two(world_size: int) -> int:
    return 1 << (world_size.bit_length() - 1)
