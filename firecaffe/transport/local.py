"""The ranks of one host: memory that they share, and a barrier that notices a lost rank.

Memory is anonymous (memfd) and passed over sockets, so a killed rank leaves nothing behind. Each
pair of ranks has a socket. A barrier is a number to and from each; the end of a process closes its
sockets, which wakes all that wait.
"""

import os
import select
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.errors import PeerLostError
from firecaffe.transport.local_sockets import NUMBER, connect_local


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of this host, consecutive in the world, and this one's place among them."""

    first_rank: int
    sockets: tuple[socket.socket | None, ...]
    """The socket to each local rank; None for this one."""
    world: Group

    @property
    def size(self) -> int:
        return len(self.sockets)

    @property
    def own(self) -> int:
        return self.sockets.index(None)

    def barrier(self) -> None:
        """Return when all local ranks have called it. Raises: PeerLostError about a missing one."""
        with peers_may_be_lost(self.world):
            self._meet()

    def _meet(self) -> None:
        self._to_all([])
        waiting = {peer.fileno(): peer for peer in self.sockets if peer is not None}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        # Not one by one, to see the end of a rank also while another is late.
        while waiting:
            first = next(iter(waiting.values()))
            timeout_s = first.gettimeout()
            ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
            if not ready:
                raise self._lost(self.sockets.index(first), TimeoutError())
            for descriptor, _ in ready:
                poll.unregister(descriptor)
                peer = waiting.pop(descriptor)
                self._receive(self.sockets.index(peer), peer, 0)

    def share(
        self, num_elements: int, dtype: torch.dtype, own: Tensor | None = None
    ) -> list[Tensor]:
        """Make one vector for each local rank, which all can read and write. Raises: PeerLostError.

        All local ranks call it in the same order. own: this rank's vector, which moves into shared
        memory with all its views; without it, or without room for it, one of zeros.
        """
        num_bytes = max(1, num_elements * dtype.itemsize)
        moved = None if own is None else _move(own)
        if moved is None:
            own = None
            descriptor = os.memfd_create("firecaffe", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, num_bytes)
        else:
            descriptor = os.dup(moved)
        by_rank = {self.own: descriptor}
        try:
            with peers_may_be_lost(self.world):
                self._to_all([descriptor])
                for local_rank, peer in enumerate(self.sockets):
                    if peer is not None:
                        [by_rank[local_rank]] = self._receive(local_rank, peer, 1)
            # By path, so that no descriptor stays open; there may be many vectors.
            paths = [f"/proc/self/fd/{by_rank[local_rank]}" for local_rank in range(self.size)]
            return [
                own
                if own is not None and local_rank == self.own
                else torch.from_file(path, shared=True, size=num_elements, dtype=dtype)
                for local_rank, path in enumerate(paths)
            ]
        finally:
            for each in by_rank.values():
                os.close(each)

    def close(self) -> None:
        """Close the sockets; shared vectors live on as long as they are held."""
        for peer in self.sockets:
            if peer is not None:
                peer.close()

    def _to_all(self, descriptors: list[int]) -> None:
        for local_rank, peer in enumerate(self.sockets):
            if peer is not None:
                try:
                    socket.send_fds(peer, [NUMBER.pack(self.own)], descriptors)
                except OSError as error:
                    raise self._lost(local_rank, error) from error

    def _receive(self, local_rank: int, peer: socket.socket, descriptors: int) -> list[int]:
        received: list[int] = []
        try:
            # The kernel closes any further descriptors.
            message, received, _, _ = socket.recv_fds(peer, NUMBER.size, descriptors)
            # A rank sends its own number, or that of a rank that it has lost.
            number = NUMBER.unpack(message)[0] if message else None
            if number == local_rank and len(received) == descriptors:
                return received
        except OSError as error:
            raise self._lost(local_rank, error) from error
        for each in received:
            os.close(each)
        raise self._lost(local_rank, None, None if number == local_rank else number)

    def _lost(
        self, local_rank: int, error: OSError | None, last_word: int | None = None
    ) -> PeerLostError:
        # A rank that has lost another ends too, so ask which one was first, and tell the others.
        if last_word is None:
            last_word = self._last_word(local_rank)
        for peer in self.sockets:
            if peer is not None:
                peer.setblocking(False)
                with suppress(OSError):
                    peer.send(NUMBER.pack(last_word))
        rank = self.world.in_world(self.first_rank + last_word)
        if last_word != local_rank:
            by = self.world.in_world(self.first_rank + local_rank)
            return PeerLostError(f"rank {rank}, on this host, was lost, says rank {by}")
        if isinstance(error, TimeoutError):
            return PeerLostError(f"rank {rank}, on this host, did not answer in time")
        return PeerLostError(f"rank {rank}, on this host, went away")

    def _last_word(self, local_rank: int) -> int:
        last = local_rank
        peer = self.sockets[local_rank]
        assert peer is not None
        peer.setblocking(False)
        with suppress(OSError):
            while message := peer.recv(NUMBER.size):
                [last] = NUMBER.unpack(message)
        return last


def _move(vector: Tensor) -> int | None:
    # The storage may hold more than this vector, and keeps the descriptor.
    storage = vector.untyped_storage()
    try:
        room = os.statvfs("/dev/shm")
        if storage.nbytes() > room.f_bavail * room.f_frsize or vector.storage_offset():
            return None
        descriptor: int = storage._share_fd_cpu_()[0]
    except (OSError, RuntimeError):
        return None
    return descriptor


def ranks_per_host(world: Group) -> int:
    """Return the ranks per host, the same on all ranks; 1 if hosts differ. All ranks call it."""
    size = world.local_world_size
    found = gather_text(world, f"{size} {world.rank - world.local_rank}")
    is_regular = found == [f"{size} {rank - rank % size}" for rank in range(world.world_size)]
    # A rank that finds them regular finds its own size in all of them.
    return size if is_regular and world.world_size % size == 0 else 1


def meet_local_ranks(world: Group, timeout_s: float) -> LocalRanks | None:
    """Connect the ranks that torchrun's LOCAL_WORLD_SIZE puts on one host. All ranks must call it.

    Return None, on all ranks, if hosts have one rank each or differ, or ranks cannot reach each
    other.
    """
    size = ranks_per_host(world)
    if size < 2 or not sys.platform.startswith("linux"):
        return None
    first = world.rank - world.local_rank
    sockets = connect_local(world, first, size, timeout_s)
    return None if sockets is None else LocalRanks(first, sockets, world)
