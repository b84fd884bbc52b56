"""The executor over a network that is as unhelpful as a network may be.

A message moves only when both ends have posted it. From then on it may be written, and its send
may end, at any time and in any order. Until then the memory belongs to the network: what is to be
received holds no numbers and must not be touched, what is being sent must not change. Ranks are
threads of which one runs at a time, as far as it can; so a run is the same each time.
"""

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import Work

from firecaffe.exchange import (
    ALGORITHMS,
    ROOTED,
    double_tree,
    find_schedule,
    pipelined_tree,
)
from firecaffe.exchange.schedule import Schedule, Transfer, from_rounds, shards
from firecaffe.transport.execute import PeerMessage, PieceUnderWay, StartMessages, execute
from firecaffe.transport.interpret import interpret
from firecaffe.transport.rank_rounds import rounds_of_rank, scratch_elements

MakeSchedule = Callable[[int, int], Schedule]

SEGMENTED: dict[str, MakeSchedule] = {
    "pipelined_tree": partial(pipelined_tree.schedule, segment_elements=7),
    "double_tree": partial(double_tree.schedule, segment_elements=7),
}
FLAT = {**ALGORITHMS, **SEGMENTED}
HIERARCHICAL = [f"hierarchical({inner},{outer})" for inner in ROOTED for outer in ALGORITHMS]
SIZES = (3, 101)


class DeadlockError(Exception):
    """All ranks wait, and no message can move."""


class HazardError(Exception):
    """Memory was changed while the network had it."""


class StoppedError(Exception):
    """Ends a rank's thread."""


class Posting:
    """One end of a message, and its Work."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.done = False


class Call:
    """What one call of `StartMessages` posts."""

    def __init__(self, works: list[tuple[tuple[int, int, int], bool, Posting]]) -> None:
        self.works = works


class Network:
    """Moves messages in the order that `choose` says, given what kinds of event are possible."""

    def __init__(self, world_size: int, choose: Callable[[Sequence[str]], int], at_once: bool):
        self.choose = choose
        self.at_once = at_once
        self.sends: dict[tuple[int, int, int], deque[tuple[Posting, Tensor]]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, int], deque[Posting]] = defaultdict(deque)
        self.arriving: list[tuple[Posting, Tensor]] = []
        self.leaving: list[tuple[Posting, Tensor]] = []
        self.calls: list[deque[Call]] = [deque() for _ in range(world_size)]
        self.waits_for: list[Posting | None] = [None] * world_size
        self.may_run = [threading.Semaphore(0) for _ in range(world_size)]
        self.has_stopped = threading.Semaphore(0)
        self.posted: list[list[Posting]] = [[] for _ in range(world_size)]
        self.running = set(range(world_size))
        self.is_over = False
        self.errors: list[BaseException] = []

    def start(self, rank: int, tag: int) -> StartMessages:
        def start(messages: Sequence[PeerMessage]) -> list[Work]:
            call = Call(
                [
                    ((rank, peer, tag) if is_send else (peer, rank, tag), is_send, Posting(memory))
                    for is_send, peer, memory in messages
                ]
            )
            self.posted[rank] += [posting for *_, posting in call.works]
            if call.works and self.at_once:
                self.calls[rank].append(call)
                if len(self.calls[rank]) == 1:
                    self._post(call)
            else:
                self._post(call)
            return [cast(Work, Waiter(self, rank, posting)) for *_, posting in call.works]

        return start

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        """Runs the ranks to their ends.

        Raises: DeadlockError, HazardError.
        """
        threads = [
            threading.Thread(target=self._run_rank, args=(rank, program))
            for rank, program in enumerate(programs)
        ]
        for thread in threads:
            thread.start()
        try:
            while self.running and not self.errors:
                self._next_event()
        finally:
            self.is_over = True
            for semaphore in self.may_run:
                semaphore.release()
            for thread in threads:
                thread.join()
        if self.errors:
            raise self.errors[0]
        assert not any(self.sends.values())
        assert not any(self.receives.values())

    def wait(self, rank: int, posting: Posting) -> None:
        """Called by a rank's thread, which has nothing to do before the posting is done."""
        if self._is_done(rank, posting):
            return
        self.waits_for[rank] = posting
        self.has_stopped.release()
        self.may_run[rank].acquire()
        if self.is_over:
            raise StoppedError

    def _run_rank(self, rank: int, program: Callable[[], None]) -> None:
        self.may_run[rank].acquire()
        try:
            if not self.is_over:
                program()
                if not all(posting.done for posting in self.posted[rank]):
                    raise HazardError(f"rank {rank} ended while the network had its memory")
        except StoppedError:
            return
        except BaseException as error:
            self.errors.append(error)
        self.running.discard(rank)
        self.has_stopped.release()

    def _next_event(self) -> None:
        events: list[tuple[str, int]] = []
        for rank in sorted(self.running):
            posting = self.waits_for[rank]
            if posting is None or self._is_done(rank, posting):
                events.append(("run", rank))
        events += [("arrive", index) for index in range(len(self.arriving))]
        events += [("leave", index) for index in range(len(self.leaving))]
        if not events:
            waiting = ", ".join(map(str, sorted(self.running)))
            raise DeadlockError(f"ranks {waiting} wait for each other")
        kind, index = events[self.choose([kind for kind, _ in events])]
        if kind == "run":
            self.waits_for[index] = None
            self.may_run[index].release()
            self.has_stopped.acquire()
        elif kind == "arrive":
            posting, data = self.arriving.pop(index)
            if not posting.memory.isnan().all():
                raise HazardError("memory was written before what it was posted for arrived")
            posting.memory.copy_(data)
            posting.done = True
        else:
            posting, data = self.leaving.pop(index)
            if not same_bits(posting.memory, data):
                raise HazardError("memory was written before it was sent")
            posting.done = True
        if self.at_once:
            self._post_next_calls()

    def _post(self, call: Call) -> None:
        for channel, is_send, posting in call.works:
            if is_send:
                self.sends[channel].append((posting, posting.memory.clone()))
            else:
                posting.memory.fill_(torch.nan)
                self.receives[channel].append(posting)
            if self.sends[channel] and self.receives[channel]:
                sent, data = self.sends[channel].popleft()
                received = self.receives[channel].popleft()
                assert received.memory.shape == data.shape
                self.arriving.append((received, data))
                self.leaving.append((sent, data))

    def _post_next_calls(self) -> None:
        """A call is over as a whole, and the next one is not posted before."""
        for calls in self.calls:
            if calls and all(posting.done for *_, posting in calls[0].works):
                calls.popleft()
                if calls:
                    self._post(calls[0])

    def _is_done(self, rank: int, posting: Posting) -> bool:
        unfinished = (p for call in self.calls[rank] for *_, p in call.works)
        return posting.done and posting not in unfinished


class Waiter:
    """The part of a Work that the executor uses."""

    def __init__(self, network: Network, rank: int, posting: Posting) -> None:
        self.network, self.rank, self.posting = network, rank, posting

    def wait(self) -> None:
        self.network.wait(self.rank, self.posting)


def eager(kinds: Sequence[str]) -> int:
    """Everything as soon as it can be."""
    return max(range(len(kinds)), key=lambda i: (kinds[i] != "run", -i))


def lazy(kinds: Sequence[str]) -> int:
    """Ranks go as far as they can; then the newest arrives; sends end when nothing else can."""
    return max(range(len(kinds)), key=lambda i: (("leave", "arrive", "run").index(kinds[i]), i))


def receiver_last(kinds: Sequence[str]) -> int:
    """Sends end as soon as they can; nothing arrives before nothing else can happen."""
    return max(range(len(kinds)), key=lambda i: (("arrive", "run", "leave").index(kinds[i]), i))


def shuffled(seed: int) -> Callable[[Sequence[str]], int]:
    numbers = random.Random(seed)
    return lambda kinds: numbers.randrange(len(kinds))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@cache
def find(algorithm: str, ranks_per_node: int) -> MakeSchedule:
    return FLAT[algorithm] if algorithm in FLAT else find_schedule(algorithm, ranks_per_node)


def check(
    make: MakeSchedule,
    world_size: int,
    num_elements: int,
    num_pieces: int,
    choose: Callable[[Sequence[str]], int],
    at_once: bool = False,
) -> None:
    """All ranks end with the bits of the interpreter.

    Raises: DeadlockError, HazardError.
    """
    generator = torch.Generator().manual_seed(world_size)
    vectors = list(torch.randn(world_size, num_elements, generator=generator))
    held = [vector.clone() for vector in vectors]
    parts = shards(num_elements, num_pieces)
    schedules = [make(world_size, stop - start) for start, stop in parts]
    network = Network(world_size, choose, at_once)

    def pieces_of(rank: int) -> Iterator[PieceUnderWay]:
        for tag, ((start, stop), schedule) in enumerate(zip(parts, schedules, strict=True)):
            rounds = rounds_of_rank(schedule, rank)
            scratch = torch.full((scratch_elements(rounds),), torch.nan)
            part = held[rank][start:stop]
            yield PieceUnderWay(part, rounds, scratch, network.start(rank, tag), rank, at_once)

    network.run([partial(execute, list(pieces_of(rank))) for rank in range(world_size)])
    for (start, stop), schedule in zip(parts, schedules, strict=True):
        expected = interpret(schedule, [vector[start:stop] for vector in vectors])
        for rank in range(world_size):
            assert same_bits(held[rank][start:stop], expected[rank])


@pytest.mark.parametrize("algorithm", FLAT)
def test_no_order_of_arrival_changes_a_bit_or_stops_a_rank(algorithm: str) -> None:
    for world_size in (*range(1, 10), 12, 17):
        for num_elements, choose in zip(SIZES * 2, (eager, lazy, lazy, receiver_last), strict=True):
            check(FLAT[algorithm], world_size, num_elements, 1, choose)


@pytest.mark.parametrize("algorithm", HIERARCHICAL)
def test_nodes(algorithm: str) -> None:
    for ranks_per_node in [2, 3, 4]:
        for nodes in (1, 2, 3, 4):
            make = find(algorithm, ranks_per_node)
            check(make, ranks_per_node * nodes, 31, 1 + nodes % 2, lazy)


@pytest.mark.parametrize("num_pieces", [2, 3, 4])
@pytest.mark.parametrize("algorithm", FLAT)
def test_pieces_do_not_wait_for_each_other(algorithm: str, num_pieces: int) -> None:
    for world_size, choose in ((3, lazy), (6, eager), (8, lazy), (9, receiver_last)):
        check(FLAT[algorithm], world_size, 29 * num_pieces + 1, num_pieces, choose)


@given(
    algorithm=st.sampled_from([*FLAT, *HIERARCHICAL]),
    ranks_per_node=st.integers(1, 4),
    nodes=st.integers(1, 6),
    num_elements=st.integers(0, 150),
    num_pieces=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, derandomize=True)
def test_any_order_of_arrival(
    algorithm: str,
    ranks_per_node: int,
    nodes: int,
    num_elements: int,
    num_pieces: int,
    seed: int,
) -> None:
    make = find(algorithm, ranks_per_node)
    check(make, ranks_per_node * nodes, num_elements, num_pieces, shuffled(seed))


@pytest.mark.parametrize("algorithm", FLAT)
def test_a_backend_that_starts_messages_together(algorithm: str) -> None:
    """As NCCL does: a call is one kernel, and a stream runs one after the other."""
    for world_size in [2, 3, 5, 8, 13]:
        for choose in (eager, lazy):
            check(FLAT[algorithm], world_size, 61, 1, choose, at_once=True)


def by_hand(*rounds: tuple[Transfer, ...]) -> MakeSchedule:
    return lambda world_size, num_elements: from_rounds("by hand", world_size, num_elements, rounds)


def test_a_slow_send_keeps_what_it_sends() -> None:
    """Rank 0 sends, and at once adds to, or is given, what it sends."""
    sent = Transfer(0, 1, 0, 4, reduce=False)
    for reduce in (True, False):
        back = Transfer(2, 0, 0, 4, reduce=reduce)
        check(by_hand((sent,), (back,)), 3, 4, 1, lazy)


def test_a_receive_posted_early_leaves_what_earlier_rounds_use() -> None:
    """What rank 0 sends in round 1, or adds to, is overwritten in round 2 by one with no wait."""
    last = Transfer(1, 0, 0, 4, reduce=False)
    for middle in (Transfer(0, 2, 2, 6, reduce=False), Transfer(2, 0, 2, 6, reduce=True)):
        check(by_hand((Transfer(0, 2, 6, 8, reduce=True),), (middle,), (last,)), 3, 8, 1, eager)


def test_the_network_notices_a_deadlock() -> None:
    """Rank 0 wants what rank 1 sends in the round after."""
    network = Network(2, eager, at_once=False)

    def wait_first(rank: int) -> None:
        memory = torch.zeros(1)
        [received] = network.start(rank, 0)([(False, 1 - rank, memory)])
        received.wait()
        network.start(rank, 0)([(True, 1 - rank, memory)])

    with pytest.raises(DeadlockError, match="0, 1"):
        network.run([partial(wait_first, 0), partial(wait_first, 1)])
