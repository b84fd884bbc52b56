"""The cheapest layouts: by hand, against every assignment, and against a published plan."""

from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from firecaffe.models.config import ModelConfig
from firecaffe.plan.chain import Unit, chain_of
from firecaffe.plan.cluster import Cluster, Device, Link
from firecaffe.plan.layouts import Layout, allows
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.split_plans import (
    best_layouts,
    between_costs,
    cheapest,
    data_layouts,
    dense_layouts,
    own_costs,
    possible,
)
from firecaffe.plan.split_step import SplitCost
from firecaffe.plan.workload import LayerWork, Workload, images_of

DEVICE = Device("d", 1e10, 1e15, {"float32": 1e10}, efficiency=1.0, overhead_s=0.0)
FLAT = Cluster("flat", "", DEVICE, 1, (Link("flat", 0.0, 1e9),))


def dense(name: str, inputs: int, outputs: int) -> Unit:
    work = LayerWork(
        name,
        2.0 * inputs * outputs,
        4.0 * (inputs + outputs),
        4.0 * inputs * outputs,
        ((outputs, inputs),),
        output_bytes=4.0 * outputs,
    )
    words = "neurons", "inputs"
    return Unit(name, (work,), inputs, outputs, outputs, inputs, words=words, is_dense=True)


def cost_of(units: list[Unit], workers: int, batch: int, micro: int = 1) -> SplitCost:
    """A chain of fully connected layers, and the loss."""
    works = tuple(work for unit in units for work in unit.works)
    layout = images_of((1, 1, int(units[0].inputs)))
    work = Workload("net", works, 0.0, layout, 0, batch, micro)
    first = replace(units[0], has_input_gradient=False)
    last = units[-1].outputs
    chain = (first, *units[1:], Unit("whole", (), last, last))
    return SplitCost(work, FLAT, chain, workers, "ring")


def test_two_layers_by_hand() -> None:
    """A layer of few weights for many activations, and one of many weights for few."""
    wide, thin = dense("thin", 64, 64), dense("wide", 64, 4096)
    cost = cost_of([wide, thin], 2, batch=256)
    whole = 4 * 256 * 64
    data = cost.step([Layout(2)] * 3)
    assert data.activations_s == 0
    assert data.gradients_bytes == 4 * (64 * 64 + 64 * 4096)  # 2 (2 - 1) / 2 of all
    split = cost.step([Layout(2), Layout(1, inputs=2), Layout(2)])
    # Samples of each to a half of each and back; addends of 4096 outputs summed, and gathered.
    between = 2 * whole / 4 + (4 * 256 * 4096) / 2 + (4 * 256 * 4096) / 2
    assert split.activations_bytes == pytest.approx(between)
    assert split.activations_s == pytest.approx(between / 1e9)
    assert split.gradients_bytes == 4 * 64 * 64
    few = cost_of([wide, thin], 2, batch=2)
    assert best_layouts(cost) == [Layout(2)] * 3
    assert best_layouts(few)[1] != Layout(2)


def test_the_dynamic_program_against_every_choice() -> None:
    draws = np.random.default_rng(1)
    for _ in range(20):
        own = [draws.random(3) for _ in range(4)]
        own[1][0] = np.inf
        between = [draws.random((3, 3)) for _ in range(3)]

        def total(chosen: tuple[int, ...], own=own, between=between) -> float:  # type: ignore[no-untyped-def]
            alone = sum(costs[index] for costs, index in zip(own, chosen, strict=True))
            ways = zip(between, pairwise(chosen), strict=True)
            return float(alone + sum(costs[pair] for costs, pair in ways))

        best = min(product(range(3), repeat=4), key=total)
        found, chosen = cheapest(own, between)
        assert tuple(chosen) == best
        assert found == pytest.approx(total(best))


@pytest.mark.parametrize("workers", [2, 4])
def test_costs_of_the_search_are_those_of_the_step(workers: int) -> None:
    """Every assignment of two layers and the loss, one by one."""
    cost = cost_of([dense("a", 24, 48), dense("b", 48, 8)], workers, batch=32)
    layouts = possible(cost)
    computes, gradients = own_costs(cost, layouts)
    between = between_costs(cost, layouts)
    costs = []
    for chosen in product(range(len(layouts)), repeat=3):
        own = [layouts[index] for index in chosen]
        if not all(allows(*pair) for pair in zip(cost.chain, own, strict=True)):
            assert not np.isfinite(sum(computes[at][index] for at, index in enumerate(chosen)))
            continue
        step = cost.step(own)
        computed_s = sum(computes[at][index] for at, index in enumerate(chosen))
        sent_s = sum(between[at][pair] for at, pair in enumerate(pairwise(chosen)))
        most = max(each.batch for each in own)  # which the search does not know
        pairs = zip(cost.chain, own, strict=True)
        apart_s = sum(cost.apart_s(*each, most) for each in pairs)
        assert step.compute_s == pytest.approx(computed_s + apart_s)
        assert step.activations_s == pytest.approx(sent_s)
        costs.append(computed_s + sent_s + sum(gradients[at][i] for at, i in enumerate(chosen)))
    own_s = [a + b for a, b in zip(computes, gradients, strict=True)]
    assert cheapest(own_s, between)[0] == pytest.approx(min(costs))


PASE = [
    *[Layout(32)] * 4,
    Layout(16, inputs=2),
    Layout(1, outputs=4, inputs=8, inputs_inside=True),
    Layout(1, outputs=8, inputs=4),
    Layout(1, outputs=4, inputs=8, inputs_inside=True),
    Layout(4, copies=8),
]
"""Elango 2021 at 32 GPUs: conv1 to conv4 by batch 32; conv5 batch 16 x input channels 2; fc1 and
fc3 neurons 4 x inputs 8, fc2 neurons 8 x inputs 4; softmax 4. In the order of digits that suits it:
what alternates is summed within a node."""


@cache
def four_nodes(num_outside: int, batch: int = 128) -> SplitCost:
    """AlexNet without groups on 4 nodes of 8 devices like a GTX 1080 Ti's; so many MB/s outside."""
    device = Device("d", 1.1e10, 4.84e11, {"float32": 1.1e13}, efficiency=0.4, overhead_s=1e-5)
    inside = Link("PCI Express 3", 1e-5, 8e9, group=8)
    links = (inside, Link("outside", 2e-6, 1e6 * num_outside))
    cluster = Cluster("nodes", "", device, 8, links)
    config = ModelConfig("alexnet_owt")
    work = workload_of_model(config, None, batch, batch // 32)
    return SplitCost(work, cluster, chain_of(config, work), 32, "halving_doubling")


@pytest.mark.parametrize(("num_outside", "batch"), [(1250, 128), (12500, 128), (6000, 4096)])
def test_no_dearer_than_the_published_plan(num_outside: int, batch: int) -> None:
    cost = four_nodes(num_outside, batch)
    assert len(cost.chain) == len(PASE)
    layouts = possible(cost)
    computes, gradients = own_costs(cost, layouts)
    between = between_costs(cost, layouts)
    own = [a + b for a, b in zip(computes, gradients, strict=True)]
    indices = [layouts.index(each) for each in PASE]
    published = sum(costs[index] for costs, index in zip(own, indices, strict=True))
    ways = zip(between, pairwise(indices), strict=True)
    published += sum(costs[pair] for costs, pair in ways)
    assert cheapest(own, between)[0] <= published
    ours = cost.step(best_layouts(cost)).step_s
    assert ours <= cost.step(PASE).step_s
    is_better = cost.step(PASE).step_s < cost.step(data_layouts(cost)).step_s
    assert is_better == (batch == 128)


def test_the_best_is_no_slower_than_what_it_begins_with() -> None:
    cost = four_nodes(1250)
    named = [layouts for _, layouts in dense_layouts(cost, is_trick=True)]
    best = cost.step(best_layouts(cost, named)).step_s
    assert best <= min(cost.step(each).step_s for each in named)
