"""A network for executors that is as unhelpful as a network may be.

A message moves only when both ends have posted it. From then on it may be written, and its send
may end, at any time and in any order. Until then the memory belongs to the network: what is to be
received holds no numbers and must not be touched, what is being sent must not change. Ranks are
threads of which one runs at a time, as far as it can; so a run is the same each time.
"""

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed import Work

from firecaffe.transport.execute import PeerMessage, StartMessages
from tests.kit.exchange import same_bits

Choose = Callable[[Sequence[str]], int]
"""Which of the possible events is the next, by their kinds."""


class DeadlockError(Exception):
    """All ranks wait, and no message can move."""


class HazardError(Exception):
    """Memory was changed while the network had it."""


class StoppedError(Exception):
    """Ends a rank's thread."""


class Posting:
    """One end of a message: the part of a Work that the executor uses."""

    def __init__(self, network: "Network", rank: int, memory: Tensor) -> None:
        self.memory, self.done = memory, False
        self._network, self._rank = network, rank

    def wait(self) -> None:
        self._network.wait(self._rank, self)


Channel = tuple[int, int, int]
"""From rank to rank, and a tag."""

Call = list[tuple[Channel, bool, Posting]]
"""What one call of `StartMessages` posts; whether each is a send."""


class Network:
    """Moves messages in the order that `choose` says, given what kinds of event are possible."""

    def __init__(self, world_size: int, choose: Choose, at_once: bool):
        self.choose = choose
        self.at_once = at_once
        self.sends: dict[Channel, deque[tuple[Posting, Tensor]]] = defaultdict(deque)
        self.receives: dict[Channel, deque[Posting]] = defaultdict(deque)
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
            call: Call = [
                ((rank, peer, tag) if is_send else (peer, rank, tag), is_send, posting)
                for is_send, peer, memory in messages
                for posting in (Posting(self, rank, memory),)
            ]
            postings = [posting for *_, posting in call]
            self.posted[rank] += postings
            if call and self.at_once:
                self.calls[rank].append(call)
            if not self.at_once or len(self.calls[rank]) == 1:
                self._post(call)
            return cast(list[Work], postings)

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
        for channel, is_send, posting in call:
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
            if calls and all(posting.done for *_, posting in calls[0]):
                calls.popleft()
                if calls:
                    self._post(calls[0])

    def _is_done(self, rank: int, posting: Posting) -> bool:
        unfinished = (p for call in self.calls[rank] for *_, p in call)
        return posting.done and posting not in unfinished


def eager(kinds: Sequence[str]) -> int:
    """Everything as soon as it can be."""
    return max(range(len(kinds)), key=lambda i: (kinds[i] != "run", -i))


def lazy(kinds: Sequence[str]) -> int:
    """Ranks go as far as they can; then the newest arrives; sends end when nothing else can."""
    return max(range(len(kinds)), key=lambda i: (("leave", "arrive", "run").index(kinds[i]), i))


def receiver_last(kinds: Sequence[str]) -> int:
    """Sends end as soon as they can; nothing arrives before nothing else can happen."""
    return max(range(len(kinds)), key=lambda i: (("arrive", "run", "leave").index(kinds[i]), i))


def shuffled(seed: int) -> Choose:
    numbers = random.Random(seed)
    return lambda kinds: numbers.randrange(len(kinds))
