"""A lane: a process group of two ranks, over which runs of bytes go to and fro.

A group of all ranks cannot lose one. Whoever has to go on without a rank has a lane to it, and that
one alone breaks. A lane is made by its two ends, whatever other ranks do meanwhile, in a store
under a name. It is Gloo's, so its bytes are in the host's memory; a GPU's are copied.
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
"""For an answer: who is slow is waited for, and who is lost the watch knows."""

CUT = timedelta(milliseconds=1)

DATA, NOTHING = 0, 1
"""Tags. Nothing is ever sent with the second."""


class Lane:
    """One end. Sends and receives of the two ends alternate alike."""

    def __init__(self, store: Store, name: str, is_first: bool, timeout_s: float) -> None:
        """Meets the other end. timeout_s: how long to wait for it.

        Raises: PeerLostError if it does not come.
        """
        self._other = int(is_first)
        self.sent_bytes = self.received_bytes = 0
        try:
            self._group: Any = ProcessGroupGloo(
                PrefixStore(f"lane/{name}", store),
                1 - self._other,
                2,
                timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise PeerLostError(f"no lane to another rank: {_reason(error)}") from error

    def send(self, data: Tensor) -> None:
        """Sends bytes: on the host, one after the other. Raises: PeerLostError."""
        _finish(lambda: self._group.send([data], self._other, DATA))
        self.sent_bytes += data.nbytes

    def receive(self, data: Tensor) -> None:
        """Receives as many bytes as are sent. Raises: PeerLostError."""
        _finish(lambda: self._group.recv([data], self._other, DATA))
        self.received_bytes += data.nbytes

    def cut(self) -> None:
        """Breaks the lane, from another thread than the one that waits at it: that one's wait ends
        with an error.
        """
        # An operation that is too late closes the connection under all others (torch 2.13).
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1)], self._other, NOTHING).wait(CUT)


def store_of(world: Group) -> Store:
    """The store of a world's ranks alone."""
    assert world.group is not None
    return _get_process_group_store(world.group)


def _finish(start: Callable[[], Work]) -> None:
    try:
        start().wait(FOREVER)
    except RuntimeError as error:  # Gloo's errors have no class of their own
        raise PeerLostError(f"another rank went away: {_reason(error)}") from error


def _reason(error: RuntimeError) -> str:
    return without_source(str(error))
