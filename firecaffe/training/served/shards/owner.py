"""An owner: has a run of the parameters' elements, and executes the events of the log on it.

Rank 0 tells it the events, in their order. Learners bring it their gradients of these elements and
ask it for versions of them, in any order: an event waits for its gradient, a learner for its
version.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from firecaffe.errors import PeerLostError
from firecaffe.solvers.delayed_nesterov import set_delay
from firecaffe.synchrony.events import Push
from firecaffe.synchrony.leaves import Leaf
from firecaffe.synchrony.policy import Work
from firecaffe.training.served.memory import Gradient
from firecaffe.training.served.server import Server
from firecaffe.training.served.shards.held import Held
from firecaffe.training.served.told import Told


class Owner:
    """One rank's. `take` is called by one thread, the rest by any."""

    def __init__(self, server: Server, held: Held, weight_of: Callable[[Leaf], float]) -> None:
        """server: of its elements. weight_of: of a leaf, 1 if it is full."""
        self.held = held
        self._server, self._weight_of = server, weight_of
        self._changed = threading.Condition()
        self._gradients: dict[Work, Gradient] = {}
        """Those of events that have not come yet."""
        self._unwanted: set[Work] = set()
        """Works that do not count, and whose gradient is still to come."""
        self._is_cut = False
        self._threads = torch.get_num_threads()

    def bring(self, work: Work, gradient: Gradient) -> None:
        """A learner brings its gradient."""
        with self._changed:
            if work in self._unwanted:
                self._unwanted.remove(work)
            else:
                self._gradients[work] = gradient
            self._changed.notify_all()

    def version(self, number: int) -> Tensor:
        """The bytes of a version, which do not change any more. It waits for the version: whoever
        asks was given a work at it, so that it will be kept. Raises: PeerLostError if the owner was
        cut.
        """
        memory = self.held.memory
        with self._changed:
            self._wait(lambda: number <= memory.newest)
            # That of a work which was given up meanwhile is gone. What becomes of it is dropped.
            return memory.sent.get(number, memory.nothing)

    @torch.no_grad()
    def take(self, told: Told) -> None:
        """Executes the next event; it waits for the gradient. Raises: PeerLostError as above."""
        event = told.event
        torch.set_num_threads(self._threads)  # each thread has a number of its own
        if isinstance(event, Push):
            self._keep_gradient(event)
            if event.update is not None:
                set_delay(self._server.optimizer, told.delay)
                self._server.prepare(event.update, self._weight_of)
                self._server.apply(event.update, self._weight_of, told.rate, told.momentum)
        with self._changed:
            self._server.take(event)
            self._changed.notify_all()

    def cut(self) -> None:
        """Ends all waiting, from any thread."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()

    def _keep_gradient(self, event: Push) -> None:
        with self._changed:
            if event.counts:
                self._wait(lambda: event.work in self._gradients)
                self._server.keep(event.work, self._gradients.pop(event.work))
            elif self._gradients.pop(event.work, None) is None:
                self._unwanted.add(event.work)

    def _wait(self, until: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._is_cut or until())
        if self._is_cut:
            raise PeerLostError("another rank went away")
