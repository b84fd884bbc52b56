"""The tree over micro-batches against its recursive definition, for every V and every cut."""

import random
from itertools import chain
from typing import Any, TypeAlias

import pytest

from firecaffe.exchange.leaves import (
    Node,
    TreeSum,
    largest_nodes,
    leaf_share,
    shares_are_subtrees,
    tree_sum,
)

Sum: TypeAlias = "int | tuple[Sum, Sum]"
NUM_LEAVES = (*range(1, 18), 21, 31, 32, 33, 40)


def leaves_of(node: Node, num_leaves: int) -> range:
    first = node.index << node.level
    return range(first, min(first + (1 << node.level), num_leaves))


def value_of(node: Node, num_leaves: int) -> Sum:
    """The definition: a leaf, or the sum of two children, or the only child that there is."""
    if node.level == 0:
        return node.index
    left = value_of(Node(node.level - 1, 2 * node.index), num_leaves)
    right = Node(node.level - 1, 2 * node.index + 1)
    return (left, value_of(right, num_leaves)) if leaves_of(right, num_leaves) else left


def root_of(num_leaves: int) -> Node:
    return Node((num_leaves - 1).bit_length(), 0)


def counter(num_leaves: int) -> TreeSum[Sum]:
    return TreeSum(num_leaves, lambda left, right: (left, right))


def nodes_of(num_leaves: int, world_size: int, rank: int) -> list[tuple[Node, Sum]]:
    """What a worker is left with, and its sums."""
    own = counter(num_leaves)
    for leaf in leaf_share(num_leaves, world_size, rank):
        own.push(Node(0, leaf), leaf)
    return own.pending


def largest_inside(num_leaves: int, share: range) -> list[Node]:
    """By search: the nodes that lie in the share while their parent does not."""
    root = root_of(num_leaves)
    inside = {
        node
        for level in range(root.level + 1)
        for index in range(-(-num_leaves >> level) + 1)
        if (leaves := leaves_of(node := Node(level, index), num_leaves))
        and set(leaves) <= set(share)
    }
    largest = [node for node in inside if Node(node.level + 1, node.index // 2) not in inside]
    return sorted(largest, key=lambda node: node.index << node.level)


def test_any_number_of_workers_makes_the_same_additions() -> None:
    for num_leaves in NUM_LEAVES:
        for world_size in range(1, num_leaves + 1):
            rest = counter(num_leaves)
            for rank in range(world_size):
                for node, value in nodes_of(num_leaves, world_size, rank):
                    assert value == value_of(node, num_leaves)
                    rest.push(node, value)
            assert rest.total() == value_of(root_of(num_leaves), num_leaves)
        leaves: list[Sum] = list(range(num_leaves))
        assert rest.total() == tree_sum(leaves, lambda left, right: (left, right))


def test_leaves_may_come_in_any_order() -> None:
    """Each addition is of the same two nodes; which of them came first does not matter."""
    draw = random.Random(0)
    for num_leaves, world_size in ((leaves, size) for leaves, size in SHARED if size <= 3):
        share = list(leaf_share(num_leaves, world_size, world_size - 1))
        expected = nodes_of(num_leaves, world_size, world_size - 1)
        for _ in range(5):
            draw.shuffle(share)
            own: TreeSum[frozenset[Any]] = TreeSum(num_leaves, lambda a, b: frozenset((a, b)))
            for leaf in share:
                own.push(Node(0, leaf), frozenset((leaf,)))
            assert own.pending == [(node, _unordered(value)) for node, value in expected]


def _unordered(value: Sum) -> frozenset[Any]:
    pair = isinstance(value, tuple)
    return frozenset(map(_unordered, value)) if pair else frozenset((value,))  # type: ignore[arg-type]


SHARED = [(leaves, size) for leaves in NUM_LEAVES for size in range(1, leaves + 1)]


def test_shares_are_consecutive_even_and_complete() -> None:
    for num_leaves, world_size in SHARED:
        shares = [leaf_share(num_leaves, world_size, rank) for rank in range(world_size)]
        assert list(chain.from_iterable(shares)) == list(range(num_leaves))
        lengths = {len(share) for share in shares}
        assert lengths <= {num_leaves // world_size, -(-num_leaves // world_size)}


def test_largest_nodes_are_the_largest() -> None:
    for num_leaves, world_size in SHARED:
        for rank in range(world_size):
            share = leaf_share(num_leaves, world_size, rank)
            nodes = largest_nodes(num_leaves, share)
            assert nodes == largest_inside(num_leaves, share)
            assert nodes == [node for node, _ in nodes_of(num_leaves, world_size, rank)]
            assert len(nodes) <= max(1, 2 * (num_leaves - 1).bit_length())


def test_shares_are_subtrees_where_they_are_equal_and_one_node_each() -> None:
    """Of eight leaves on six workers, too, every share is one node, but a tree over ranks is
    another.
    """
    for num_leaves, world_size in SHARED:
        held = [nodes_of(num_leaves, world_size, rank) for rank in range(world_size)]
        equal = num_leaves % world_size == 0
        one_each = all(len(nodes) == 1 for nodes in held)
        assert shares_are_subtrees(num_leaves, world_size) == (equal and one_each)
        if one_each and (equal or (num_leaves, world_size) == (8, 6)):
            sums = [value for [(_, value)] in held]
            over_ranks = tree_sum(sums, lambda left, right: (left, right))
            assert (over_ranks == value_of(root_of(num_leaves), num_leaves)) == equal
    assert not shares_are_subtrees(4, 8)  # more workers than leaves


def test_a_missing_leaf_is_noticed() -> None:
    for num_leaves in NUM_LEAVES[1:]:
        for missing in range(num_leaves):
            partial = counter(num_leaves)
            for leaf in range(num_leaves):
                if leaf != missing:
                    partial.push(Node(0, leaf), leaf)
            with pytest.raises(ValueError, match=f"not all {num_leaves} leaves"):
                partial.total()
    with pytest.raises(ValueError, match="not all 3 leaves"):
        counter(3).total()
