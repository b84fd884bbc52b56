"""The ranks of a training under the real clock, once its warm steps are done.

Rank 0 is the server, and has a learner too; every other rank computes for it, and does nothing
else. So rank 0 alone evaluates, saves and records, and no rank waits for all others any more.
"""

import copy
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn

from firecaffe.cluster.agree import LOOK_S
from firecaffe.cluster.world import World, peers_may_be_lost
from firecaffe.errors import LauncherLostError, NotFiniteError, PeerLostError, PreemptedError
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.training.forward import Forward
from firecaffe.training.served.compute import Workbench
from firecaffe.training.served.learners import Learner, LostRank, OwnLearner, RemoteLearner
from firecaffe.training.served.messages import Messages
from firecaffe.training.served.real_clock import RealClock
from firecaffe.training.served.worker import work
from firecaffe.training.step import TrainBatches
from firecaffe.transport.lane import Lane, store_of

TOGETHER = (NotFiniteError, PreemptedError, LauncherLostError)
"""Errors that all ranks are to end with; see `faults.TOGETHER`. Others the watch tells."""

CUT_S = 5.0
"""Seconds for a learner's thread to end once it is cut."""


class RealRanks:
    """This rank among those of a training under the real clock."""

    def __init__(
        self,
        world: World,
        clock: RealClock,
        forward: Forward,
        named: Mapping[str, nn.Parameter],
        batches: TrainBatches,
        words: SynchronyConfig,
        timeout_s: float,
    ) -> None:
        """batches: asked for leaves in any order. timeout_s: how long ranks wait until all have a
        lane.
        """
        self.first_step = words.warm_steps
        """The first step after the warm ones."""
        self._world, self._clock, self._per_rank = world, clock, words.in_flight
        self._forward, self._named, self._batches = forward, named, batches
        self._timeout_s = timeout_s
        self.turn = threading.Lock()
        """Held by whoever computes on rank 0: a learner, or an evaluation."""

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the process of a learner was, as far as rank 0 knows."""
        return any(each.asks_to_stop for each in self._clock.learners.values())

    def alone(self) -> World:
        """The world of rank 0 that waits for no other."""
        return dataclasses.replace(
            self._world, world_size=1, group=None, exchange_group=None, local_world_size=1
        )

    def work(self, asks_to_stop: Callable[[], str]) -> dict[str, Any]:
        """Computes for the server to its end, on every rank but the first. Returns what the server
        has told at its end; the network has the last weights then.

        asks_to_stop: why this process was asked to; empty if it was not. Raises: the error that
        the training has ended with; PeerLostError.
        """
        bench = Workbench(self._forward, self._named, self._batches, self.turn)
        rank = self._world.rank
        try:
            lanes = [self._messages(rank, place) for place in range(self._per_rank)]
            told = json.loads(work(lanes, bench, lambda: bool(asks_to_stop()), self._look))
        except PeerLostError as error:
            with peers_may_be_lost(self._world):  # which knows who it is
                raise error
        if "error" in told:
            _raise(told["error"], goes_along=not asks_to_stop())
        return dict(told["result"])

    @contextmanager
    def serving(self, say: Callable[[str], None]) -> Iterator[None]:
        """Starts the clock with all learners, on rank 0, for a `with` block; an error that ends it
        is told to the other ranks. say: tells a person.
        """
        model = copy.deepcopy(self._forward.model)
        forward = Forward(model, self._forward.task, self._forward.config, self._forward.mixing)
        named = {name: p for name, p in model.named_parameters() if name in self._named}
        bench = Workbench(forward, named, self._batches, self.turn)
        arrivals, size = self._clock.arrivals, self._world.world_size
        learners: list[Learner] = []
        try:
            for number in range(size * self._per_rank):
                place, rank = divmod(number, size)
                if rank == 0:
                    learners.append(OwnLearner(number, arrivals, bench))
                else:
                    messages = self._messages(rank, place)
                    learners.append(RemoteLearner(number, rank, arrivals, messages))
            if self._world.watch is not None:
                lost = arrivals.put
                self._world.watch.tolerate(lambda fault: lost(LostRank(fault.rank, fault.event)))
            self._clock.start(learners, self._look, say)
            yield
        except TOGETHER as error:
            self._end({"error": [type(error).__name__, str(error), getattr(error, "step", 0)]}, {})
            raise
        finally:
            for each in learners:
                each.cut()
            for each in learners:
                each.join(CUT_S)

    def end(self, result: dict[str, Any]) -> None:
        """Tells all workers the result, and the weights that the network has now."""
        buffers = dict(self._forward.model.named_buffers())
        self._end({"result": result}, {**self._named, **buffers})

    def _end(self, told: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
        for each in self._clock.learners.values():
            each.end(json.dumps(told), weights)
        for each in self._clock.learners.values():
            while not each.join(LOOK_S):
                self._look()
                if self._world.watch is not None and each.rank in self._world.watch.losses:
                    each.cut()

    def _messages(self, rank: int, place: int) -> Messages:
        """The lane of a rank's learner; each end calls it."""
        store, name = store_of(self._world), f"{rank}.{place}"
        lane = Lane(store, name, self._world.is_first, self._timeout_s)
        return Messages(lane, self._forward, self._named)

    def _look(self) -> None:
        if self._world.watch is not None:
            self._world.watch.check()


def _raise(error: tuple[str, str, int], goes_along: bool) -> NoReturn:
    name, message, step = error
    found = next(kind for kind in TOGETHER if kind.__name__ == name)(message)
    found.goes_along = goes_along
    if isinstance(found, NotFiniteError):
        found.step = step
    raise found
