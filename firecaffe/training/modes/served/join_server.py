"""Rank 0 admits workers that join a training under the real clock."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch._C._distributed_c10d import Store

from firecaffe.cluster.joining import COME_S, JoinRequest, JoinServer
from firecaffe.cluster.secret import own_secret
from firecaffe.cluster.world import World, launcher_place, launcher_store, run_pulse
from firecaffe.errors import FirecaffeError, LaunchError
from firecaffe.recipe.sections import Recipe
from firecaffe.training.modes.served.messages import Messages
from firecaffe.training.modes.served.real_clock import Arrivals, ClockLearner, Joined, RemoteLearner
from firecaffe.transport.lane import Lane

POLL_S = 0.2


class JoinListener:
    """Admits workers in a thread of its own, and makes their learners."""

    def __init__(
        self,
        world: World,
        messages_over: Callable[[Lane], Messages],
        recipe: Recipe,
        first_number: int,
        arrivals: Arrivals,
        say: Callable[[str], None],
    ) -> None:
        """Number new learners from `first_number` on."""
        self._world, self._messages_over, self._recipe = world, messages_over, recipe
        self._number, self._arrivals, self._say = first_number, arrivals, say
        self._is_over = threading.Event()
        self._resources = ExitStack()
        self._thread: threading.Thread | None = None

    def open(self, facts: dict[str, Any]) -> None:
        """Admit workers from now on, if there is a store where they can ask."""
        place, world = launcher_place(), self._world
        if place is None or world.world_size == 1:
            return
        one_host = world.local_world_size == world.world_size
        server = JoinServer(launcher_store(), world.attempt, one_host=one_host)
        server.open(facts)
        self._say(_invitation(f"firecaffe train RECIPE --join {place}"))
        self._thread = threading.Thread(
            target=self._look, args=(server,), name="join server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Admit no more workers. Wait for one that is being admitted."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(self._recipe.exchange.timeout_s)
        self._resources.close()

    def _look(self, server: JoinServer) -> None:
        try:
            while not self._is_over.wait(POLL_S):
                self._take(server)
            server.close()
        except RuntimeError as error:  # the store is gone, with the launcher
            self._say(f"no more workers can join: {str(error).splitlines()[0]}")

    def _take(self, server: JoinServer) -> None:
        try:
            while not self._is_over.is_set() and (comer := server.next()) is not None:
                self._admit(server, comer)
        except LaunchError as error:  # the next look continues with the next worker
            self._say(str(error))

    def _admit(self, server: JoinServer, comer: JoinRequest) -> None:
        watch = self._world.watch
        rank = len(watch.hosts)
        try:
            to_it = server.admit(comer, rank, list(watch.hosts))
            watch.add_rank(comer.host, to_it)
            self._resources.enter_context(run_pulse([to_it], self._recipe.exchange.silent_s))
            learners = self._learners_of(rank, server.store_of(comer))
        except (FirecaffeError, OSError) as error:
            self._say(f"a worker on {comer.host} asked to join and failed: {error}")
            return
        self._say(f"rank {rank} on {comer.host} has joined")
        if doubt := comer.facts.get("doubt"):
            self._say(f"warning: rank {rank} {doubt}")
        self._arrivals.put(Joined(learners))

    def _learners_of(self, rank: int, store: Store) -> list[ClockLearner]:
        learners: list[ClockLearner] = []
        try:
            for place in range(self._recipe.synchrony.in_flight):
                lane = Lane(store, f"{rank}.{place}", True, COME_S)
                messages = self._messages_over(lane)
                learners.append(RemoteLearner(self._number, rank, self._arrivals, messages))
                self._number += 1
        except BaseException:
            for learner in learners:
                learner.cut()
            raise
        return learners


def _invitation(command: str) -> str:
    if own_secret() is None:
        return f"more workers can join: {command}"
    # A secret that the launcher has made itself is in no file.
    return f"{command} --secret-file FILE server this run, if it was started with that file"
