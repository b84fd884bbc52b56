"""The executor on collectives of every kind and on ranks with several inputs, over the network of
test_execute.py.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from firecaffe.exchange import fold
from firecaffe.exchange.collectives import COLLECTIVES
from firecaffe.exchange.leaves import equal_shares, sum_of_nodes, tree_sum
from firecaffe.transport.execute import PieceUnderWay, execute
from firecaffe.transport.interpret import interpret
from firecaffe.transport.rank_rounds import RankRound, rounds_of_rank, scratch_elements
from tests.unit.transport.test_execute import Network, check, eager, lazy, receiver_last, same_bits

COLLECTIVE = {
    f"{kind} {name}": make
    for kind, by_name in COLLECTIVES.items()
    for name, make in by_name.items()
}


@pytest.mark.parametrize("collective", COLLECTIVE)
def test_collectives_of_every_kind(collective: str) -> None:
    for world_size in (1, 2, 3, 5, 8):
        for choose in (eager, lazy, receiver_last):
            check(COLLECTIVE[collective], world_size, 61, 1, choose)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("world_size", "num_leaves"), [(2, 2), (2, 7), (3, 16), (5, 11), (6, 6)])
@pytest.mark.parametrize(("num_elements", "choose"), [(3, eager), (101, lazy), (61, receiver_last)])
def test_fold_adds_as_the_tree_over_leaves(
    world_size: int,
    num_leaves: int,
    at_once: bool,
    early: bool,
    num_elements: int,
    choose: Callable[[Sequence[str]], int],
) -> None:
    """Over nodes that ranks hold, in whatever order they arrive: the bits of all leaves on one."""
    generator = torch.Generator().manual_seed(num_leaves)
    leaves = list(torch.randn(num_leaves, num_elements, generator=generator))
    expected = tree_sum(leaves, torch.add)
    inputs = fold.inputs_of(num_leaves, equal_shares(num_leaves, world_size))
    schedule = fold.schedule(inputs, num_leaves, num_elements, early=early)
    nodes = [node for own in inputs for node in own]
    sums = [
        tree_sum(leaves[node.index << node.level : (node.index + 1) << node.level], torch.add)
        for node in nodes
    ]
    assert all(same_bits(each, expected) for each in interpret(schedule, sums))
    network = Network(world_size, choose, at_once)
    totals = [torch.empty(num_elements) for _ in range(world_size)]

    def run(rank: int) -> None:
        """The early rounds by themselves, before the rest."""
        rounds = rounds_of_rank(schedule, rank)
        scratch = torch.full((scratch_elements(rounds),), torch.nan)
        early = [each for each in rounds if each.number < schedule.early_rounds]
        for part in (*([each] for each in early), rounds[len(early) :]):
            execute([piece(rank, part, scratch)])

    def piece(rank: int, rounds: list[RankRound], scratch: Tensor) -> PieceUnderWay:
        return PieceUnderWay(
            totals[rank],
            rounds,
            scratch,
            network.start(rank, 0),
            rank,
            at_once,
            inputs={number: sums[number].clone() for number in schedule.own_inputs(rank)},
            sum_inputs=lambda parts: sum_of_nodes(nodes, parts, num_leaves, Tensor.add_),
        )

    network.run([partial(run, rank) for rank in range(world_size)])
    assert all(same_bits(total, expected) for total in totals)
