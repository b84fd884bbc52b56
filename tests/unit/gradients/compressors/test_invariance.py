"""The same bits for any number of ranks, any buckets, and a change of both half-way."""

import math

import pytest
import torch
from torch import Tensor

from firecaffe.gradients.compressors import COMPRESSORS, make_compressor
from tests.unit.gradients.compressors.local_wire import (
    LocalWire,
    flatten,
    make_layouts,
    run_ranks,
    tree_sum,
    unflatten,
)

NUM_NODES = 8
STEPS = 4
SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (12, 5, 3, 3),
    "norm": (12,),
    "fc": (40, 33),
    "scalar": (),
    "one": (1,),
    "bias": (300,),
    "dead": (10, 70),
    "empty": (0, 4),
}
ONE_BUCKET = [list(SHAPES)]
BUCKETS = [["empty", "dead", "one"], ["bias"], ["scalar", "fc", "norm", "conv"]]

Result = tuple[list[dict[str, Tensor]], dict[str, Tensor]]
"""The totals of each step and the state of all ranks in the end."""


def gradient(step: int, node: int) -> dict[str, Tensor]:
    """Magnitudes over many powers of two, so that every order of additions has its own bits."""
    generator = torch.Generator().manual_seed(1000 * step + node)
    values = {}
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        spread = torch.exp(2 * torch.randn(size, generator=generator))
        values[name] = spread * torch.randn(size, generator=generator)
    values["dead"][:] = 0
    return values


def run(
    name: str,
    world_size: int,
    buckets: list[list[str]] = ONE_BUCKET,
    steps: range = range(STEPS),
    start: dict[str, Tensor] | None = None,
) -> Result:
    layouts = make_layouts(SHAPES, buckets)

    def on_rank(wire: LocalWire) -> Result:
        compressor = make_compressor(name, layouts)
        if start is not None:
            compressor.load_state(start, wire.own_nodes)
        totals: list[dict[str, Tensor]] = []
        for step in steps:
            totals.append({})
            for bucket, layout in enumerate(layouts):
                nodes = [(n, flatten(layout, gradient(step, n))) for n in wire.own_nodes]
                totals[-1].update(unflatten(layout, compressor.reduce(bucket, nodes, wire)))
        return totals, compressor.state()

    results = run_ranks(world_size, NUM_NODES, on_rank)
    for totals, _ in results[1:]:
        assert all(map(same, totals, results[0][0]))
    state: dict[str, Tensor] = {}
    for _, of_rank in results:
        for key, value in of_rank.items():
            assert key not in state or (key.startswith("q.") and torch.equal(state[key], value))
            state[key] = value
    return results[0][0], state


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Names and bits."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one
    )


@pytest.fixture(scope="module", params=COMPRESSORS)
def on_one_rank(request: pytest.FixtureRequest) -> tuple[str, Result]:
    return request.param, run(request.param, 1)


@pytest.mark.parametrize(
    ("world_size", "buckets"),
    [(2, ONE_BUCKET), (3, ONE_BUCKET), (4, BUCKETS), (8, ONE_BUCKET)],
)
def test_ranks_and_buckets_change_no_bit(
    on_one_rank: tuple[str, Result], world_size: int, buckets: list[list[str]]
) -> None:
    name, (totals, state) = on_one_rank
    other_totals, other_state = run(name, world_size, buckets)
    assert all(map(same, totals, other_totals))
    assert same(state, other_state)


@pytest.mark.parametrize("worlds", [(1, 4, 2), (4, 3, 1)])
def test_ranks_may_change_half_way(
    on_one_rank: tuple[str, Result], worlds: tuple[int, int, int]
) -> None:
    name, (totals, state) = on_one_rank
    first, second, third = worlds
    early, after_two = run(name, first, ONE_BUCKET, range(2))
    middle, after_three = run(name, second, BUCKETS, range(2, 3), after_two)
    late, after_all = run(name, third, ONE_BUCKET, range(3, STEPS), after_three)
    assert all(map(same, totals, [*early, *middle, *late]))
    assert same(state, after_all)


def test_memory_enters(on_one_rank: tuple[str, Result]) -> None:
    """Or the tests above would pass with a state that nobody reads."""
    name, (totals, _) = on_one_rank
    late, _ = run(name, 1, ONE_BUCKET, range(3, STEPS))
    assert same(totals[3], late[0]) == (name in ("float16", "bfloat16"))


def test_the_order_of_additions_shows_in_these_gradients() -> None:
    """Or the tests above would pass with any order."""
    nodes = [gradient(0, node)["conv"] for node in range(NUM_NODES)]
    in_sequence = torch.zeros_like(nodes[0])
    for node in nodes:
        in_sequence += node
    assert not torch.equal(tree_sum(nodes), in_sequence)
