"""Schedules that tests sweep, transfers by hand, and numbers that show how they were added."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from firecaffe.exchange import ALGORITHMS, ROOTED, double_tree, pipelined_tree
from firecaffe.exchange.schedule import Schedule, Transfer

MakeSchedule = Callable[[int, int], Schedule]

MAKERS: dict[str, MakeSchedule] = {
    **ALGORITHMS,
    "pipelined_tree, many segments": partial(pipelined_tree.schedule, segment_elements=7),
    "double_tree, many segments": partial(double_tree.schedule, segment_elements=7),
}
"""By world size and number of elements: all algorithms, and what is segmented in many pieces."""

OVER_NODES = [f"hierarchical({inner},{outer})" for inner in ROOTED for outer in ALGORITHMS]
WORLD_SIZES = range(1, 18)


def add(source: int, destination: int, start: int = 0, stop: int = 10) -> Transfer:
    return Transfer(source, destination, start, stop, reduce=True)


def copy(source: int, destination: int, start: int = 0, stop: int = 10) -> Transfer:
    return Transfer(source, destination, start, stop, reduce=False)


def random_vectors(world_size: int, num_elements: int) -> list[Tensor]:
    """Float tensors whose sums show the order in which they were added."""
    generator = torch.Generator().manual_seed(world_size)
    return list(torch.randn(world_size, num_elements, generator=generator))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
