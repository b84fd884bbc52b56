"""The learners of a server, as its main thread sees them: each a thread with one work at a time.

One is asked by `begin`, and tells what became of it in a queue that all have in common.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from queue import SimpleQueue

from torch import Tensor

from firecaffe.errors import PeerLostError
from firecaffe.synchrony.policy import Work
from firecaffe.training.served.coder import Coder
from firecaffe.training.served.compute import Bench, Contribution
from firecaffe.training.served.memory import Gradient
from firecaffe.training.served.messages import WORK, Head, Messages


@dataclass(frozen=True)
class Arrival:
    """A learner brings its work."""

    learner: "Learner"
    work: Work
    brought: Contribution


@dataclass(frozen=True)
class Gone:
    """A learner cannot be reached any more."""

    learner: "Learner"
    why: str


@dataclass(frozen=True)
class LostRank:
    """A rank is given up, with all its learners."""

    rank: int
    why: str


@dataclass(frozen=True)
class Came:
    """Learners that have come to those that are there."""

    learners: "list[Learner]"


@dataclass(frozen=True)
class Failed:
    """An error in this process, which ends the run."""

    error: BaseException


Arrivals = SimpleQueue[Arrival | Gone | LostRank | Came | Failed]


@dataclass(frozen=True)
class Begin:
    work: Work
    weights: Mapping[str, Tensor]
    is_dropped: bool
    """Whether what the learner has brought before does not count."""


@dataclass(frozen=True)
class _End:
    text: str
    weights: Mapping[str, Tensor]


@dataclass
class Spent:
    """What a learner has cost so far."""

    pulled_bytes: int = 0
    pushed_bytes: int = 0
    busy_s: float = 0.0
    """Seconds of fetching samples and computing."""


class Learner(ABC):
    """A learner, and its thread in this process."""

    asks_to_stop = False
    """Whether its process was asked to stop."""

    def __init__(self, number: int, rank: int, arrivals: Arrivals) -> None:
        self.number, self.rank = number, rank
        self.spent = Spent()
        self._arrivals, self._is_dropped = arrivals, False
        self._orders: SimpleQueue[Begin | _End] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"learner-{number}", daemon=True)
        self._thread.start()

    def hear(self, counts: bool) -> None:
        """Hears whether what it brought last counts."""
        self._is_dropped = not counts

    def begin(self, work: Work, weights: Mapping[str, Tensor]) -> None:
        """Gives it work. weights: parameters and buffers, which do not change any more."""
        self._orders.put(Begin(work, weights, self._is_dropped))

    def end(self, text: str, weights: Mapping[str, Tensor]) -> None:
        """Ends it, after its work if it has some. text, weights: for the process that it is in."""
        self._orders.put(_End(text, weights))

    def cut(self) -> None:
        """Ends it whatever it does, from another thread."""
        self.end("", {})

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end. Returns whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while isinstance(order := self._orders.get(), Begin):
                brought = self._do(order)
                self.spent.busy_s += brought.data_s + brought.compute_s
                self._arrivals.put(Arrival(self, order.work, brought))
            self._tell_end(order.text, order.weights)
        except PeerLostError as error:
            self._arrivals.put(Gone(self, str(error)))
        except BaseException as error:
            self._arrivals.put(Failed(error))

    @abstractmethod
    def _do(self, order: Begin) -> Contribution: ...

    @abstractmethod
    def _tell_end(self, text: str, weights: Mapping[str, Tensor]) -> None: ...


class OwnLearner(Learner):
    """One that computes in its own thread."""

    def __init__(self, number: int, arrivals: Arrivals, bench: Bench, coder: Coder) -> None:
        self._bench, self._coder = bench, coder
        super().__init__(number, 0, arrivals)

    def _do(self, order: Begin) -> Contribution:
        if order.is_dropped:
            self._coder.drop(self.number)
        brought = self._bench.compute(order.work, order.weights)
        self.spent.pulled_bytes, self.spent.pushed_bytes = brought.moved
        found = brought.gradient
        if brought.is_finite is not None:  # it has gone elsewhere
            return brought
        sent = Gradient(self._coder.as_sent(self.number, found.tensors), found.tail)
        return replace(brought, gradient=sent)

    def _tell_end(self, text: str, weights: Mapping[str, Tensor]) -> None:
        self._bench.end()


class RemoteLearner(Learner):
    """One on another rank, at the other end of a lane."""

    def __init__(self, number: int, rank: int, arrivals: Arrivals, messages: Messages) -> None:
        self._messages = messages
        self._version = -1  # that the other end has
        super().__init__(number, rank, arrivals)

    def _do(self, order: Begin) -> Contribution:
        messages, work = self._messages, order.work
        is_new = work.version != self._version
        head = Head(WORK, work.learner, *work.leaf, work.version, is_new)
        messages.send_head(replace(head, is_dropped=order.is_dropped))
        if is_new:
            messages.send_weights(order.weights)
            self._version = work.version
        brought, asks = messages.receive_contribution()
        self.asks_to_stop |= asks
        self.spent.pulled_bytes = messages.lane.sent_bytes + brought.moved[0]
        self.spent.pushed_bytes = messages.lane.received_bytes + brought.moved[1]
        return replace(brought, rank=self.rank)

    def _tell_end(self, text: str, weights: Mapping[str, Tensor]) -> None:
        self._messages.send_end(text, weights)

    def cut(self) -> None:
        self._messages.lane.cut()
        super().cut()
