"""Sockets between the ranks of one host, which nobody else gets.

They carry the memory in which gradients are. So each rank listens in a folder that only its user
may enter, the other side must be the same user (`SO_PEERCRED`), and both must say what their ranks
have told the others over the process group. Others are turned away; the wait continues.
"""

import hmac
import json
import os
import secrets
import select
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.cluster.hosts import say
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.errors import PeerLostError

NUMBER = struct.Struct("!I")
"""The number of a rank on its host, as it is sent."""

TOKEN_BYTES = 32

CREDENTIALS = struct.Struct("iII")
"""Linux's ucred: process, user, group."""

NAME = "ranks"


def connect_local(
    world: Group, first: int, size: int, timeout_s: float
) -> tuple[socket.socket | None, ...] | None:
    """Connect the `size` ranks from `first` on, of which this is one. Raises: PeerLostError.

    All ranks of the world call it. Return the socket to each, None for this one; or None, on all
    ranks of the world, if some cannot reach each other.
    """
    own = world.rank - first
    with ExitStack() as opened, ExitStack() as meeting, ExitStack() as public:
        token, folder, failure = secrets.token_bytes(TOKEN_BYTES), "", ""
        try:
            folder = public.enter_context(tempfile.TemporaryDirectory(prefix="firecaffe-"))
            listener = meeting.enter_context(listening(folder))
        except OSError as error:
            failure = str(error)
        told = [json.loads(each) for each in gather_text(world, json.dumps([folder, token.hex()]))]
        folders, tokens = zip(*told[first : first + size], strict=True)
        hellos = [hello(number, bytes.fromhex(each)) for number, each in enumerate(tokens)]
        sockets: dict[int, socket.socket] = {}
        try:
            for number in range(0 if failure else own):
                peer = sockets[number] = opened.enter_context(reach(folders[number], timeout_s))
                peer.send(hellos[own])
        except OSError as error:
            failure = str(error)
        # No rank waits for a connection that another could not make.
        failures = [each for each in gather_text(world, failure) if each]
        if failures:
            if world.is_first:
                say(f"ranks of one host share no memory, they send messages: {failures[0]}")
            return None
        public.close()  # all have connected
        with peers_may_be_lost(world):
            try:
                came = let_in(listener, dict(enumerate(hellos[own + 1 :], own + 1)), timeout_s)
                for number, peer in came:
                    sockets[number] = opened.enter_context(peer)
                    peer.send(hellos[own])
                for number in range(own):
                    check_answer(sockets[number], hellos[number])
            except OSError as error:
                raise PeerLostError(f"another rank of this host went away: {error}") from error
        opened.pop_all()  # from here on their holder closes them
        return tuple(sockets.get(number) for number in range(size))


def hello(number: int, token: bytes) -> bytes:
    return NUMBER.pack(number) + token


@contextmanager
def in_folder(folder: str) -> Iterator[str]:
    """Yield a short path of a folder's socket, because an address has 107 bytes at most."""
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


def let_in(
    listener: socket.socket, expected: Mapping[int, bytes], timeout_s: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yield the expected ranks as they connect; turn others away. Raises: OSError."""
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
                number = who_says(comer, missing)
                if number is None:
                    comer.close()
                    continue
                del missing[number]
                comer.settimeout(timeout_s)
                yield number, comer
    finally:
        for comer in silent.values():
            comer.close()


def who_says(comer: socket.socket, expected: Mapping[int, bytes]) -> int | None:
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
    """Check that the rank that was reached says what is expected. Raises: OSError."""
    if not hmac.compare_digest(peer.recv(len(expected)), expected):
        raise ConnectionError("what listens there is no rank of this run")
