"""Ranks of one host: memory that they share, and a barrier that notices who is gone.

Memory is anonymous (memfd), passed from process to process over sockets: it has no name, so a
rank that is killed leaves nothing behind. Each pair of ranks has one such socket; a barrier is one
byte to and from everybody, and the end of a process closes its sockets, which wakes whoever waits.
"""

import mmap
import os
import socket
import sys
import uuid
from dataclasses import dataclass

import torch
from torch import Tensor

from firecaffe.comm.agree import gather_text
from firecaffe.comm.world import World
from firecaffe.errors import PeerLostError


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of this host, consecutive in the world, and this one's place among them."""

    first_rank: int
    sockets: tuple[socket.socket | None, ...]
    """To each local rank; None to itself."""

    @property
    def size(self) -> int:
        return len(self.sockets)

    @property
    def own(self) -> int:
        return self.sockets.index(None)

    def barrier(self) -> None:
        """Returns when all local ranks have called it.

        Raises: PeerLostError that names a rank which is gone, or did not come in time.
        """
        self._to_all(b".")
        for local_rank, peer in enumerate(self.sockets):
            if peer is not None:
                self._receive(local_rank, peer)

    def share(self, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
        """One vector of zeros for each local rank, which all of them can read and write.

        Every local rank must call it, in the same order.
        """
        num_bytes = max(1, num_elements * dtype.itemsize)
        descriptor = os.memfd_create("firecaffe", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        descriptors = []
        for peer in self.sockets:
            if peer is not None:
                socket.send_fds(peer, [b"."], [descriptor])
        for local_rank, peer in enumerate(self.sockets):
            if peer is None:
                descriptors.append(descriptor)
                continue
            try:
                _, received, _, _ = socket.recv_fds(peer, 1, 1)
            except OSError as error:
                raise self._lost(local_rank, error) from error
            if not received:
                raise self._lost(local_rank, None)
            descriptors.append(received[0])
        vectors = []
        for each in descriptors:
            memory = mmap.mmap(each, num_bytes)
            os.close(each)
            vectors.append(torch.frombuffer(memory, dtype=dtype, count=num_elements))
        return vectors

    def close(self) -> None:
        """Closes the sockets; shared vectors live on as long as someone holds them."""
        for peer in self.sockets:
            if peer is not None:
                peer.close()

    def _to_all(self, message: bytes) -> None:
        for local_rank, peer in enumerate(self.sockets):
            if peer is not None:
                try:
                    peer.sendall(message)
                except OSError as error:
                    raise self._lost(local_rank, error) from error

    def _receive(self, local_rank: int, peer: socket.socket) -> None:
        try:
            message = peer.recv(1)
        except OSError as error:
            raise self._lost(local_rank, error) from error
        if not message:
            raise self._lost(local_rank, None)

    def _lost(self, local_rank: int, error: OSError | None) -> PeerLostError:
        rank = self.first_rank + local_rank
        if isinstance(error, TimeoutError):
            return PeerLostError(f"rank {rank}, on this host, did not answer in time")
        return PeerLostError(f"rank {rank}, on this host, went away")


def meet_local_ranks(world: World, timeout_s: float) -> LocalRanks | None:
    """Connects the ranks that torchrun's LOCAL_WORLD_SIZE puts on one host.

    None, on all ranks of the world, where hosts have one rank each or not the same number, or where
    ranks that should share a host cannot reach each other. Every rank must call it.
    """
    size = world.local_world_size
    facts = gather_text(world, f"{size} {world.rank - world.local_rank}")
    regular = [f"{size} {rank - rank % size}" for rank in range(world.world_size)]
    if size < 2 or facts != regular or not sys.platform.startswith("linux"):
        return None
    first = world.rank - world.local_rank
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # A leading zero: a name that is in no file system and goes with its socket.
    name = f"\0firecaffe-{uuid.uuid4().hex}"
    listener.bind(name)
    listener.listen(size)
    listener.settimeout(timeout_s)
    names = gather_text(world, name)[first : first + size]
    sockets: list[socket.socket | None] = [None] * size
    failure = ""
    try:
        for local_rank in range(world.local_rank):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.settimeout(timeout_s)
            sockets[local_rank] = peer
            peer.connect(names[local_rank])
            peer.sendall(bytes([world.local_rank]))
    except OSError as error:
        failure = str(error)
    # Nobody waits for a connection that another could not make.
    if any(gather_text(world, failure)):
        for peer_or_none in sockets:
            if peer_or_none is not None:
                peer_or_none.close()
        listener.close()
        return None
    for _ in range(world.local_rank + 1, size):
        peer, _ = listener.accept()
        peer.settimeout(timeout_s)
        sockets[peer.recv(1)[0]] = peer
    listener.close()
    return LocalRanks(first, tuple(sockets))
