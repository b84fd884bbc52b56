"""A gradient exchange that runs: an algorithm's schedules, bound to this rank and its group."""

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.comm.execute import RankRound, execute, rounds_of_rank
from firecaffe.comm.fold import fold_nodes
from firecaffe.comm.world import World, peers_may_be_lost
from firecaffe.exchange import ALGORITHMS, NATIVE
from firecaffe.exchange.leaves import Node, shares_are_subtrees
from firecaffe.exchange.order import adds_in_tree_order, keeps_tree_order

FOLD = "fold"
"""All-to-all, addition in tree order, all-gather: for shares that are no subtrees."""


def route(algorithm: str, world_size: int, num_leaves: int) -> str:
    """How the micro-batch tree goes on across workers: the algorithm, or `FOLD`.

    An exchange that is made for tree order keeps it: where the shares are unequal, or the world
    size does not suit the algorithm, `FOLD` stands in, and the run's record says so.
    """
    if not keeps_tree_order(algorithm):
        return algorithm
    if shares_are_subtrees(num_leaves, world_size) and adds_in_tree_order(algorithm, world_size):
        return algorithm
    return FOLD


def is_invariant(algorithm: str, world_size: int, num_leaves: int) -> bool:
    """Whether this many workers end in the same bits as one worker does."""
    if world_size == 1 or route(algorithm, world_size, num_leaves) == FOLD:
        return True
    return shares_are_subtrees(num_leaves, world_size) and adds_in_tree_order(algorithm, world_size)


class Exchange:
    """Sums vectors over all ranks, in place. Used by one thread at a time."""

    def __init__(self, world: World, algorithm: str) -> None:
        self.world = world
        self.algorithm = algorithm
        self._rounds: dict[int, list[RankRound]] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}

    def all_reduce(self, vector: Tensor) -> None:
        """vector, shape (num_elements,), becomes the sum of all ranks' vectors."""
        group = self.world.exchange_group
        if group is None:
            return
        with peers_may_be_lost():
            if self.algorithm == NATIVE:
                dist.all_reduce(vector, group=group)
                return
            rounds = self._rounds_for(vector.numel())
            needed = max((round_.scratch_elements for round_ in rounds), default=0)
            execute(rounds, self.world.rank, vector, self._scratch_for(vector, needed), group)

    def fold(self, nodes: list[tuple[Node, Tensor]], num_leaves: int, total: Tensor) -> None:
        """total becomes the root of the micro-batch tree over the nodes of all ranks.

        nodes: this rank's largest nodes with their vectors, each of total's shape; its length
        must be a multiple of the number of ranks.
        """
        with peers_may_be_lost():
            fold_nodes(nodes, num_leaves, total, self.world)

    def _rounds_for(self, num_elements: int) -> list[RankRound]:
        if num_elements not in self._rounds:
            schedule = ALGORITHMS[self.algorithm](self.world.world_size, num_elements)
            self._rounds[num_elements] = rounds_of_rank(schedule, self.world.rank)
        return self._rounds[num_elements]

    def _scratch_for(self, vector: Tensor, num_elements: int) -> Tensor:
        scratch = self._scratch.get(vector.dtype)
        if scratch is None or scratch.numel() < num_elements:
            scratch = self._scratch[vector.dtype] = vector.new_empty(num_elements)
        return scratch
