"""What goes between layouts: against the volumes' formulas, the schedules that run, and cells."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from firecaffe.exchange.collectives import find_collective
from firecaffe.exchange.schedule import ALL_GATHER, REDUCE_SCATTER
from firecaffe.parallel.volumes import Sizes, by_both, by_inputs, by_outputs, sum_numbers
from firecaffe.plan.between import Boundary, Exchanges, boundary
from firecaffe.plan.cluster import Link
from firecaffe.plan.layouts import Form, Layout, layouts_of
from firecaffe.plan.network import Network
from firecaffe.plan.round_prices import EqualRounds, rounds_of, rounds_s

FLAT = (Link("flat", 1e-5, 1e9, addition_s_per_byte=1e-10),)
NODES = (Link("inside", 2e-6, 1e10, group=4), Link("outside", 1e-5, 1e9, ports=2))
QUADS = (*NODES[:1], Link("across", 3e-6, 5e9, group=8, ports=4), Link("outside", 1e-5, 1e9))


def exchanges(workers: int, links: tuple[Link, ...] = FLAT) -> Exchanges:
    return Exchanges(Network(links, workers))


def sent(found: Boundary) -> float:
    """Of each worker, as a share of the whole batch's tensor."""
    return float(sum(each.share.sum() for each in (*found.sums, *found.fetches)))


@pytest.mark.parametrize(("batch", "model"), [(1, 4), (2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("word", ["outputs", "inputs", "groups"])
def test_a_layer_by_itself_sends_what_the_formulas_say(batch: int, model: int, word: str) -> None:
    """In rows that hold its input whole, and want its output so."""
    formula: Callable[[Sizes, int], float]
    split, formula = {
        "outputs": (Layout(batch, outputs=model), by_outputs),
        "inputs": (Layout(batch, inputs=model), by_inputs),
        "groups": (Layout(batch, groups=model), by_both),
    }[word]
    whole = Layout(batch, copies=model)
    size = Sizes(0, 1000, 600, 1000, 600, input_has_gradient=True)
    into = boundary(exchanges(batch * model), whole, split)
    out = boundary(exchanges(batch * model), split, whole)
    numbers = 1000 * sent(into) + 600 * sent(out)
    assert batch * numbers == pytest.approx(formula(size, model))


def test_samples_are_gathered_in_rows_and_their_gradients_summed() -> None:
    """One weird trick: 8 workers in rows of 4, from an eighth of the batch to half of it."""
    found = boundary(exchanges(8), Layout(8), Layout(2, outputs=4))
    assert [each.share[0] for each in found.fetches] == pytest.approx([3 / 4 / 2, 0])
    assert [each.share[0] for each in found.sums] == pytest.approx([3 / 4 / 2])


def test_samples_go_to_parts_of_all() -> None:
    """Before a layer that is cut by inputs, each needs a quarter of the others' samples."""
    found = boundary(exchanges(4), Layout(4), Layout(1, inputs=4))
    assert not found.sums
    assert [each.share[0] for each in found.fetches] == pytest.approx([3 / 16, 3 / 16])


def test_neurons_then_inputs_send_nothing() -> None:
    found = boundary(exchanges(4), Layout(1, outputs=4), Layout(1, inputs=4))
    assert sent(found) == 0


def test_layers_cut_in_turn_sum_within_a_node() -> None:
    """4 nodes of 8, as PaSE cuts fc1 and fc2: both sums between them are of a node's workers."""
    first = Layout(1, outputs=4, inputs=8, inputs_inside=True)
    for second, is_inside in ((Layout(1, 8, 4), True), (first, False)):
        found = boundary(exchanges(32, (replace(NODES[0], group=8), NODES[1])), first, second)
        outside = sum(each.share[1] for each in (*found.sums, *found.fetches))
        assert (outside == 0) == is_inside


def test_the_first_layer_wants_no_gradient() -> None:
    pair = Layout(1, copies=4), Layout(1, outputs=4)
    assert sent(boundary(exchanges(4), *pair)) == pytest.approx(sum_numbers(4, 1))
    assert sent(boundary(exchanges(4), *pair, has_gradient=False)) == 0


@pytest.mark.parametrize("links", [FLAT, NODES, QUADS])
@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_a_gathering_takes_what_its_schedule_does(links: tuple[Link, ...], workers: int) -> None:
    """Among all workers: the rounds of the exchanges that a split layer runs."""
    found = exchanges(workers, links)
    numbers = 3 * 2**10
    have, need = Form((), ((1, workers),)), Form()
    network = Network(links, workers)
    schedule = partial(find_collective(ALL_GATHER, "sharded_parameter_server"), workers)
    taken_s = found.seconds([found.fetch(have, need)], 4 * numbers, 1)
    assert taken_s == pytest.approx(rounds_s(rounds_of(schedule(numbers)), network))
    schedule = partial(find_collective(REDUCE_SCATTER, "sharded_parameter_server"), workers)
    taken_s = found.seconds([found.sums((1, workers), Form())], 4 * numbers, 1)
    assert taken_s == pytest.approx(rounds_s(rounds_of(schedule(numbers)), network))


@pytest.mark.parametrize("workers", [4, 6, 8])
def test_what_is_lacking_cell_by_cell(workers: int) -> None:
    """All forms of all layouts, against sets of the cells of a grid."""
    found = exchanges(workers)
    forms = {form for each in layouts_of(workers, workers) for form in (each.takes, each.makes)}
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
        assert found.fetch(have, need).share.sum() == pytest.approx(max(lacking) / side**2)


def test_what_several_have_comes_from_the_nearest() -> None:
    """Two nodes of four, each of which has everything: nothing leaves a node."""
    found = exchanges(8, NODES).fetch(Form((), ((1, 4),)), Form())
    assert found.share.tolist() == pytest.approx([3 / 4, 0])
    assert found.messages.tolist() == [3, 0]


@pytest.mark.parametrize("links", [FLAT, NODES, QUADS])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_sets_of_ranks_that_exchange_at_once(links: tuple[Link, ...], stride: int) -> None:
    """A round of neighbours in every set, priced on the whole network and in one set."""
    network = Network(links, 16)
    count = 16 // stride
    source = np.arange(count)
    elements, adds = np.full(count, 10**6), np.ones(count, dtype=bool)
    one = EqualRounds(1, source, (source + 1) % count, elements, adds)
    ranks = stride * source[:, None] + np.arange(stride)
    to = stride * ((source + 1) % count)[:, None] + np.arange(stride)
    all_sets = EqualRounds(
        1, ranks.ravel(), to.ravel(), np.full(16, 10**6), np.ones(16, dtype=bool)
    )
    if count > 1:
        alone_s = rounds_s(iter([one]), network.strided(stride))
        assert alone_s == pytest.approx(rounds_s(iter([all_sets]), network))


def test_sets_must_fill_groups_or_divide_them() -> None:
    assert Network(NODES, 12).strided(1).links == NODES
    with pytest.raises(ValueError, match="3 ranks in a row, and inside joins 4"):
        Network(NODES, 12).strided(3)
    assert [link.group for link in Network(QUADS, 32).strided(2).links] == [2, 4, 0]
    assert [link.name for link in Network(QUADS, 32).strided(8).links] == ["outside"]


def test_a_slower_link_makes_what_goes_over_it_slower() -> None:
    slow = (NODES[0], replace(NODES[1], bandwidth_bytes_per_s=5e8))
    pair = Layout(8), Layout(1, outputs=8)
    found = [boundary(exchanges(8, links), *pair) for links in (NODES, slow)]
    times = [
        exchanges(8, links).seconds(each.fetches, 8e9, 1)
        for links, each in zip((NODES, slow), found, strict=True)
    ]
    assert times[1] == pytest.approx(2 * times[0], rel=1e-3)
