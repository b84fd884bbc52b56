"""Which exchanges add in the order of the fixed binary tree: computed, never claimed."""

from functools import lru_cache

from firecaffe.exchange import ALGORITHMS, NATIVE
from firecaffe.exchange.proof import prove


@lru_cache
def adds_in_tree_order(algorithm: str, world_size: int) -> bool:
    """Whether the result has the bits of the fixed tree over ranks at this world size.

    The vector is long enough that no shard of it is empty. `native` is a library's sum in an
    order that it does not promise; but two numbers have only one sum.
    """
    if algorithm == NATIVE:
        return world_size <= 2
    return prove(ALGORITHMS[algorithm](world_size, 4 * world_size)).in_tree_order


def keeps_tree_order(algorithm: str) -> bool:
    """Whether the algorithm is made for tree order; some keep it only at suitable world sizes.

    Four ranks are the fewest at which orders of addition differ and every algorithm is at home.
    """
    return adds_in_tree_order(algorithm, 4)
