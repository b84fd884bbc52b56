"""Schedules: which rank sends which slice to which. Standard library only.

A new algorithm is one file with a `schedule(world_size, num_elements)` and one row here. Training,
the tests' sweep, `firecaffe schedule` and docs/explanation/exchange.md's test then include it.
"""

import re
from collections.abc import Callable
from functools import partial

from firecaffe.exchange import (
    double_tree,
    halving_doubling,
    hierarchical,
    parameter_server,
    pipelined_tree,
    recursive_doubling,
    ring,
    sharded_parameter_server,
    tree,
)
from firecaffe.exchange.schedule import Schedule
from firecaffe.value_checks import did_you_mean

ALGORITHMS: dict[str, Callable[[int, int], Schedule]] = {
    "parameter_server": parameter_server.schedule,
    "sharded_parameter_server": sharded_parameter_server.schedule,
    "tree": tree.schedule,
    "pipelined_tree": pipelined_tree.schedule,
    "double_tree": double_tree.schedule,
    "ring": ring.schedule,
    "recursive_doubling": recursive_doubling.schedule,
    "halving_doubling": halving_doubling.schedule,
}
"""The exchanges by name: functions of (world_size, num_elements) that return a schedule."""

ROOTED = ("parameter_server", "tree")
"""The algorithms that sum at rank 0 and send the total back; only these can be `inner`."""

SEGMENTED = ("pipelined_tree", "double_tree")
"""The algorithms whose schedules cut the vector into segments and pipeline them."""

FULL_DUPLEX = ("sharded_parameter_server", "ring", "recursive_doubling", "halving_doubling")
"""The algorithms whose ranks send as much as they receive in each round."""

MAX_LANES = 2
"""The most vectors that are worth exchanging at the same time."""

NATIVE = "native"
"""The backend's own all_reduce, which has no schedule: the control of every benchmark."""

EXCHANGES = (*ALGORITHMS, NATIVE)

AUTO = "auto"
"""The setting by which a training measures a link and takes the fastest exchange on it."""


def parse_hierarchical(name: str) -> tuple[str, str] | None:
    """Return (inner, outer) of a name such as `hierarchical(tree,ring)`; None of any other."""
    match = re.fullmatch(r"hierarchical\((\w+),(\w+)\)", name)
    return None if match is None else (match[1], match[2])


def unknown_exchange(name: str, *more: str) -> str:
    """Return a line that an exchange does not exist, and which do. more: other allowed names."""
    known = *EXCHANGES, "hierarchical(INNER,OUTER)", *more
    return f"no exchange {name!r}; the exchanges are {', '.join(known)}{did_you_mean(name, known)}"


def useful_lanes(name: str) -> int:
    """Return how many vectors an algorithm should exchange at the same time.

    If ranks send as much as they receive, one vector fills both directions of a link, and a second
    would only wake more threads. In a tree, the next vector goes up while a total comes down. A
    library's all_reduce matches vectors by their order alone, so they go one by one.
    """
    return 1 if name == NATIVE or name in FULL_DUPLEX else MAX_LANES


def find_schedule(name: str, ranks_per_node: int = 1) -> Callable[[int, int], Schedule]:
    """Return the algorithm of a name: a row of `ALGORITHMS`, or `hierarchical(INNER,OUTER)`.

    Raises: ValueError if there is none, or `ranks_per_node` is below 1. A hierarchical algorithm
    also raises it when called for a number of ranks that does not fill its nodes.
    """
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node is {ranks_per_node}; it must be at least 1")
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if name == NATIVE:
        raise ValueError(
            f"{NATIVE} is the backend's own all_reduce and has no schedule; "
            f"those that have are {', '.join(ALGORITHMS)}"
        )
    nested = parse_hierarchical(name)
    if nested is None:
        raise ValueError(unknown_exchange(name))
    inner, outer = nested
    if inner not in ROOTED:
        raise ValueError(f"{name}: inner is {inner!r}; it must be one of {', '.join(ROOTED)}")
    if outer not in ALGORITHMS:
        raise ValueError(f"{name}: outer is {outer!r}; it must be one of {', '.join(ALGORITHMS)}")
    return partial(
        hierarchical.schedule,
        inner=ALGORITHMS[inner],
        outer=ALGORITHMS[outer],
        ranks_per_node=ranks_per_node,
    )
