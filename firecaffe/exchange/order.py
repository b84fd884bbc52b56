"""Which exchanges add in the order of the fixed binary tree.

Each schedule says it by a closed rule, for thousands of ranks too; the tests prove the rule, by
running schedules on symbols, at every world size up to 33 and at larger ones.
"""

from firecaffe.exchange import NATIVE, find_schedule


def adds_in_tree_order(algorithm: str, world_size: int, ranks_per_node: int = 1) -> bool:
    """Whether the result has the bits of the fixed tree over ranks at this world size.

    `native` is a library's sum in an order that it does not promise; but two numbers have only one
    sum.

    Raises: ValueError where `find_schedule` or what it finds does.
    """
    if algorithm == NATIVE:
        return world_size <= 2
    return find_schedule(algorithm, ranks_per_node)(world_size, 4 * world_size).in_tree_order


def keeps_tree_order(algorithm: str) -> bool:
    """Whether the algorithm is made for tree order; some keep it only at suitable world sizes.

    Four ranks are the fewest at which orders of addition differ and every algorithm is at home;
    for a hierarchical one, four nodes of four.
    """
    if algorithm.startswith("hierarchical"):
        return adds_in_tree_order(algorithm, 16, ranks_per_node=4)
    return adds_in_tree_order(algorithm, 4)
