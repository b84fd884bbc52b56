"""The reducer: when buckets leave, who starts their exchange, and what becomes of failures. Its
sums are of tests/parity.
"""

import threading
import time
import weakref
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from firecaffe.cluster.group import ORDERED, Group
from firecaffe.cluster.world import World
from firecaffe.errors import RecipeError
from firecaffe.exchange.route import find_route
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.gradients.threads import ExchangeThreads
from firecaffe.gradients.totals import covered_s
from firecaffe.training.updates.part_sums import PartSums
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.queue import Queue

WAIT_S = 300.0


class RecordingExchange(Exchange):
    """Stands in for two ranks; notes which vectors were exchanged, by length."""

    def __init__(self) -> None:
        super().__init__(World(0, 2, torch.device("cpu")), find_route("tree", 2, 2))
        self.lengths: list[int] = []
        self.happened = threading.Event()

    def all_reduce(self, vector: Tensor, lane: int = 0, divide_by: int = 1) -> None:
        self.lengths.append(vector.numel())
        self.happened.set()


def zero_counts() -> Tensor:
    return torch.zeros(1)


def alone() -> Exchange:
    return Exchange.of_vectors(World(0, 1, torch.device("cpu")), "tree")


def make_reducer(
    model: nn.Module,
    exchange: Exchange,
    order: list[int],
    codec: str = "",
    num_leaves: int = 2,
    ranks: int = 2,
    tail: int = 0,
) -> GradientReducer:
    exchange.route = find_route("tree", num_leaves, ranks, codec=codec)
    named, tails = dict(model.named_parameters()), [torch.zeros(tail)] if tail else []
    counts = torch.zeros(1)
    return GradientReducer(named, order, tails, counts, num_leaves, exchange, bucket_bytes=1)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False))


def test_a_bucket_is_exchanged_while_backward_still_runs() -> None:
    """Backward of the first layer waits until the last layer's gradients have been exchanged."""
    first, second = model = two_layers()
    exchange = RecordingExchange()
    reducer = make_reducer(model, exchange, [1, 0])

    def wait(_: Tensor) -> None:
        assert exchange.happened.wait(WAIT_S), "no bucket left before backward was over"
        assert exchange.lengths == [5 * 7 + 1]  # padded to a multiple of two ranks

    reducer.begin_step(1.0, [0], zero_counts)
    hidden = first(torch.ones(1, 3))
    hidden.register_hook(wait)
    reducer.add(0, second(hidden).sum(), [])
    reducer.finish_step()
    reducer.close()
    assert exchange.lengths == [36, 16, 4]  # the tail last: two parameters used, and one number


def test_buckets_leave_in_one_order_whatever_is_ready_first() -> None:
    model, exchange = two_layers(), RecordingExchange()
    reducer = make_reducer(model, exchange, [0, 1])  # not the order of backward
    reducer.begin_step(1.0, [0], zero_counts)
    reducer.add(0, model(torch.ones(1, 3)).sum(), [])
    reducer.finish_step()
    reducer.close()
    assert exchange.lengths == [16, 36, 4]


def test_a_tail_of_its_own_goes_before_the_last_gradients() -> None:
    """Behind them its few bytes would wait in the queues of a slow network."""
    reducer = make_reducer(two_layers(), alone(), [1, 0], "int8")
    counts = 2
    assert [bucket.members for bucket in reducer.buckets] == [(1,), (counts,), (0,)]
    reducer.close()


def test_a_share_that_is_no_subtree_is_summed_in_tree_order() -> None:
    """Leaves 1 to 4 of 8, which a ring's worker may hold: 1 + ((2 + 3) + 4)."""
    big = 2.0**25  # one less or one more is no float32
    layer = nn.Linear(1, 1, bias=False)
    reducer = make_reducer(layer, RecordingExchange(), [0], num_leaves=8)
    gradients = {1: 1.0, 2: big, 3: 0.0, 4: -big}
    reducer.begin_step(1.0, list(gradients), zero_counts)
    for leaf, gradient in gradients.items():
        reducer.add(leaf, layer(torch.full((1, 1), gradient)).sum(), [])
    reducer.finish_step()
    reducer.close()
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 1.0


@pytest.mark.parametrize("codec", ["", "int8"])
def test_gradients_become_means_and_a_tail_stays_a_sum(codec: str) -> None:
    """Two micro-batches of weight 2 each: whoever reads a tail divides it by what it counts."""
    layer = nn.Linear(1, 1, bias=False)
    reducer = make_reducer(layer, alone(), [0], codec, ranks=1, tail=2)
    reducer.begin_step(4.0, [0, 1], lambda: torch.tensor([3.0]))
    reducer.add(0, layer(torch.full((1, 1), 6.0)).sum(), [torch.tensor([1.0, 2.0])])
    reducer.add(1, layer(torch.full((1, 1), 2.0)).sum(), [torch.tensor([10.0, 20.0])])
    totals = reducer.finish_step()
    reducer.close()
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 2.0
    assert [part.tolist() for part in totals.tail] == [[11.0, 22.0]]
    assert totals.counts.tolist() == [3.0]


class OneLaneFails(RecordingExchange):
    """One lane waits for a rank that will not come, the other one meets an error."""

    def all_reduce(self, vector: Tensor, lane: int = 0, divide_by: int = 1) -> None:
        if lane == 0:
            self.happened.wait()
        raise ConnectionError("the cable is out")

    @property
    def lanes(self) -> int:
        return 2


def test_a_lane_that_fails_is_heard_while_another_waits() -> None:
    """In finish_step, or in the middle of backward where that goes on for long."""
    exchange = OneLaneFails()
    first, *others = layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    reducer = make_reducer(layers, exchange, [2, 1, 0])
    reducer.begin_step(1.0, [0], zero_counts)
    hidden = first(torch.ones(1, 2))
    hidden.register_hook(lambda _: wait_for_failure(reducer))
    with pytest.raises(ConnectionError, match="the cable is out"):
        reducer.add(0, nn.Sequential(*others)(hidden).sum(), [])
    with pytest.raises(ConnectionError, match="the cable is out"):
        reducer.finish_step()
    exchange.happened.set()
    reducer.close()


def wait_for_failure(reducer: GradientReducer) -> None:
    until = time.monotonic() + WAIT_S
    assert reducer._threads is not None
    while all(lane.failure is None for lane in reducer._threads._lanes):
        assert time.monotonic() < until, "no thread has failed"
        time.sleep(0.001)


def test_closing_leaves_no_hook() -> None:
    model, exchange = nn.Linear(2, 2), RecordingExchange()
    make_reducer(model, exchange, [0, 1]).close()
    model(torch.ones(1, 2)).sum().backward()
    assert exchange.lengths == []


def test_a_gradient_that_comes_in_parts_is_refused() -> None:
    """Reentrant checkpoints run backward inside backward: a gradient is there before it is done."""
    layer, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)
    reducer = make_reducer(nn.Sequential(layer, last), RecordingExchange(), [1, 0])
    reducer.begin_step(1.0, [0], zero_counts)
    hidden = torch.ones(1, 4, requires_grad=True)
    for _ in range(2):
        hidden = checkpoint(lambda x: last(layer(x)).expand(1, 4), hidden, use_reentrant=True)
    with pytest.raises(RecipeError, match="use_reentrant=False"):
        reducer.add(0, hidden.sum(), [])
    reducer.close()


def test_what_is_finite_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with parts of layers puts those of whole tensors and of parts together."""
    device = torch.device("meta")
    tail, counts = [torch.zeros(1, device=device)], torch.zeros(2, device=device)
    whole = GradientReducer({}, [], tail, counts, 1, alone(), bucket_bytes=1)
    part = nn.Parameter(torch.zeros(6, device=device))
    sums = PartSums({"part": part}, Group(0, 1, device), 1, (range(1),))
    sums.begin(None)
    sums.add([(0, {part: torch.ones(6, device=device)})])
    monkeypatch.setattr(Tensor, "tolist", lambda uses: [1.0] * len(uses))  # the device has none
    sums.finish(1.0)
    assert torch.cat([whole.finite(), sums.finite]).device == device


def test_time_that_two_exchanges_share_counts_once() -> None:
    assert covered_s([]) == 0
    assert covered_s([(5.0, 6.0), (0.0, 2.0), (1.0, 4.0), (1.5, 3.0)]) == 5.0


def test_gradients_that_are_in_the_buckets_are_let_go() -> None:
    """Each is as long as the weights, and would be there during the update and a checkpoint."""
    layer = nn.Linear(3, 2, bias=False)
    reducer = make_reducer(layer, alone(), [0], ranks=1, tail=1)
    made: list[weakref.ref[Tensor]] = []
    layer.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda parameter: made.append(weakref.ref(parameter.grad))
    )
    reducer.begin_step(2.0, [0, 1], zero_counts)
    reducer.add(0, layer(torch.ones(1, 3)).sum(), [torch.ones(1)])
    assert made[0]() is not None  # waits for its neighbor
    reducer.add(1, layer(torch.ones(1, 3)).sum(), [torch.ones(1)])
    reducer.finish_step()
    assert layer.weight.grad is not None
    assert layer.weight.grad.eq(1.0).all()
    assert [each() for each in made] == [None, None]
    reducer.close()


CPU = torch.device("cpu")


def threads_of(backend: str) -> ExchangeThreads:
    named = SimpleNamespace(name=lambda: backend)
    group = SimpleNamespace(_get_backend=lambda _: named)
    world = Group(0, 2, CPU, exchange_group=cast(ProcessGroup, group))
    return ExchangeThreads(world, 2, CPU, Queue())


@pytest.mark.parametrize("backend", [*ORDERED, "gloo"])
def test_a_backend_that_wants_one_order_has_that_of_the_program(backend: str) -> None:
    """In both lanes: what backward sends next comes after. Another goes on beside it, in order."""
    threads, here = threads_of(backend), threading.get_ident()
    may_go, calls = threading.Event(), list[tuple[int, bool]]()

    def exchange(number: int) -> None:
        is_here = threading.get_ident() == here
        assert is_here or may_go.wait(300)
        calls.append((number, is_here))

    for number in range(6):
        threads.submit(number, lambda number=number: exchange(number), [])  # type: ignore[misc]
        if backend in ORDERED:
            assert calls[-1] == (number, True)
    may_go.set()
    assert len(threads.finish()) == 6
    threads.close(wait=True)
    for lane in (0, 1):
        of_lane = [call for call in calls if call[0] % 2 == lane]
        assert of_lane == [(number, backend in ORDERED) for number in range(lane, 6, 2)]


@pytest.mark.parametrize("backend", [*ORDERED, "gloo"])
def test_an_error_is_told_at_the_end_of_the_step(backend: str) -> None:
    """Not in the middle of backward, and nothing is started in its lane after it."""
    threads, calls = threads_of(backend), list[int]()

    def fail() -> None:
        raise ArithmeticError("no luck")

    threads.submit(0, fail, [])
    threads.submit(2, lambda: calls.append(2), [])
    with pytest.raises(ArithmeticError, match="no luck"):
        threads.finish()
    threads.close(wait=True)
    assert not calls
