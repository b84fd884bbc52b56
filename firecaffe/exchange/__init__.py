"""Schedules: who sends which slice to whom. Standard library only.

A new algorithm is one file with a `schedule(world_size, num_elements)` and one row here;
training, the tests' sweep, `firecaffe schedule` and docs/exchange.md's test pick it up.
"""

from collections.abc import Callable

from firecaffe.exchange import (
    halving_doubling,
    parameter_server,
    recursive_doubling,
    ring,
    sharded_parameter_server,
    tree,
)
from firecaffe.exchange.schedule import Schedule

ALGORITHMS: dict[str, Callable[[int, int], Schedule]] = {
    "parameter_server": parameter_server.schedule,
    "sharded_parameter_server": sharded_parameter_server.schedule,
    "tree": tree.schedule,
    "ring": ring.schedule,
    "recursive_doubling": recursive_doubling.schedule,
    "halving_doubling": halving_doubling.schedule,
}

NATIVE = "native"
"""The backend's own all_reduce: no schedule, the control of every benchmark."""

EXCHANGES = (*ALGORITHMS, NATIVE)
