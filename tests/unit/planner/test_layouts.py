"""What goes between layouts: against the volumes' formulas, the schedules that run, and cells; the
cheapest ones by hand, against every assignment, and against a published plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from firecaffe.exchange.collectives import find_collective
from firecaffe.exchange.schedule import ALL_GATHER, REDUCE_SCATTER
from firecaffe.models import ModelConfig
from firecaffe.parallel.volumes import Sizes, by_both, by_inputs, by_outputs, sum_numbers
from firecaffe.planner.boundary_cost import Boundary, Exchanges, boundary
from firecaffe.planner.chain import Unit, chain_of
from firecaffe.planner.cluster import Cluster, Device, Link
from firecaffe.planner.layouts import Form, LayerLayout, allows, layouts_of
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.round_prices import EqualRounds, rounds_of, rounds_s
from firecaffe.planner.simulate import Network
from firecaffe.planner.split_plans import (
    best_layouts,
    boundary_costs,
    cheapest,
    costs_by_layout,
    data_layouts,
    dense_layouts,
    possible,
)
from firecaffe.planner.split_step import SplitCost
from firecaffe.planner.workload import LayerWork, Workload, images_of

FLAT = (Link("flat", 1e-5, 1e9, addition_s_per_byte=1e-10),)
NODES = (Link("inside", 2e-6, 1e10, group=4), Link("outside", 1e-5, 1e9, ports=2))
QUADS = (*NODES[:1], Link("across", 3e-6, 5e9, group=8, ports=4), Link("outside", 1e-5, 1e9))


def exchanges(workers: int, links: tuple[Link, ...] = FLAT) -> Exchanges:
    return Exchanges(Network(links, workers))


def sent(found: Boundary) -> float:
    """Of each worker, as a share of the whole batch's tensor."""
    return float(sum(each.share.sum() for each in found.traffics))


@pytest.mark.parametrize(("batch", "model"), [(1, 4), (2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("word", ["outputs", "inputs", "groups"])
def test_a_layer_by_itself_sends_what_the_formulas_say(batch: int, model: int, word: str) -> None:
    """In rows that hold its input whole, and want its output so."""
    formula = {"outputs": by_outputs, "inputs": by_inputs, "groups": by_both}[word]
    parts: Any = {word: model}
    split, whole = LayerLayout(batch, **parts), LayerLayout(batch, copies=model)
    size = Sizes(0, 1000, 600, 1000, 600, input_has_gradient=True)
    into = boundary(exchanges(batch * model), whole, split)
    out = boundary(exchanges(batch * model), split, whole)
    numbers = 1000 * sent(into) + 600 * sent(out)
    assert batch * numbers == pytest.approx(formula(size, model))


def test_samples_are_gathered_in_rows_and_their_gradients_summed() -> None:
    """One weird trick: 8 workers in rows of 4, from an eighth of the batch to half of it."""
    between = boundary(exchanges(8), LayerLayout(8), LayerLayout(2, outputs=4))
    assert [fetch.share[0] for fetch in between.fetches] == pytest.approx([3 / 4 / 2, 0])
    assert [part.share[0] for part in between.sums] == pytest.approx([3 / 4 / 2])
    # Before a layer that is cut by inputs, each needs a quarter of the others' samples.
    between = boundary(exchanges(4), LayerLayout(4), LayerLayout(1, inputs=4))
    assert not between.sums
    assert [fetch.share[0] for fetch in between.fetches] == pytest.approx([3 / 16, 3 / 16])
    # Neurons, then inputs, send nothing; and nobody wants the gradient of the images.
    assert sent(boundary(exchanges(4), LayerLayout(1, outputs=4), LayerLayout(1, inputs=4))) == 0
    first = LayerLayout(1, copies=4), LayerLayout(1, outputs=4)
    assert sent(boundary(exchanges(4), *first)) == pytest.approx(sum_numbers(4, 1))
    assert sent(boundary(exchanges(4), *first, has_gradient=False)) == 0


def test_layers_cut_in_turn_sum_within_a_node() -> None:
    """4 nodes of 8, as PaSE cuts fc1 and fc2: both sums between them are of a node's workers."""
    first = LayerLayout(1, outputs=4, inputs=8, inputs_inside=True)
    for second, is_inside in ((LayerLayout(1, 8, 4), True), (first, False)):
        found = boundary(exchanges(32, (replace(NODES[0], group=8), NODES[1])), first, second)
        outside = sum(each.share[1] for each in found.traffics)
        assert (outside == 0) == is_inside


@pytest.mark.parametrize("links", [FLAT, NODES, QUADS])
def test_a_gathering_takes_what_its_schedule_does(links: tuple[Link, ...]) -> None:
    """Among all workers: the rounds of the exchanges that a split layer runs."""
    numbers = 3 * 2**10
    for workers in (2, 4, 8, 16):
        on = exchanges(workers, links)
        for kind, moved in (
            (ALL_GATHER, on.fetch(Form((), ((1, workers),)), Form())),
            (REDUCE_SCATTER, on.sums((1, workers), Form())),
        ):
            schedule = find_collective(kind, "sharded_parameter_server")(workers, numbers)
            expected_s = rounds_s(rounds_of(schedule), Network(links, workers))
            assert on.price([moved], 4 * numbers, 1).seconds == pytest.approx(expected_s)


@pytest.mark.parametrize("workers", [4, 6, 8])
def test_what_is_lacking_cell_by_cell(workers: int) -> None:
    """All forms of all layouts, against sets of the cells of a grid."""
    on = exchanges(workers)
    layouts = layouts_of(workers, workers)
    forms = {form for layout in layouts for form in (layout.takes, layout.makes)}
    side = 24

    def cells(form: Form, rank: int) -> set[tuple[int, ...]]:
        spans = []
        for digits in (form.samples, form.channels):
            index, count = 0, 1
            for stride, size in digits:
                index, count = index * size + rank // stride % size, count * size
            spans.append(range(side * index // count, side * (index + 1) // count))
        return {*product(*spans)}

    for have, need in product(forms, forms):
        lacking = [len(cells(need, r) - cells(have, r)) for r in range(workers)]
        assert on.fetch(have, need).share.sum() == pytest.approx(max(lacking) / side**2)
    # Of two nodes of four each has everything: nothing leaves a node.
    nearest = exchanges(8, NODES).fetch(Form((), ((1, 4),)), Form())
    assert nearest.share.tolist() == pytest.approx([3 / 4, 0])
    assert nearest.messages.tolist() == [3, 0]


@pytest.mark.parametrize("links", [FLAT, NODES, QUADS])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_sets_of_ranks_that_exchange_at_once(links: tuple[Link, ...], stride: int) -> None:
    """A round of neighbours in every set, priced on the whole network and in one set."""

    def round_of(source: np.ndarray, to: np.ndarray) -> EqualRounds:
        elements, adds = np.full(source.size, 10**6), np.ones(source.size, dtype=bool)
        return EqualRounds(1, source.ravel(), to.ravel(), elements, adds)

    network = Network(links, 16)
    source = np.arange(16 // stride)
    to = (source + 1) % source.size
    in_sets = (stride * ranks[:, None] + np.arange(stride) for ranks in (source, to))
    alone_s = rounds_s(iter([round_of(source, to)]), network.strided(stride))
    assert alone_s == pytest.approx(rounds_s(iter([round_of(*in_sets)]), network))


def test_sets_must_fill_groups_or_divide_them() -> None:
    assert Network(NODES, 12).strided(1).links == NODES
    with pytest.raises(ValueError, match="3 ranks in a row, and inside joins 4"):
        Network(NODES, 12).strided(3)
    assert [link.group for link in Network(QUADS, 32).strided(2).links] == [2, 4, 0]
    assert [link.name for link in Network(QUADS, 32).strided(8).links] == ["outside"]


DEVICE = Device("d", 1e10, 1e15, {"float32": 1e10}, efficiency=1.0, overhead_s=0.0)
FLAT_CLUSTER = Cluster("flat", "", DEVICE, 1, (Link("flat", 0.0, 1e9),))


def dense(name: str, inputs: int, outputs: int) -> Unit:
    work = LayerWork(
        name,
        2.0 * inputs * outputs,
        4.0 * (inputs + outputs),
        4.0 * inputs * outputs,
        ((outputs, inputs),),
        output_bytes=4.0 * outputs,
        kept_bytes=4.0 * inputs,
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
    return SplitCost(work, FLAT_CLUSTER, chain, workers, "ring")


def test_two_layers_by_hand() -> None:
    """A layer of few weights for many activations, and one of many weights for few."""
    wide, thin = dense("thin", 64, 64), dense("wide", 64, 4096)
    cost = cost_of([wide, thin], 2, batch=256)
    whole = 4 * 256 * 64
    data = cost.step([LayerLayout(2)] * 3)
    assert data.activations_s == 0
    assert data.gradients_bytes == 4 * (64 * 64 + 64 * 4096)  # 2 (2 - 1) / 2 of all
    split = cost.step([LayerLayout(2), LayerLayout(1, inputs=2), LayerLayout(2)])
    # Samples of each to a half of each and back; addends of 4096 outputs summed, and gathered.
    between = 2 * whole / 4 + (4 * 256 * 4096) / 2 + (4 * 256 * 4096) / 2
    assert split.activations_bytes == pytest.approx(between)
    assert split.activations_s == pytest.approx(between / 1e9)
    assert split.gradients_bytes == 4 * 64 * 64
    few = cost_of([wide, thin], 2, batch=2)
    assert best_layouts(cost) == [LayerLayout(2)] * 3
    assert best_layouts(few)[1] != LayerLayout(2)


def total(own: Sequence[Any], between: Sequence[Any], chosen: Sequence[int]) -> float:
    """What layers cost by themselves and between them, with these layouts."""
    alone = sum(costs[index] for costs, index in zip(own, chosen, strict=True))
    ways = zip(between, pairwise(chosen), strict=True)
    return float(alone + sum(costs[pair] for costs, pair in ways))


def test_the_dynamic_program_against_every_choice() -> None:
    draws = np.random.default_rng(1)
    for _ in range(20):
        own = [draws.random(3) for _ in range(4)]
        own[1][0] = np.inf
        between = [draws.random((3, 3)) for _ in range(3)]
        best = min(product(range(3), repeat=4), key=partial(total, own, between))
        found, chosen = cheapest(own, between)
        assert tuple(chosen) == best
        assert found == pytest.approx(total(own, between, best))


@pytest.mark.parametrize("workers", [2, 4])
def test_costs_of_the_search_are_those_of_the_step(workers: int) -> None:
    """Every assignment of two layers and the loss, one by one."""
    cost = cost_of([dense("a", 24, 48), dense("b", 48, 8)], workers, batch=32)
    layouts = possible(cost)
    computes, gradients = costs_by_layout(cost, layouts)
    between = boundary_costs(cost, layouts)
    costs = []
    for chosen in product(range(len(layouts)), repeat=3):
        own = [layouts[index] for index in chosen]
        if not all(allows(*pair) for pair in zip(cost.chain, own, strict=True)):
            assert not np.isfinite(sum(computes[at][index] for at, index in enumerate(chosen)))
            continue
        step = cost.step(own)
        computed_s = sum(computes[at][index] for at, index in enumerate(chosen))
        sent_s = total(computes, between, chosen) - computed_s
        most = max(each.batch for each in own)  # which the search does not know
        pairs = zip(cost.chain, own, strict=True)
        apart_s = sum(cost.apart_s(*each, most) for each in pairs)
        assert step.compute_s == pytest.approx(computed_s + apart_s)
        assert step.activations_s == pytest.approx(sent_s)
        costs.append(computed_s + sent_s + sum(gradients[at][i] for at, i in enumerate(chosen)))
    own_s = [a + b for a, b in zip(computes, gradients, strict=True)]
    assert cheapest(own_s, between)[0] == pytest.approx(min(costs))


PASE = [
    *[LayerLayout(32)] * 4,
    LayerLayout(16, inputs=2),
    LayerLayout(1, outputs=4, inputs=8, inputs_inside=True),
    LayerLayout(1, outputs=8, inputs=4),
    LayerLayout(1, outputs=4, inputs=8, inputs_inside=True),
    LayerLayout(4, copies=8),
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
    computes, gradients = costs_by_layout(cost, layouts)
    between = boundary_costs(cost, layouts)
    own = [a + b for a, b in zip(computes, gradients, strict=True)]
    assert cheapest(own, between)[0] <= total(own, between, [layouts.index(e) for e in PASE])
    ours = cost.step(best_layouts(cost)).step_s
    assert ours <= cost.step(PASE).step_s
    is_better = cost.step(PASE).step_s < cost.step(data_layouts(cost)).step_s
    assert is_better == (batch == 128)


def test_the_best_is_no_slower_than_what_it_begins_with() -> None:
    cost = four_nodes(1250)
    named = [layouts for _, layouts in dense_layouts(cost, is_trick=True)]
    best = cost.step(best_layouts(cost, named)).step_s
    assert best <= min(cost.step(each).step_s for each in named)
