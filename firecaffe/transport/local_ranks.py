"""The ranks of one host: memory that they share, and a barrier that notices a lost rank.

Memory is anonymous (memfd) and passed over sockets, so a killed rank leaves nothing behind. In a
barrier, each rank sends a number to every other and receives one; the end of a process closes its
sockets, which wakes all.

Each rank listens in a folder that only its user may enter, both sides must be the same user
(`SO_PEERCRED`), and each must send the token that its rank has given the others over the process
group. Others are closed; the wait continues.
"""

import hmac
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from firecaffe.cluster.agree import gather_json, gather_text
from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.errors import PeerLostError
from firecaffe.files import private_folder
from firecaffe.output import say

NUMBER = struct.Struct("!I")
"""The local rank, as it is sent."""

TOKEN_BYTES = 32

CREDENTIALS = struct.Struct("iII")
"""Linux's ucred: process, user, group."""

NAME = "ranks"


def connect_local(
    world: Group, first: int, size: int, timeout_s: float
) -> dict[int, socket.socket] | None:
    """Connect the `size` ranks from `first` on, of which this is one. Raises: PeerLostError.

    All ranks of the world call it, and get sockets by local rank; or None, if some cannot be
    reached.
    """
    local_rank = world.rank - first
    with ExitStack() as opened, ExitStack() as meeting, ExitStack() as public:
        token, folder, failure = secrets.token_bytes(TOKEN_BYTES), "", ""
        try:
            folder = str(public.enter_context(private_folder("firecaffe-sockets-")))
            listener = meeting.enter_context(listening(folder))
        except OSError as error:
            failure = str(error)
        by_rank = gather_json(world, [folder, token.hex()])
        folders, tokens = zip(*by_rank[first : first + size], strict=True)
        hellos = [
            hello(number, bytes.fromhex(other_token)) for number, other_token in enumerate(tokens)
        ]
        sockets: dict[int, socket.socket] = {}
        try:
            for number in range(0 if failure else local_rank):
                peer = sockets[number] = opened.enter_context(reach(folders[number], timeout_s))
                peer.send(hellos[local_rank])
        except OSError as error:
            failure = str(error)
        # No rank waits for a connection that another could not make.
        failures = [text for text in gather_text(world, failure) if text]
        if failures:
            if world.is_first:
                say(f"ranks of one host share no memory, they send messages: {failures[0]}")
            return None
        public.close()  # all have connected
        with peers_may_be_lost(world):
            try:
                came = admit(
                    listener, dict(enumerate(hellos[local_rank + 1 :], local_rank + 1)), timeout_s
                )
                for number, peer in came:
                    sockets[number] = opened.enter_context(peer)
                    peer.send(hellos[local_rank])
                for number in range(local_rank):
                    check_answer(sockets[number], hellos[number])
            except OSError as error:
                raise PeerLostError(f"another rank of this host went away: {error}") from error
        opened.pop_all()  # from here on, the caller closes them
        return dict(sorted(sockets.items()))


def hello(number: int, token: bytes) -> bytes:
    return NUMBER.pack(number) + token


@contextmanager
def in_folder(folder: str) -> Iterator[str]:
    """Yield a short path to a folder's socket, because an address has 107 bytes at most."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)


@contextmanager
def listening(folder: str) -> Iterator[socket.socket]:
    """Open a socket that listens in a folder, for a `with` block. Raises: OSError."""
    # In packets, so that a message is complete or missing.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with in_folder(folder) as place:
            listener.bind(place)
        listener.setblocking(False)
        listener.listen(socket.SOMAXCONN)
        yield listener


def reach(folder: str, timeout_s: float) -> socket.socket:
    """Connect to this user's process that listens in a folder. Raises: OSError."""
    with ExitStack() as opened:
        peer = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        peer.settimeout(timeout_s)
        with in_folder(folder) as place:
            peer.connect(place)
        if not is_same_user(peer):
            raise PermissionError(f"another user listens in {folder}")
        opened.pop_all()
        return peer


def is_same_user(peer: socket.socket) -> bool:
    said = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(said)[1] == os.geteuid())


def admit(
    listener: socket.socket, expected: Mapping[int, bytes], timeout_s: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yield the expected ranks as they connect; close other connections. Raises: OSError."""
    missing, silent = dict(expected), dict[int, socket.socket]()
    until_s = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    try:
        while missing:
            ready = poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
            if not ready:
                waits_for = ", ".join(map(str, missing))
                raise TimeoutError(f"local rank {waits_for} did not come in {timeout_s:g} s")
            for descriptor, _ in ready:
                if descriptor == listener.fileno():
                    with suppress(BlockingIOError, ConnectionAbortedError):
                        comer, _ = listener.accept()
                        comer.setblocking(False)
                        silent[comer.fileno()] = comer
                        poll.register(comer, select.POLLIN)
                    continue
                poll.unregister(descriptor)
                comer = silent.pop(descriptor)
                number = identify_peer(comer, missing)
                if number is None:
                    comer.close()
                    continue
                del missing[number]
                comer.settimeout(timeout_s)
                yield number, comer
    finally:
        for comer in silent.values():
            comer.close()


def identify_peer(comer: socket.socket, expected: Mapping[int, bytes]) -> int | None:
    """Return the number of the rank that has connected; None if it is not expected."""
    try:
        said = comer.recv(NUMBER.size + TOKEN_BYTES + 1)
    except OSError:
        return None
    number: int = NUMBER.unpack_from(said)[0] if len(said) >= NUMBER.size else -1
    if number not in expected or not hmac.compare_digest(said, expected[number]):
        return None
    return number if is_same_user(comer) else None


def check_answer(peer: socket.socket, expected: bytes) -> None:
    if not hmac.compare_digest(peer.recv(len(expected)), expected):
        raise ConnectionError("what listens there is no rank of this run")


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of this host, consecutive in the world, and this one's place among them."""

    first_rank: int
    own: int
    sockets: dict[int, socket.socket]
    """The sockets to the others, by local rank."""
    world: Group

    @property
    def size(self) -> int:
        return 1 + len(self.sockets)

    def barrier(self) -> None:
        """Return when all local ranks have called it. Raises: PeerLostError about a missing one."""
        with peers_may_be_lost(self.world):
            self._meet()

    def _meet(self) -> None:
        self._to_all([])
        waiting = {peer.fileno(): local_rank for local_rank, peer in self.sockets.items()}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        # Poll all at once, to notice that a rank has ended even while another is late.
        while waiting:
            first = next(iter(waiting.values()))
            timeout_s = self.sockets[first].gettimeout()
            ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
            if not ready:
                raise self._lost(first, TimeoutError())
            for descriptor, _ in ready:
                poll.unregister(descriptor)
                self._receive(waiting.pop(descriptor), 0)

    def share(
        self, num_elements: int, dtype: torch.dtype, own: Tensor | None = None
    ) -> list[Tensor]:
        """Make one vector for each local rank, which all can read and write. Raises: PeerLostError.

        All local ranks call it in the same order. own: this rank's vector, which moves into shared
        memory with all its views; without it, or without room for it, the new vector is zeros.
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
                for local_rank in self.sockets:
                    [by_rank[local_rank]] = self._receive(local_rank, 1)
            # Map by path, so that no descriptor stays open; there may be many vectors.
            paths = [f"/proc/self/fd/{by_rank[local_rank]}" for local_rank in range(self.size)]
            return [
                own
                if own is not None and local_rank == self.own
                else torch.from_file(path, shared=True, size=num_elements, dtype=dtype)
                for local_rank, path in enumerate(paths)
            ]
        finally:
            for open_descriptor in by_rank.values():
                os.close(open_descriptor)

    def close(self) -> None:
        for peer in self.sockets.values():
            peer.close()

    def _to_all(self, descriptors: list[int]) -> None:
        for local_rank, peer in self.sockets.items():
            try:
                socket.send_fds(peer, [NUMBER.pack(self.own)], descriptors)
            except OSError as error:
                raise self._lost(local_rank, error) from error

    def _receive(self, local_rank: int, descriptors: int) -> list[int]:
        received: list[int] = []
        try:
            # The kernel closes any further descriptors.
            peer = self.sockets[local_rank]
            message, received, _, _ = socket.recv_fds(peer, NUMBER.size, descriptors)
            # A rank sends its own number, or that of a rank that it has lost.
            number = NUMBER.unpack(message)[0] if message else None
            if number == local_rank and len(received) == descriptors:
                return received
        except OSError as error:
            raise self._lost(local_rank, error) from error
        for descriptor in received:
            os.close(descriptor)
        raise self._lost(local_rank, None, None if number == local_rank else number)

    def _lost(
        self, local_rank: int, error: OSError | None, last_word: int | None = None
    ) -> PeerLostError:
        # A rank that loses another ends, too. So read which rank was lost first, and pass it on.
        if last_word is None:
            last_word = self._last_word(local_rank)
        for peer in self.sockets.values():
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
        last, peer = local_rank, self.sockets[local_rank]
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
    stated = gather_text(world, f"{size} {world.rank - world.local_rank}")
    is_regular = stated == [f"{size} {rank - rank % size}" for rank in range(world.world_size)]
    # If hosts are regular on one rank, all ranks have its size, so all return the same.
    return size if is_regular and world.world_size % size == 0 else 1


def meet_local_ranks(world: Group, timeout_s: float) -> LocalRanks | None:
    """Connect the ranks that LOCAL_WORLD_SIZE puts on one host. All ranks must call it.

    Return None, on all, if hosts have one rank each or differ, or ranks cannot reach each other.
    """
    size = ranks_per_host(world)
    if size < 2 or not sys.platform.startswith("linux"):
        return None
    first = world.rank - world.local_rank
    sockets = connect_local(world, first, size, timeout_s)
    return None if sockets is None else LocalRanks(first, world.local_rank, sockets, world)
