"""Real ranks for tests: processes of a fork server that has torch loaded, started in 0.1 s.

The parent holds the store in which the ranks meet, as torch's elastic agent does, so no port is
chosen before it is bound.
"""

import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Container
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

TIMEOUT_S = 300.0


class RankError(Exception):
    """A rank's exception, as (rank, its text)."""


PRELOADED = (
    *("torch", "torch.distributed", "torch._dynamo", "torch.distributed.launcher"),
    *(
        "firecaffe.training.build",
        "firecaffe.cli.train",
        "firecaffe.cli.plan",
        "firecaffe.cli.bench",
        "pytest",
        "tests.made_once",
    ),
)
"""Modules. multiprocessing passes over one that cannot be imported."""


@cache
def fork_server() -> Any:
    """multiprocessing's context of a fork server that has loaded what takes long."""
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
        ranks from which no result is awaited; theirs is None. Raises: RankError with the traceback
        of the rank that failed first.
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
    ) -> list[Any]:
        """The same on ranks that other tests use too, which saves their start.

        For functions that leave nothing behind in their process but imports: whatever they join,
        patch or set they take back. Where one fails, or leaves a world joined, its ranks are not
        used again.
        """
        world = self._kept.pop(world_size, None) or _World(world_size, once=False)
        try:
            results = world.call(function, arguments, local_world_size or world_size)
        except BaseException:
            world.end()
            raise
        if world.is_left:
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
        context = fork_server()
        self._processes, self._pipes = [], []
        self.is_left = True
        """Whether all ranks have left what they joined in their last call."""
        self._stores: list[TCPStore] = []
        """Kept to the end: a rank knows a store by its port, so none may come again."""
        for _ in range(world_size):
            own, other = context.Pipe()
            process = context.Process(target=_main, args=(other, once))
            process.start()
            other.close()
            self._processes.append(process)
            self._pipes.append(own)

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
        return [
            None if rank in lost else self._result(rank, pipe)
            for rank, pipe in enumerate(self._pipes)
        ]

    def _result(self, rank: int, pipe: Connection) -> Any:
        if not pipe.poll(TIMEOUT_S):
            raise RankError(f"rank {rank}: no answer in {TIMEOUT_S:.0f} s")
        succeeded, value, is_left = pickle.loads(pipe.recv_bytes())
        self.is_left &= is_left
        if not succeeded:
            raise RankError(f"rank {rank}: {value}")
        return value

    def end(self, lost: Container[int] = ()) -> None:
        for pipe in self._pipes:
            pipe.close()
        for rank, process in enumerate(self._processes):
            process.join(0 if rank in lost else 1)
            process.kill()


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
        try:
            answer = True, function(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps((*answer, not dist.is_initialized())))
        if once:
            return
        # Process groups that hang in cycles keep threads that wake 100 times a second (Gloo's).
        gc.collect()
