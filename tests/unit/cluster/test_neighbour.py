"""What goes to a linked rank that does not read: it reads whole messages later, in their order."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from firecaffe.cluster import pulse
from firecaffe.cluster.links import MOST_UNSENT_BYTES, Neighbour
from firecaffe.cluster.pulse import write
from firecaffe.cluster.watch_message import BEAT, FAULT, PULSE, Place, pack, take_messages

TEXT = b"x" * 70_000
PULSE_MESSAGE = pack(PULSE, Place())
WAIT_S = 60.0

WRITE_ONCE = """
import sys
sys.path.insert(0, sys.argv[1])
import pulse
left = pulse.write(int(sys.argv[2]), b"", bytes.fromhex(sys.argv[3]))
assert not left
"""


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Of a kind that takes a part of a message at once, and of one that is long always a part."""
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(TEXT) // 4)
        for each in (near, far):
            each.setblocking(False)
        yield near, far


def fill(of: Neighbour) -> int:
    """Sends until the kernel takes no more; returns how many messages."""
    count = 0
    while not of._unsent:
        of.send(pack(FAULT, Place(count), text=TEXT))
        count += 1
    assert len(of._unsent) % len(pack(FAULT, Place(), text=TEXT))  # one is begun
    return count


def read_all(far: socket.socket) -> bytes:
    found = b""
    while True:
        try:
            found += far.recv(1 << 20)
        except BlockingIOError:
            return found


def read_to_the_end(far: socket.socket) -> bytes:
    far.setblocking(True)
    with far.makefile("rb") as file:
        return file.read()


def write_beside(near: socket.socket) -> None:
    """A pulse by another process."""
    folder, number = str(Path(pulse.__file__).parent), near.fileno()
    command = [sys.executable, "-ISc", WRITE_ONCE, folder, str(number), PULSE_MESSAGE.hex()]
    subprocess.run(command, pass_fds=[number], check=True)


def test_a_message_that_was_begun_is_ended_before_the_next(
    link: tuple[socket.socket, socket.socket],
) -> None:
    near, far = link
    of = Neighbour(near, 0.0)
    count = fill(of)
    found = read_all(far)
    write_beside(near)  # it is not its turn
    of.send(pack(BEAT, Place(count)))
    end_s = time.monotonic() + WAIT_S
    while of._unsent:
        found += read_all(far)
        of.flush_until(min(end_s, time.monotonic() + 0.01))
    write_beside(near)
    near.close()
    found += read_to_the_end(far)
    messages = take_messages(bytearray(found))
    assert [each.kind for each in messages] == [FAULT] * count + [BEAT, PULSE]
    assert [each.step for each in messages] == [*range(count + 1), 0]
    assert all(each.text == TEXT for each in messages[:count])


def test_what_is_kept_for_one_that_never_reads_has_a_bound(
    link: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = link
    of = Neighbour(near, 0.0)
    for _ in range(fill(of) + 20):
        of.send(pack(FAULT, Place(), text=TEXT))
    assert 0 < len(of._unsent) <= MOST_UNSENT_BYTES
    of.flush_until(time.monotonic())  # returns all the same


def test_nothing_is_kept_for_one_that_is_gone(link: tuple[socket.socket, socket.socket]) -> None:
    near, far = link
    of = Neighbour(near, 0.0)
    fill(of)
    far.close()
    of.flush_until(time.monotonic() + WAIT_S)
    assert not of._unsent


def test_a_pulse_that_was_begun_is_ended_before_the_next(
    link: tuple[socket.socket, socket.socket],
) -> None:
    near, far = link
    left, count, message = b"", 0, PULSE_MESSAGE + TEXT
    while not left:
        left = write(near.fileno(), b"", message)
        count += 1
        assert count < 10_000
    assert len(left) < len(message)
    found = read_all(far)
    while left:
        left = write(near.fileno(), left, message)
        found += read_all(far)
    near.close()
    found += read_to_the_end(far)
    assert found == message * count
