"""Tells which exchanges add in the order of the fixed binary tree.

Each schedule says so by a closed rule, which the tests prove at world sizes up to 33 and more.
"""

from firecaffe.exchange import NATIVE, find_schedule


def adds_in_tree_order(algorithm: str, world_size: int, ranks_per_node: int = 1) -> bool:
    """Whether the result has the bits of the fixed tree over ranks. Raises: ValueError."""
    if algorithm == NATIVE:
        return world_size <= 2  # a library promises no order, but two numbers have only one sum
    return find_schedule(algorithm, ranks_per_node)(world_size, 4 * world_size).in_tree_order


def keeps_tree_order(algorithm: str) -> bool:
    """Whether the algorithm is made for tree order; some keep it only at suitable world sizes."""
    # Four are the fewest ranks, or nodes, at which orders differ and every algorithm works.
    if algorithm.startswith("hierarchical"):
        return adds_in_tree_order(algorithm, 16, ranks_per_node=4)
    return adds_in_tree_order(algorithm, 4)
