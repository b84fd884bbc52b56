"""Real ranks for tests: processes of a fork server that has torch loaded, started in 0.1 s.

The parent holds the store in which the ranks meet, as torch's elastic agent does, so no port is
chosen before it is bound.
"""

import gc
import itertools
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from firecaffe.cluster import groups
from firecaffe.errors import PeerLostError

TIMEOUT_S = 600.0

AFTERWARDS_S = 30.0
"""How long the others may take to say what they have to say of a rank that has failed."""


class RankError(Exception):
    """What each rank has come to where one has failed: the first cause first."""


class Outcome(NamedTuple):
    """What a rank has come to, and when. Processes of a host have one clock."""

    failed: bool
    value: Any
    """What it returned; the traceback of what it raised."""
    is_left: bool
    """Whether it has left what it joined."""
    at_s: float
    is_consequence: bool = False
    """Whether it only tells that another is lost."""


PRELOADED = (
    "tests.while_loading",
    *("torch", "torch.distributed", "torch._dynamo", "torch.distributed.launcher"),
    *(
        "firecaffe.training.build_training",
        "firecaffe.cli.train",
        "firecaffe.cli.start_training",
        "firecaffe.api.verify_and_replay",
        "firecaffe.api.evaluate_and_predict",
        "firecaffe.api.compressed_network",
        "firecaffe.api.rate_search",
        "firecaffe.api.weight_files",
        "firecaffe.api.plan_answer",
        "firecaffe.cli.bench",
        "numpy.ctypeslib",
        "rich._emoji_codes",
        "pytest",
        "tests.made_once",
    ),
)
"""Modules. multiprocessing passes over one that cannot be imported."""


@cache
def fork_server() -> Any:
    """multiprocessing's context of a fork server that has loaded what takes long."""
    # As `firecaffe` has it before it loads torch, which warns where no name server answers.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class Ranks:
    """Runs a function on all ranks of a world and returns their results.

    The function must be at the top of an importable module.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _World] = {}

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        local_world_size: int | None = None,
        lost: Container[int] = (),
    ) -> list[Any]:
        """`function(*arguments)` with torchrun's environment on new ranks; results by rank.

        local_world_size: ranks of each host, as they are told; by default all are on one. lost:
        ranks from which no result is awaited; theirs is None. If all are, each must end by itself.
        Raises: RankError if one fails, with
        what each has come to.
        """
        world = _World(world_size, once=True)
        try:
            return world.call(function, arguments, local_world_size or world_size, lost)
        finally:
            world.end(lost)

    def shared(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        local_world_size: int | None = None,
        lost: Container[int] = (),
    ) -> list[Any]:
        """The same on ranks that other tests use too, which saves their start.

        For functions that leave nothing behind in their process but imports: whatever they join,
        patch or set they take back. Where one fails, or leaves a world joined, its ranks are not
        used again. In the place of those that are lost others start.
        """
        world = self._kept.pop(world_size, None) or _World(world_size, once=False)
        try:
            results = world.call(function, arguments, local_world_size or world_size, lost)
        except BaseException:
            world.end(lost)
            raise
        if world.is_left:
            world.replace(lost)
            self._kept[world_size] = world
        else:
            world.end()
        return results

    def close(self) -> None:
        """Ends the ranks that were kept."""
        for world in self._kept.values():
            world.end()
        self._kept.clear()


class _World:
    """So many ranks, each a process that does what it is sent, once or until its pipe is closed."""

    def __init__(self, world_size: int, once: bool) -> None:
        self._once = once
        started = [self._start() for _ in range(world_size)]
        self._processes = [process for process, _ in started]
        self._pipes = [pipe for _, pipe in started]
        self.is_left = True
        """Whether all ranks have left what they joined in their last call."""
        self._stores: list[TCPStore] = []
        """Kept to the end: a rank knows a store by its port, so none may come again."""

    def _start(self) -> tuple[Any, Connection]:
        own, other = fork_server().Pipe()
        process = fork_server().Process(target=_main, args=(other, self._once))
        process.start()
        other.close()
        return process, own

    def replace(self, lost: Container[int]) -> None:
        """Other processes for those ranks."""
        for rank, process in enumerate(self._processes):
            if rank in lost:
                self._pipes[rank].close()
                process.kill()
                self._processes[rank], self._pipes[rank] = self._start()

    def call(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        on_host: int,
        lost: Container[int] = (),
    ) -> list[Any]:
        world_size = len(self._pipes)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        for rank, pipe in enumerate(self._pipes):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % on_host),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(on_host),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            # Plain pickle copies tensors; multiprocessing's would share memory that is gone then.
            pipe.send_bytes(pickle.dumps((environment, function, arguments)))
        awaited = [rank for rank in range(world_size) if rank not in lost]
        if not awaited:
            for process in self._processes:
                process.join(TIMEOUT_S)
        found = self._outcomes(awaited)
        if any(each.failed for each in found.values()):
            raise RankError(told(found))
        self.is_left = all(each.is_left for each in found.values())
        return [found[rank].value if rank in found else None for rank in range(world_size)]

    def _outcomes(self, ranks: list[int]) -> dict[int, Outcome]:
        waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in ranks}
        found: dict[int, Outcome] = {}
        until_s = time.monotonic() + TIMEOUT_S
        while waiting and (ready := wait(list(waiting), max(0.0, until_s - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                found[rank] = outcome = self._outcome(rank)
                if outcome.failed:
                    until_s = min(until_s, time.monotonic() + AFTERWARDS_S)
        for rank in waiting.values():
            found[rank] = Outcome(True, "no answer", False, time.monotonic(), is_consequence=True)
        return found

    def _outcome(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(10)
            code = self._processes[rank].exitcode
            return Outcome(True, f"its process ended with {code}", False, time.monotonic())
        return outcome

    def end(self, lost: Container[int] = ()) -> None:
        for pipe in self._pipes:
            pipe.close()
        for rank, process in enumerate(self._processes):
            process.join(0 if rank in lost else 1)
            process.kill()


def told(found: Mapping[int, Outcome]) -> str:
    """All ranks' outcomes: own failures, the first first; what others say of them; results."""

    def place(rank: int) -> tuple[bool, bool, float]:
        outcome = found[rank]
        return not outcome.failed, outcome.is_consequence, outcome.at_s

    return "\n".join(
        f"rank {rank}: {found[rank].value if found[rank].failed else 'returned'}".rstrip()
        for rank in sorted(found, key=place)
    )


def _main(pipe: Connection, once: bool) -> None:
    before = dict(os.environ)
    gc.freeze()  # what was loaded before is not looked at again
    while True:
        try:
            environment, function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(before | environment)
        torch.set_num_threads(1)  # as torchrun has it
        # Each call has its own store. A rank that is new among others counts worlds as they do.
        vars(groups)["_worlds"] = itertools.count()
        failed, is_consequence = False, False
        try:
            value = function(*arguments)
        except BaseException as error:
            failed, value = True, traceback.format_exc()
            is_consequence = isinstance(error, PeerLostError) or "by peer" in str(error)
        # Process groups that hang in cycles keep threads that wake 100 times a second (Gloo's).
        gc.collect()
        is_left = not dist.is_initialized() and not has_threads_of_gloo()
        outcome = Outcome(failed, value, is_left, time.monotonic(), is_consequence)
        pipe.send_bytes(pickle.dumps(outcome))
        if once:
            return


def has_threads_of_gloo() -> bool:
    """Whether groups are left: those of a lost rank are kept for ever, and wake as others do."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                return True
    return False
