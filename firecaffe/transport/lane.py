"""Lanes and meshes: Gloo groups through which two ranks send bytes to each other.

A Gloo group breaks if a rank of it is lost. A rank that may be lost has lanes to the others, groups
of two that break alone, made by a name in a store. If all ranks are needed anyway, a mesh connects
every pair. Bytes are on the host; a GPU's are copied.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work
from torch.distributed.distributed_c10d import _get_process_group_store

from firecaffe.cluster.group import Group
from firecaffe.cluster.groups import without_source
from firecaffe.errors import PeerLostError

FOREVER = timedelta(days=30)
"""The time-out of an operation: slow ranks are waited for, and the watch reports lost ones."""

CUT = timedelta(milliseconds=1)

DATA, NOTHING = 0, 1
"""Tags. Nothing is ever sent with NOTHING; a mesh may have other tags, from 2 on."""


class Line:
    """A connection to another rank of a Gloo group. Bytes of one tag arrive in order."""

    def __init__(self, group: Any, other: int, send_tag: int = DATA, receive_tag: int = DATA):
        """Use a Gloo group. On rank `other`, the line's other end has the two tags swapped."""
        self._group, self._other = group, other
        self._tags = send_tag, receive_tag
        self.sent_bytes = self.received_bytes = 0

    def send(self, data: Tensor) -> None:
        """Send contiguous bytes on the host. Raises: PeerLostError."""
        self.begin_send(data)()

    def receive(self, data: Tensor) -> None:
        """Receive into `data`, as long as what is sent. Raises: PeerLostError."""
        self.begin_receive(data)()

    def begin_send(self, data: Tensor) -> Callable[[], None]:
        """Begin to send; return a function that waits for the end. Do not change `data` before."""
        wait = _begin(lambda: self._group.send([data], self._other, self._tags[0]))

        def finish() -> None:
            wait()
            self.sent_bytes += data.nbytes

        return finish

    def begin_receive(self, data: Tensor) -> Callable[[], None]:
        wait = _begin(lambda: self._group.recv([data], self._other, self._tags[1]))

        def finish() -> None:
            wait()
            self.received_bytes += data.nbytes

        return finish

    def cut(self) -> None:
        """Break the connection, so that another thread's wait ends with an error."""
        # An operation that times out closes the connection for all others (torch 2.13).
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1)], self._other, NOTHING).wait(CUT)


class Lane(Line):
    """One end of a group of two ranks, whose sends and receives alternate."""

    def __init__(self, store: Store, name: str, is_first: bool, timeout_s: float) -> None:
        """Connect to the other end. Raises: PeerLostError if it does not connect in time."""
        rank = int(not is_first)
        super().__init__(_group(PrefixStore(f"lane/{name}", store), rank, 2, timeout_s), 1 - rank)


class LaneMesh:
    """Lines between any two ranks of a world, in one group: if one line is lost, all are."""

    def __init__(
        self, store: Store, name: str, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Connect to all other ranks. Raises: PeerLostError if one does not connect in time."""
        self.rank, self.others = rank, [other for other in range(world_size) if other != rank]
        lane_store = PrefixStore(f"mesh/{name}", store)
        self._group = _group(lane_store, rank, world_size, timeout_s)

    def line(self, other: int, send_tag: int, receive_tag: int) -> Line:
        return Line(self._group, other, send_tag, receive_tag)

    def cut(self) -> None:
        """Break all connections of this rank, from another thread than those that wait."""
        for other in self.others:
            self.line(other, DATA, DATA).cut()


def _group(store: Store, rank: int, size: int, timeout_s: float) -> ProcessGroupGloo:
    try:
        return ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLostError(f"no lane to another rank: {_reason(error)}") from error


def store_of(world: Group) -> Store:
    assert world.group is not None
    return _get_process_group_store(world.group)


def _begin(start: Callable[[], Work]) -> Callable[[], None]:
    work: list[Work] = []
    _named(lambda: work.append(start()))
    return lambda: _named(lambda: work[0].wait(FOREVER))


def _named(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:  # Gloo's errors have no class of their own
        raise PeerLostError(f"another rank went away: {_reason(error)}") from error


def _reason(error: RuntimeError) -> str:
    return without_source(str(error))
