"""The cheapest layout of each layer of a chain, by a dynamic program.

What a unit costs depends on its layout, and what lies between two units on both of theirs; so the
cheapest way to a layout of a unit goes through the cheapest ways to those of the unit before it.
That sums of gradients hide behind backward is no such cost: so they are counted at a share of
their time, at several shares, and the layouts are taken whose step is the shortest.

Source: Jia et al. 2018 (Exploring Hidden Dimensions in Parallelizing CNNs), the case of a chain.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.exchange.route import FOLD
from firecaffe.plan.between import Boundary
from firecaffe.plan.held import micro_batches_of, nodes_of
from firecaffe.plan.layouts import Layout, allows, layouts_of
from firecaffe.plan.price import SIZES, rounds_only_s
from firecaffe.plan.split_step import SplitCost, sent_nodes, weights_bytes

Array = NDArray[np.float64]

EXPOSED = (1.0, 0.75, 0.5, 0.25)
"""Shares of the time of gradients that are counted."""

SHARDED = "sharded_parameter_server"
"""What `fold` is taken for: it sends its nodes in the same way."""

MOST_TRAFFICS = 4
"""Of a boundary: a sum and a fetch, there and back."""


def best_layouts(cost: SplitCost, first: Sequence[Sequence[Layout]] = ()) -> list[Layout]:
    """Those of the shortest step that is found. first: some to begin with."""
    layouts = possible(cost)
    computes, gradients = own_costs(cost, layouts)
    between = between_costs(cost, layouts)
    found = [list(each) for each in first]
    for exposed in EXPOSED:
        own = [a + exposed * b for a, b in zip(computes, gradients, strict=True)]
        chosen = [layouts[index] for index in cheapest(own, between)[1]]
        if chosen not in found:
            found.append(chosen)
    return min(found, key=lambda each: cost.step(each).step_s)


def cheapest(own: Sequence[Array], between: Sequence[Array]) -> tuple[float, list[int]]:
    """The least sum of costs, and the choice for each unit.

    own: for each unit the cost of each choice, shape (choices,); infinite if it cannot be.
    between: for each unit but the last, shape (choices, choices of the next one).
    """
    total, ways = own[0], []
    for costs, after in zip(between, own[1:], strict=True):
        through = total[:, None] + costs
        ways.append(through.argmin(0))
        total = through.min(0) + after
    chosen = [int(total.argmin())]
    for way in reversed(ways):
        chosen.append(int(way[chosen[-1]]))
    return float(total.min()), chosen[::-1]


def possible(cost: SplitCost) -> list[Layout]:
    """Layouts that a unit of the chain may have, if rows fill groups of links or divide them."""
    found = []
    for each in layouts_of(cost.workers, cost.work.num_micro_batches):
        try:
            cost.prices(each.model)
        except ValueError:
            continue
        if any(allows(unit, each) for unit in cost.chain):
            found.append(each)
    return found


def own_costs(cost: SplitCost, layouts: Sequence[Layout]) -> tuple[list[Array], list[Array]]:
    """Seconds of each unit in each layout: of computing and of halos, infinite if it cannot be, and
    of the sum of its gradients by itself, by its rounds. What is kept apart for each micro-batch
    is so where some layer's batch is shared by all workers, as convolutions mostly are.
    """
    shape, most = (len(cost.chain), len(layouts)), cost.workers
    computes, numbers = np.full(shape, np.inf), np.zeros(shape)
    apart = np.zeros(shape)
    for row, unit in enumerate(cost.chain):
        for column, layout in enumerate(layouts):
            if allows(unit, layout):
                computes[row, column] = cost.unit_s(unit, layout) + cost.halos(unit, layout)[0]
                sent = weights_bytes(unit, layout) * sent_nodes(nodes_of(layout, most))
                numbers[row, column] = sent / BYTES_PER_ELEMENT
                apart[row, column] = cost.apart_s(unit, layout, most)
    gradients = np.zeros(shape)
    for column, layout in enumerate(layouts):
        start_s, slope_s = _line(cost, layout.model)
        gradients[:, column] = np.where(
            numbers[:, column] > 0, start_s + slope_s * numbers[:, column], 0.0
        )
    return [*computes], [*(gradients + apart)]


def _line(cost: SplitCost, model: int) -> tuple[float, float]:
    """Seconds of a sum of no numbers, and of each number, by rounds one after the other."""
    prices = cost.prices(model)
    if prices.network.world_size == 1:
        return 0.0, 0.0
    name = SHARDED if prices.algorithm == FOLD else prices.algorithm
    few, many = (rounds_only_s(name, prices.network, size) for size in SIZES)
    slope_s = (many - few) / (SIZES[1] - SIZES[0])
    return max(0.0, few - slope_s * SIZES[0]), slope_s


def between_costs(cost: SplitCost, layouts: Sequence[Layout]) -> list[Array]:
    """Seconds between each unit and the next one, shape (layouts of it, layouts of the next)."""
    tables: dict[bool, tuple[Array, Array, Array]] = {}
    shares = np.array([micro_batches_of(cost.work, each) for each in layouts])
    rounds = np.minimum(shares[:, None], shares)[..., None]
    found = []
    for at, unit in enumerate(cost.chain[1:]):
        if unit.has_input_gradient not in tables:
            tables[unit.has_input_gradient] = _table(cost, layouts, unit.has_input_gradient)
        sizes = np.array([cost.size(at, each) for each in layouts])[:, None, None]
        table = tables[unit.has_input_gradient]
        found.append(cost.exchanges.seconds_of(*table, sizes, rounds).sum(-1))
    return found


def _table(
    cost: SplitCost, layouts: Sequence[Layout], has_gradient: bool
) -> tuple[Array, Array, Array]:
    """The traffics between all layouts: shapes (before, after, traffics, links), but the last
    (before, after, traffics).
    """
    n, links = len(layouts), len(cost.network.links)
    table = [np.zeros((n, n, MOST_TRAFFICS, *rest)) for rest in ((links,), (links,), ())]
    for i, before in enumerate(layouts):
        for j, after in enumerate(layouts):
            found: Boundary = cost.boundary(before, after, has_gradient)
            traffics = [*found.sums, *found.fetches]
            for k, each in enumerate(traffics):
                table[0][i, j, k], table[1][i, j, k] = each.messages, each.share
                table[2][i, j, k] = each.added
    return table[0], table[1], table[2]
