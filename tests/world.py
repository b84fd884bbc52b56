"""Real ranks for tests: processes of a fork server that has torch loaded, started in 0.1 s.

The parent holds the store in which the ranks meet, as torch's elastic agent does, so no port is
chosen before it is bound.
"""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Container
from multiprocessing.connection import Connection
from typing import Any

from torch._C._distributed_c10d import TCPStore

TIMEOUT_S = 120.0


class RankError(Exception):
    """A rank's exception, as (rank, its text)."""


class Ranks:
    """Runs a function on all ranks of a world and returns their results."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "torch.distributed", "torch._dynamo", "firecaffe.assemble"]
        )

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        local_world_size: int | None = None,
        lost: Container[int] = (),
    ) -> list[Any]:
        """`function(*arguments)` with torchrun's environment on each rank; results by rank.

        The function must be at the top of an importable module. local_world_size: ranks of each
        host, as they are told; by default all are on one. lost: ranks from which no result is
        awaited; theirs is None. Raises: RankError with the traceback of the rank that failed first.
        """
        on_host = local_world_size or world_size
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes, pipes = [], []
        for rank in range(world_size):
            receiver, sender = self._context.Pipe(duplex=False)
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
            process = self._context.Process(
                target=_main, args=(sender, environment, function, arguments)
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return [
                None if rank in lost else _result(rank, pipe) for rank, pipe in enumerate(pipes)
            ]
        finally:
            for rank, process in enumerate(processes):
                process.join(0 if rank in lost else 1)
                process.kill()


def _main(
    sender: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: Any
) -> None:
    os.environ.update(environment)
    try:
        # Plain pickle copies tensors; multiprocessing's would share memory that is gone by then.
        sender.send_bytes(pickle.dumps((True, function(*arguments))))
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    sender.close()


def _result(rank: int, pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise RankError(f"rank {rank}: no answer in {TIMEOUT_S:.0f} s")
    succeeded, value = pickle.loads(pipe.recv_bytes())
    if not succeeded:
        raise RankError(f"rank {rank}: {value}")
    return value
