"""The ranks of a training under the real clock, once its warm steps are done.

Rank 0 is the server, and has a learner too. Every other rank computes for rank 0 until it receives
the end, and holds a part of the weights if the server is sharded. Only rank 0 evaluates, saves and
records. No rank waits for all others any more.
"""

import copy
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from firecaffe.cluster.agree import POLL_S
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
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.training.forward import Forward
from firecaffe.training.modes.mode import Loop, TrainingRanks
from firecaffe.training.modes.served.coder import Coder
from firecaffe.training.modes.served.join_server import JoinListener
from firecaffe.training.modes.served.messages import END, Messages
from firecaffe.training.modes.served.real_clock import (
    ClockLearner,
    LostRank,
    OnRankLost,
    OwnLearner,
    RealClock,
    RemoteLearner,
)
from firecaffe.training.modes.served.work_gradient import Bench, Holders, UpdateOrder, Workbench
from firecaffe.training.result import Result
from firecaffe.transport.lane import Lane, store_of


def work(
    lanes: Sequence[Messages],
    benches: Sequence[Bench],
    asks_to_stop: Callable[[], bool],
    look: Callable[[], None],
) -> str:
    """Compute the work that comes over the lanes until all have ended. Return the first's text.

    The first of `lanes` then has the last weights. `look` is called while waiting, and may raise.
    Raises: PeerLostError if the server is gone; errors of computing.
    """
    said: SimpleQueue[tuple[int, str | BaseException]] = SimpleQueue()

    def answer(place: int, messages: Messages) -> None:
        try:
            said.put((place, _answer(messages, benches[place], asks_to_stop)))
        except BaseException as error:
            said.put((place, error))

    threads = [
        threading.Thread(target=answer, args=(place, lane), name=f"lane-{place}", daemon=True)
        for place, lane in enumerate(lanes)
    ]
    for thread in threads:
        thread.start()
    texts: dict[int, str] = {}
    try:
        while len(texts) < len(lanes):
            look()
            try:
                place, outcome = said.get(timeout=POLL_S)
            except Empty:
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            texts[place] = outcome
    except BaseException:
        for messages in lanes:
            messages.lane.cut()
        raise
    return texts[0]


def _answer(messages: Messages, bench: Bench, asks_to_stop: Callable[[], bool]) -> str:
    while (head := messages.receive_head()).kind != END:
        if head.has_weights:
            messages.receive_weights()
        contribution = bench.compute(head.work, messages.weights.views)
        messages.send_contribution(head.learner, contribution, asks_to_stop())
    text = messages.receive_end(head)
    bench.end()
    return text


TOGETHER = (NotFiniteError, DivergedError, PreemptedError, LauncherLostError)
"""Errors with which all ranks end; see `faults.TOGETHER`. The watch reports others."""

CUT_S = 5.0
"""Seconds to wait for the threads of learners and holders to end, once they are cut."""


class RealRanks(TrainingRanks):
    def __init__(
        self,
        world: World,
        clock: RealClock,
        forward: Forward,
        named: Mapping[str, nn.Parameter],
        coder: Coder,
        batches: TrainBatches,
        words: SynchronyConfig,
        exchange: ExchangeConfig,
        facts: Mapping[str, Any],
        store: Store | None = None,
        meet: Callable[[], Holders] = Holders,
    ) -> None:
        """Prepare this rank. All ranks call `meet`, after the warm steps, to make the holders.

        `facts` is what joining workers are told. `store` has this rank's lanes; None is the world's
        store.
        """
        self._first_step = words.warm_steps
        self._world, self._clock, self._per_rank = world, clock, words.in_flight
        self._forward, self._named, self._batches = forward, named, batches
        self._coder = coder
        self._timeout_s, self._silent_s = exchange.timeout_s, exchange.silent_s
        self._facts, self._store, self._meet = facts, store, meet
        self._listener: JoinListener | None = None
        self._holders = Holders()
        self.turn = threading.Lock()
        """The lock that a learner or an evaluation holds while it computes on rank 0."""

    have_weights = False
    """Other processes have the weights, too."""

    def run(self, loop: Loop, asks_to_stop: Callable[[], str]) -> Result:
        """Train together in the warm steps, then for the server."""
        loop.run(self._first_step)
        if loop.is_over:
            return loop.end()
        loop.part()
        if not self._world.is_first:
            return self.work(asks_to_stop)
        with self.serving(loop.say):
            loop.continue_alone(self.alone())
            loop.run()
            result = loop.end()
            self.end(result.to_message())
        return result

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether a learner's process was asked to stop, as far as rank 0 knows."""
        return any(learner.asks_to_stop for learner in self._clock.learners.values())

    def alone(self) -> World:
        """Return a world of rank 0 that waits for no other."""
        return dataclasses.replace(
            self._world, world_size=1, group=None, exchange_group=None, local_world_size=1
        )

    def tell(self, order: UpdateOrder) -> None:
        self._holders.tell(order)

    def gather(self) -> None:
        self._holders.gather(self._look)
        self._clock.count_moved(self._holders.moved)

    def work(self, asks_to_stop: Callable[[], str]) -> Result:
        """Compute for the server until it ends, on ranks other than 0. Return the run's result.

        The network then has the last weights. `asks_to_stop` returns why this process was asked to
        stop, or an empty text. Raises: the error that the training has ended with; PeerLostError.
        """
        bench = Workbench(self._forward, self._named, self._batches, self.turn)
        rank = self._world.rank
        try:
            with self._holding():
                benches = [self._holders.bench(bench, place) for place in range(self._per_rank)]
                lanes = [self._messages(rank, place) for place in range(self._per_rank)]
                text = work(lanes, benches, lambda: bool(asks_to_stop()), self._look)
                self._join_holders()
        except PeerLostError as error:
            with peers_may_be_lost(self._world):  # it knows which rank is lost
                raise error
        report = json.loads(text)
        if lanes[0].last:
            bench.load(lanes[0].last)
        if "error" in report:
            _raise(report["error"], is_secondary=not asks_to_stop())
        result = Result.from_message(report["result"])
        result.hold(self._forward.model)
        return result

    @contextmanager
    def serving(self, say: Callable[[str], None]) -> Iterator[None]:
        """Run the clock with all learners in a `with` block, on rank 0. Send errors to others."""
        model = copy.deepcopy(self._forward.model)
        forward = Forward(model, self._forward.task, self._forward.config, self._forward.mixing)
        named = {name: p for name, p in model.named_parameters() if name in self._named}
        bench = Workbench(forward, named, self._batches, self.turn)
        arrivals, size = self._clock.arrivals, self._world.world_size
        learners: list[ClockLearner] = []
        try:
            with self._holding(), self._ended(learners), self._sending_errors():
                for number in range(size * self._per_rank):
                    place, rank = divmod(number, size)
                    if rank == 0:
                        learners.append(
                            OwnLearner(
                                number, arrivals, self._holders.bench(bench, place), self._coder
                            )
                        )
                    else:
                        messages = self._messages(rank, place)
                        learners.append(RemoteLearner(number, rank, arrivals, messages))
                with self._tolerating(say) as on_rank_lost, self._admitting(len(learners), say):
                    self._clock.start(learners, self._look, on_rank_lost)
                    if self._listener is not None:
                        self._listener.open(dict(self._facts))
                    yield
        except PeerLostError as error:
            with peers_may_be_lost(self._world):
                raise error

    def end(self, result: dict[str, Any]) -> None:
        """Send all workers the result, and the weights that the network has now.

        Raises: errors of this process since the last event; PeerLostError.
        """
        buffers = dict(self._forward.model.named_buffers())
        self._end({"result": result}, {**self._named, **buffers})

    def _end(self, report: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
        if self._listener is not None:
            self._listener.close()
        self._drain_arrivals(report)
        for learner in self._clock.learners.values():
            learner.end(json.dumps(report), weights)
        for learner in self._clock.learners.values():
            while not learner.join(POLL_S):
                self._look()
                if self._world.watch is not None and learner.rank in self._world.watch.losses:
                    learner.cut()
        self._drain_arrivals(report)
        self._holders.end()
        self._join_holders()

    def _drain_arrivals(self, report: dict[str, Any]) -> None:
        error = self._clock.drain_arrivals()
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
    def _holding(self) -> Iterator[None]:
        self._holders = self._meet()
        try:
            yield
        finally:
            self._holders.cut()
            self._holders.join(CUT_S)

    def _join_holders(self) -> None:
        while not self._holders.join(POLL_S):
            self._look()

    @contextmanager
    def _tolerating(self, say: Callable[[str], None]) -> Iterator[OnRankLost]:
        if self._clock.needs_all:
            yield lambda *_: None
            return
        if self._world.watch is not None:
            lost = self._clock.arrivals.put
            self._world.watch.tolerate(lambda fault: lost(LostRank(fault.rank, fault.event)))
        reporter = LossReporter(self._world.store, self._world.attempt)

        def on_rank_lost(rank: int, why: str) -> None:
            say(f"rank {rank} is lost, and its micro-batches go to others: {why}")
            reporter.tell(self._fault_of(rank, why))

        with closing(reporter):
            yield on_rank_lost

    @contextmanager
    def _admitting(self, count: int, say: Callable[[str], None]) -> Iterator[None]:
        if self._holders.hold_weights:
            yield
            return
        self._listener = JoinListener(
            self._world,
            self._messages_over,
            self._per_rank,
            count,
            self._clock.arrivals,
            self._timeout_s,
            self._silent_s,
            say,
        )
        with closing(self._listener):
            yield

    @contextmanager
    def _ended(self, learners: Sequence[ClockLearner]) -> Iterator[None]:
        try:
            yield
        finally:
            all_learners = {*learners, *self._clock.all_learners}
            for learner in all_learners:
                learner.cut()
            end_s = time.monotonic() + CUT_S
            for learner in all_learners:
                learner.join(max(0.0, end_s - time.monotonic()))

    def _fault_of(self, rank: int, why: str) -> Fault:
        watch, step = self._world.watch, self._world.place.step
        host = self._world.host if watch is None else watch.hosts[rank]
        seen = Fault("gone", rank, host, step, f"rank 0: {why}")
        return seen if watch is None else watch.losses.get(rank, seen)

    def _messages(self, rank: int, place: int) -> Messages:
        store, name = self._store or store_of(self._world), f"{rank}.{place}"
        lane = Lane(store, name, self._world.is_first, self._timeout_s)
        return self._messages_over(lane)

    def _messages_over(self, lane: Lane) -> Messages:
        return Messages(lane, self._forward, self._named, self._coder, self._holders.hold_weights)

    def _look(self) -> None:
        if self._world.watch is not None:
            self._world.watch.check()
        self._holders.check()


def _raise(error: tuple[str, str, int], is_secondary: bool) -> NoReturn:
    name, message, step = error
    raised = next(kind for kind in TOGETHER if kind.__name__ == name)(message)
    raised.is_secondary = is_secondary
    if isinstance(raised, NotFiniteError | DivergedError):
        raised.step = step
    raise raised
