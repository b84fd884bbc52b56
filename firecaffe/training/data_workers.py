"""Worker processes that make a torch data set's items for one rank, and the pipes of their batches.

Bytes are sent, because shared memory is small in containers. Python does not copy them: pickled
tensors would cost the rank several times as much.

A new server process forks the workers (`forkserver`), so they hold none of the rank's sockets: a
child with a socket would hide that its rank is gone. A worker ends when its pipe or its rank does.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Buffer

from firecaffe.cluster.process_settings import oom_kill_count
from firecaffe.data import Data, Dataset
from firecaffe.data.dataset import Batch
from firecaffe.data.datasets import DatasetSubset
from firecaffe.data.own_data import CheckedSet
from firecaffe.data.torch_set import Items, TorchSet
from firecaffe.errors import (
    DataError,
    FirecaffeError,
    MemoryFullError,
    OwnCodeError,
    RecipeError,
    WorkerKilledError,
    memory_full,
)
from firecaffe.user_code import failed


def send_batch(pipe: Connection, batch: Batch) -> None:
    outline = tree_map(_outline, batch)
    content = pickle.dumps((True, outline))  # before anything is sent, because it may fail
    pipe.send_bytes(content)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            _move_all(os.writev, pipe.fileno(), leaf.detach().cpu())


@dataclass(frozen=True)
class _Spec:
    # With strides, because they may change the bits of what is computed from a tensor.
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def receive_batch(pipe: Connection, outline: Any) -> Batch:
    """Receive what `send_batch` sends after its outline. Raises: EOFError if the sender is gone."""

    def received(leaf: Any) -> Any:
        if not isinstance(leaf, _Spec):
            return leaf
        tensor = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype)
        _move_all(os.readv, pipe.fileno(), tensor)
        return tensor

    batch: Batch = tree_map(received, outline)
    return batch


def _outline(leaf: Any) -> Any:
    return _Spec(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _move_all(move: Any, descriptor: int, tensor: Tensor) -> None:
    # The tensor is dense: `Items.make` returns no others.
    if not tensor.numel():
        return
    run = torch.as_strided(tensor, (tensor.numel(),), (1,))
    left = memoryview(cast(Buffer, run.view(torch.uint8).numpy()))
    while left:
        moved = move(descriptor, [left])
        if not moved:
            raise EOFError
        left = left[moved:]


PRELOADED = "firecaffe.training.data_workers"
"""The module that the server loads once for all workers, with torch."""

EXIT_WAIT_S = 5.0
"""Seconds that a process has to end after its pipe is closed."""

# All processes of a job receive these. The rank still finishes its step then, and needs data.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def data_workers(data: Data) -> Iterator[None]:
    """Let workers make items for the torch sets that ask for them, within the block only."""
    with ExitStack() as pools:
        for dataset in torch_sets(data):
            if dataset.workers:
                pool = pools.enter_context(closing(DataWorkers(dataset.items, dataset.workers)))
                dataset.make_elsewhere(pool.make)
        yield


def check_not_in_worker() -> None:
    """Raise RecipeError in a worker that imports the training script to find its classes."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RecipeError(
            "the script trains when it is imported, and data workers import it; put what trains "
            'under if __name__ == "__main__":'
        )


def torch_sets(data: Data) -> Iterator[TorchSet]:
    sets: list[TorchSet] = []
    for part in data.parts.values():
        inner: Dataset = part
        while isinstance(inner, CheckedSet | DatasetSubset):
            inner = inner.dataset
        if isinstance(inner, TorchSet) and not any(inner is other for other in sets):
            sets.append(inner)
    yield from sets


class DataWorkers:
    """A pool of `count` processes that make batches. Several threads may use it at once."""

    def __init__(self, items: Items, count: int) -> None:
        self.items, self.count = items, count
        self._processes: dict[Connection, BaseProcess] = {}
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self._starting = threading.Lock()
        self._is_closed = False
        self._content = b""
        # workers that have the data set
        self._told: set[Connection] = set()
        self._killed_before = oom_kill_count()

    def make(self, samples: Sequence[int], seed: int, epoch: int) -> Batch:
        """Make a batch as `Items.make` does, in the first worker that is free.

        Raises: OwnCodeError and DataError as `Items.make`; DataError if the worker exits;
        WorkerKilledError or MemoryFullError if a signal ends it.
        """
        with self._starting:
            if self._is_closed:
                raise DataError(f"{self.items.name}: its data workers have ended")
            if not self._processes:
                self._start()
        pipe = self._idle.get()
        try:
            if pipe not in self._told:
                pipe.send_bytes(self._content)
                self._told.add(pipe)
            pipe.send_bytes(pickle.dumps((list(samples), seed, epoch)))
            succeeded, value = pickle.loads(pipe.recv_bytes())
            if succeeded:
                return receive_batch(pipe, value)
        except (EOFError, OSError) as error:
            raise self._gone(pipe, samples) from error
        finally:
            self._idle.put(pipe)
        kind, message, traceback = value
        again: FirecaffeError = kind(message)
        if isinstance(again, OwnCodeError):
            again.remote_traceback = traceback
        raise again

    def _start(self) -> None:
        """Start the workers. Raises: WorkerKilledError if the server that forks them is gone."""
        self._content = self.items.pickled()
        try:
            with _signals_blocked():  # for the server, too, which they would end while it loads
                self._fork_workers()
        except (EOFError, ConnectionError) as error:
            raise WorkerKilledError(
                f"{self.items.name}: the process that starts its data workers was killed before "
                "they were there; with workers=0 the training makes its samples itself"
            ) from error

    def _fork_workers(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        for _ in range(self.count):
            local_end, other = context.Pipe()
            process = context.Process(target=work, args=(other,), daemon=True)
            process.start()
            other.close()
            self._processes[local_end] = process
            self._idle.put(local_end)

    def _gone(self, pipe: Connection, samples: Sequence[int]) -> FirecaffeError:
        process = self._processes[pipe]
        process.join(EXIT_WAIT_S)
        code = process.exitcode
        kind: type[FirecaffeError] = DataError
        how = f"exited with {code}"
        if code is not None and code < 0:
            kind, how = WorkerKilledError, f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and oom_kill_count() > self._killed_before:
            kind, how = MemoryFullError, "was killed by the kernel for its memory"
        some = ", ".join(map(str, samples[:3])) + (", …" if len(samples) > 3 else "")
        return kind(
            f"{self.items.name}: a data worker (process {process.pid}) {how} when it was to make "
            f"samples {some}; with workers=0 the training makes them itself"
        )

    def close(self) -> None:
        with self._starting:
            self._is_closed = True
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    # In this thread only, and in the processes that it starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def work(pipe: Connection) -> None:
    """Run a worker: receive the data set, then make batches until the rank is gone."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    threading.Thread(target=_end_with_rank, daemon=True).start()
    torch.set_num_threads(1)
    items: Items | None = None
    try:
        content = pipe.recv_bytes()
        while True:
            task = pipe.recv_bytes()
            try:
                items = items or pickle.loads(content)
                batch = items.make(*pickle.loads(task))
            except Exception as error:
                pipe.send_bytes(pickle.dumps((False, _told(error))))
            else:
                send_batch(pipe, batch)
    except (EOFError, OSError):
        return


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


def _told(error: Exception) -> tuple[type[FirecaffeError], str, str]:
    error = memory_full(error) or error
    if not isinstance(error, FirecaffeError):
        failure = failed("a data worker", error)
        failure.__cause__ = error
        error = failure
    traceback = error.traceback if isinstance(error, OwnCodeError) else ""
    return type(error), str(error), traceback
