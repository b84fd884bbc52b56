"""The ranks of a training under the real clock, once its warm steps are done.

Rank 0 is the server, and has a learner too. Every other rank computes for rank 0 until it receives
the end, and holds a part of the weights if the server is sharded. Only rank 0 evaluates, saves and
records. No rank waits for all others any more.
"""

import copy
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from typing import Any, NoReturn

from torch import Tensor
from torch._C._distributed_c10d import Store

from firecaffe.cluster.agree import POLL_S
from firecaffe.cluster.calls import Worker, raise_failure
from firecaffe.cluster.joining import COME_S, JoinListener
from firecaffe.cluster.lost_ranks import LossReporter
from firecaffe.cluster.world import World, peers_may_be_lost
from firecaffe.data.batches import TrainBatches
from firecaffe.errors import (
    DivergedError,
    LauncherLostError,
    NotFiniteError,
    PeerLostError,
    PreemptedError,
)
from firecaffe.faults import Fault
from firecaffe.recipe.sections import Recipe
from firecaffe.training.forward import Forward
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.modes.mode import Loop, TrainingRanks
from firecaffe.training.modes.served.coder import Coder
from firecaffe.training.modes.served.messages import END, Messages
from firecaffe.training.modes.served.real_clock import (
    ClockLearner,
    Joined,
    LostRank,
    OnRankLost,
    OwnLearner,
    RealClock,
    RemoteLearner,
)
from firecaffe.training.modes.served.work_gradient import Bench, Holders, UpdateOrder, Workbench
from firecaffe.training.result import Result
from firecaffe.transport.lane import Lane, store_of

TOGETHER = (NotFiniteError, DivergedError, PreemptedError, LauncherLostError)
"""Errors with which all ranks end; see `faults.TOGETHER`. The watch reports others."""

CUT_S = 5.0
"""Seconds to wait for the threads of learners and holders to end, once they are cut."""


@dataclass
class RealRank(TrainingRanks, ABC):
    """A rank under the real clock. Others extend it by their part after the warm steps."""

    world: World
    holding: Holding
    coder: Coder
    batches: TrainBatches
    recipe: Recipe
    meet: Callable[[], Holders] = Holders
    """Makes this rank's holders. All ranks call it, after the warm steps."""
    store: Store | None = None
    """The store of this rank's lanes; None is the world's."""
    turn: AbstractContextManager[object] = field(default_factory=threading.Lock, init=False)
    _holders: Holders = field(default_factory=Holders, init=False)

    have_weights = False
    """Other processes have the weights, too."""

    def run(self, loop: Loop, asks_to_stop: Callable[[], str]) -> Result:
        loop.run(self.recipe.synchrony.warm_steps)
        if loop.is_over:
            return loop.end()
        loop.part()
        return self._take_part(loop, asks_to_stop)

    @abstractmethod
    def _take_part(self, loop: Loop, asks_to_stop: Callable[[], str]) -> Result: ...

    def tell(self, order: UpdateOrder) -> None:
        self._holders.tell(order)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Have holders in a `with` block. An error about a lost rank then names it."""
        try:
            self._holders = self.meet()
            try:
                yield
            finally:
                self._holders.cut()
                self._holders.join(CUT_S)
        except PeerLostError as error:
            with peers_may_be_lost(self.world):
                raise error

    def _join_holders(self) -> None:
        while not self._holders.join(POLL_S):
            self._look()

    def _messages(self, rank: int, place: int) -> Messages:
        store, timeout_s = self.store or store_of(self.world), self.recipe.exchange.timeout_s
        return self._messages_over(Lane(store, f"{rank}.{place}", self.world.is_first, timeout_s))

    def _messages_over(self, lane: Lane) -> Messages:
        forward, named = self.holding.forward, self.holding.named
        return Messages(lane, forward, named, self.coder, self._holders.hold_weights)

    def _look(self) -> None:
        self.world.watch.check()
        self._holders.check()


class WorkerRank(RealRank):
    """A rank other than 0: computes for the server until that ends."""

    def _take_part(self, loop: Loop, asks_to_stop: Callable[[], str]) -> Result:
        return self.work(asks_to_stop)

    def work(self, asks_to_stop: Callable[[], str]) -> Result:
        """Compute for the server, and return the run's result.

        The network then has the last weights. `asks_to_stop` returns why this process was asked to
        stop, or an empty text. Raises: the error that the training has ended with; PeerLostError.
        """
        forward = self.holding.forward
        bench = Workbench(forward, self.holding.named, self.batches, self.turn)
        places = range(self.recipe.synchrony.in_flight)
        with self._held():
            benches = [self._holders.bench(bench, place) for place in places]
            lanes = [self._messages(self.world.rank, place) for place in places]
            report = json.loads(self._compute(lanes, benches, lambda: bool(asks_to_stop())))
            self._join_holders()
        if lanes[0].last:
            bench.load(lanes[0].last)
        if "error" in report:
            _raise(report["error"], is_secondary=not asks_to_stop())
        result = Result.from_message(report["result"])
        result.hold(forward.model)
        return result

    def _compute(
        self,
        lanes: Sequence[Messages],
        benches: Sequence[Bench],
        asks_to_stop: Callable[[], bool],
    ) -> str:
        """Compute what comes over the lanes until all have ended. Return the first one's text."""
        threads = [Worker(f"lane-{place}") for place in range(len(lanes))]
        texts = [
            thread.submit(partial(_answer, messages, bench, asks_to_stop))
            for thread, messages, bench in zip(threads, lanes, benches, strict=True)
        ]
        try:
            while wait(texts, POLL_S, FIRST_EXCEPTION).not_done:
                raise_failure(threads)
                self._look()
            raise_failure(threads)
            return texts[0].result()
        except BaseException:
            for messages in lanes:
                messages.lane.cut()
            raise
        finally:
            for thread in threads:
                thread.close(wait=False)


def _answer(messages: Messages, bench: Bench, asks_to_stop: Callable[[], bool]) -> str:
    while (head := messages.receive_head()).kind != END:
        if head.has_weights:
            messages.receive_weights()
        contribution = bench.compute(head.work, messages.weights.views)
        messages.send_contribution(head.learner, contribution, asks_to_stop())
    text = messages.receive_end(head)
    bench.end()
    return text


@dataclass(kw_only=True)
class ServerRank(RealRank):
    """Rank 0: runs the clock with all learners, of which it has some itself."""

    clock: RealClock
    facts: Mapping[str, Any]
    """The facts of the run that joining workers are told."""
    _admission: ExitStack = field(default_factory=ExitStack, init=False)

    @property
    def is_asked_to_stop(self) -> bool:
        return any(learner.asks_to_stop for learner in self.clock.learners.values())

    def gather(self) -> None:
        self._holders.gather(self._look)
        self.clock.moved = self._holders.moved

    def _take_part(self, loop: Loop, asks_to_stop: Callable[[], str]) -> Result:
        with self._serving(loop.say):
            loop.continue_alone(
                replace(
                    self.world, world_size=1, group=None, exchange_group=None, local_world_size=1
                )
            )
            loop.run()
            result = loop.end()
            buffers = dict(self.holding.forward.model.named_buffers())
            self._end({"result": result.to_message()}, {**self.holding.named, **buffers})
        return result

    @contextmanager
    def _serving(self, say: Callable[[str], None]) -> Iterator[None]:
        """Run the clock with all learners in a `with` block. Send errors to others."""
        shared, named = self.holding.forward, self.holding.named
        model = copy.deepcopy(shared.model)
        forward = Forward(model, shared.task, shared.config, shared.mixing)
        own = {name: p for name, p in model.named_parameters() if name in named}
        bench = Workbench(forward, own, self.batches, self.turn)
        learners: list[ClockLearner] = []
        with self._held(), self._ended(learners), self._sending_errors():
            places = range(self.recipe.synchrony.in_flight)
            for place, rank in product(places, range(self.world.world_size)):
                number = len(learners)
                learners.append(self._learner(number, place, rank, bench))
            with self._tolerating(say) as on_rank_lost, self._admission:
                self.clock.start(learners, self._look, on_rank_lost)
                if not self._holders.hold_weights:
                    self._admit(len(learners), say)
                yield

    def _learner(self, number: int, place: int, rank: int, bench: Workbench) -> ClockLearner:
        arrivals = self.clock.arrivals
        if rank == 0:
            return OwnLearner(number, arrivals, self._holders.bench(bench, place), self.coder)
        return RemoteLearner(number, rank, arrivals, self._messages(rank, place))

    def _end(self, report: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Send all workers the report and the present weights. Raises: this rank's last errors."""
        self._admission.close()
        self._drain_arrivals(report)
        for learner in self.clock.learners.values():
            learner.end(json.dumps(report), weights)
        for learner in self.clock.learners.values():
            while not learner.join(POLL_S):
                self._look()
                if learner.rank in self.world.watch.losses:
                    learner.cut()
        self._drain_arrivals(report)
        self._holders.end()
        self._join_holders()

    def _drain_arrivals(self, report: dict[str, Any]) -> None:
        error = self.clock.drain_arrivals()
        if error is not None and "error" not in report:
            raise error

    @contextmanager
    def _sending_errors(self) -> Iterator[None]:
        try:
            yield
        except TOGETHER as error:
            with suppress(PeerLostError):  # a rank that goes away now does not hide why
                report = [type(error).__name__, str(error), getattr(error, "step", 0)]
                self._end({"error": report}, {})
            raise

    @contextmanager
    def _tolerating(self, say: Callable[[str], None]) -> Iterator[OnRankLost]:
        if self.clock.needs_all:
            yield lambda *_: None
            return
        lost = self.clock.arrivals.put
        self.world.watch.tolerate(lambda fault: lost(LostRank(fault.rank, fault.event)))
        reporter = LossReporter(self.world.store, self.world.attempt)

        def on_rank_lost(rank: int, why: str) -> None:
            say(f"rank {rank} is lost, and its micro-batches go to others: {why}")
            reporter.tell(self._fault_of(rank, why))

        with closing(reporter):
            yield on_rank_lost

    def _admit(self, first_number: int, say: Callable[[str], None]) -> None:
        exchange, connect = self.recipe.exchange, partial(self._connect, count(first_number))
        listener = JoinListener(
            self.world, exchange.silent_s, connect, self.clock.arrivals.put, say
        )
        self._admission.callback(listener.close, exchange.timeout_s)
        listener.open(dict(self.facts))

    def _connect(self, numbers: Iterator[int], rank: int, store: Store) -> Joined:
        """Make the learners of a rank that joins. Raises: PeerLostError if it does not connect."""
        learners: list[ClockLearner] = []
        try:
            for place in range(self.recipe.synchrony.in_flight):
                messages = self._messages_over(Lane(store, f"{rank}.{place}", True, COME_S))
                arrivals = self.clock.arrivals
                learners.append(RemoteLearner(next(numbers), rank, arrivals, messages))
        except BaseException:
            for learner in learners:
                learner.cut()
            raise
        return Joined(learners)

    @contextmanager
    def _ended(self, learners: Sequence[ClockLearner]) -> Iterator[None]:
        try:
            yield
        finally:
            all_learners = {*learners, *self.clock.all_learners}
            for learner in all_learners:
                learner.cut()
            end_s = time.monotonic() + CUT_S
            for learner in all_learners:
                learner.join(max(0.0, end_s - time.monotonic()))

    def _fault_of(self, rank: int, why: str) -> Fault:
        watch, step = self.world.watch, self.world.place.step
        seen = Fault("gone", rank, watch.hosts[rank], step, f"rank 0: {why}")
        return watch.losses.get(rank, seen)


def _raise(error: tuple[str, str, int], is_secondary: bool) -> NoReturn:
    name, message, step = error
    raised = next(kind for kind in TOGETHER if kind.__name__ == name)(message)
    raised.is_secondary = is_secondary
    if isinstance(raised, NotFiniteError | DivergedError):
        raised.step = step
    raise raised
