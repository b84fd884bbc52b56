"""The links of the watch, for any number of ranks on any hosts; what goes to one that does not
read; and the process beside a rank.
"""

import ctypes
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import HashStore

from firecaffe.cluster import pulse
from firecaffe.cluster.links import (
    Links,
    connect_ranks,
    links_of,
)
from firecaffe.cluster.neighbors import (
    BEAT,
    BEATS,
    FAULT,
    HEADER,
    MAX_UNSENT_BYTES,
    PULSE,
    Neighbor,
    RankProgress,
    pack,
    take_messages,
)
from firecaffe.cluster.pulse import is_stopped, write
from firecaffe.cluster.world import run_pulse
from firecaffe.errors import LaunchError

PLACED = {
    "one host": lambda size: ["a"] * size,
    "one each": lambda size: [f"h{rank}" for rank in range(size)],
    "eight on each": lambda size: [f"h{rank // 8}" for rank in range(size)],
    "in turn": lambda size: [f"h{rank % 3}" for rank in range(size)],
    "uneven": lambda size: [f"h{rank.bit_length()}" for rank in range(size)],
}


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(LaunchError) as raised:
        connect_ranks(HashStore(), 0, 4, 0.2, one_host=True)
    assert re.findall(r"[0-9]+", str(raised.value)) == ["4", "1", "2", "3"]
    with pytest.raises(LaunchError):
        connect_ranks(HashStore(), 1, 4, 0.2, one_host=True)


def links(hosts: Sequence[str], fan_out: int) -> list[Links]:
    return [links_of(rank, hosts, fan_out) for rank in range(len(hosts))]


def parts(of: Sequence[Links], without: Set[int]) -> list[set[int]]:
    """Ranks that still reach each other."""
    left, found = set(range(len(of))) - without, []
    while left:
        part, waiting = set(), deque([left.pop()])
        while waiting:
            rank = waiting.popleft()
            part.add(rank)
            near = set(of[rank].ranks) & left
            left -= near
            waiting += near
        found.append(part)
    return found


@pytest.mark.parametrize("fan_out", [2, 3])
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("size", [*range(1, 10), 17, 40])
def test_every_news_reaches_every_rank(size: int, placed: str, fan_out: int) -> None:
    hosts = PLACED[placed](size)
    of = links(hosts, fan_out)
    # A parent, two siblings, and the children and grandchildren in a host's tree and the hosts'.
    most = 3 + 2 * (fan_out + fan_out**2)
    for rank, each in enumerate(of):
        assert len(each.ranks) == len(set(each.ranks)) <= most
        assert rank not in each.ranks
        for other in each.ranks:
            assert rank in of[other].ranks
        for child in each.children:
            assert of[child].parent == rank
    # One tree: a parent for each but the first, and all in one part.
    assert [rank for rank, each in enumerate(of) if each.parent is None] == [0]
    assert len(parts(of, set())) == 1
    firsts = {hosts.index(host) for host in hosts}
    for lost in range(size):
        beside = parts(of, {lost})
        if lost in firsts:  # its host's other ranks are apart, and all are linked with it
            assert all(part & set(of[lost].ranks) for part in beside)
            assert len(beside) <= 2
        else:
            assert len(beside) <= 1
    for host in set(hosts):
        assert len(parts(of, {rank for rank in range(size) if hosts[rank] == host})) <= 1


def test_only_first_ranks_are_linked_with_other_hosts_and_none_with_many() -> None:
    hosts = PLACED["eight on each"](64)
    for rank, each in enumerate(links(hosts, 2)):
        beyond = [other for other in each.ranks if hosts[other] != hosts[rank]]
        assert bool(beyond) == (rank % 8 == 0)
    for hosts in (PLACED["one each"](4096), PLACED["eight on each"](4096)):
        assert max(len(links_of(rank, hosts).ranks) for rank in (0, 1, 8, 16, 40, 4095)) <= 14


TEXT = b"x" * 70_000
PULSE_MESSAGE = pack(PULSE, RankProgress())
WAIT_S = 60.0
WRITE_ONCE = """
import sys
sys.path.insert(0, sys.argv[1])
import pulse
left = pulse.write(int(sys.argv[2]), b"", bytes.fromhex(sys.argv[3]))
assert not left
"""


Link = tuple[socket.socket, socket.socket]


@pytest.fixture
def link() -> Iterator[Link]:
    """Of a kind that takes a part of a message at once, and of one that is long always a part."""
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(TEXT) // 4)
        for each in (near, far):
            each.setblocking(False)
        yield near, far


def fill(of: Neighbor) -> int:
    """Sends until the kernel takes no more; returns how many messages."""
    count = 0
    while not of._unsent:
        of.send(pack(FAULT, RankProgress(count), text=TEXT))
        count += 1
    assert len(of._unsent) % len(pack(FAULT, RankProgress(), text=TEXT))  # one is begun
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


def test_a_message_that_was_begun_is_ended_before_the_next(link: Link) -> None:
    near, far = link
    of = Neighbor(near, 0.0)
    count = fill(of)
    found = read_all(far)
    write_beside(near)  # it is not its turn
    of.send(pack(BEAT, RankProgress(count)))
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


def test_what_is_kept_for_one_that_never_reads_has_a_bound(link: Link) -> None:
    """And nothing is kept for one that is gone."""
    near, far = link
    of = Neighbor(near, 0.0)
    for _ in range(fill(of) + 20):
        of.send(pack(FAULT, RankProgress(), text=TEXT))
    assert 0 < len(of._unsent) <= MAX_UNSENT_BYTES
    of.flush_until(time.monotonic())  # returns all the same
    far.close()
    of.flush_until(time.monotonic() + WAIT_S)
    assert not of._unsent


def test_a_pulse_that_was_begun_is_ended_before_the_next(link: Link) -> None:
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


LONG_MS = 60_000
SEIZE, INTERRUPT = 0x4206, 0x4207
"""Of <linux/ptrace.h>."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_it_beats_while_the_interpreters_lock_is_held_and_goes_when_it_is_not_needed() -> None:
    before = set(psutil.Process().children())
    near, far = socket.socketpair()
    with near, far:
        with run_pulse([near], BEATS * 0.01):
            assert len(set(psutil.Process().children()) - before) == 1
            # As a PyDLL's function, poll keeps the lock: no other thread of this process can send.
            wanted = ctypes.create_string_buffer(struct.pack("ihh", far.fileno(), select.POLLIN, 0))
            assert ctypes.PyDLL(None).poll(wanted, 1, LONG_MS) == 1
            (message,) = take_messages(bytearray(far.recv(HEADER.size)))
            assert message.kind == PULSE
        assert set(psutil.Process().children()) <= before


def test_who_is_stopped(child: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(child.pid)
    for number, then in ((signal.SIGSTOP, True), (signal.SIGCONT, False), (signal.SIGSTOP, True)):
        child.send_signal(number)
        os.waitpid(child.pid, os.WUNTRACED | os.WCONTINUED)
        assert is_stopped(child.pid) == then


def test_a_debugger_does_not_stop_it(child: subprocess.Popen[bytes]) -> None:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    if ptrace(SEIZE, child.pid, 0, 0) or ptrace(INTERRUPT, child.pid, 0, 0):
        pytest.skip(f"no process may be traced here: {os.strerror(ctypes.get_errno())}")
    os.waitpid(child.pid, 0)
    assert psutil.Process(child.pid).status() == psutil.STATUS_TRACING_STOP
    assert not is_stopped(child.pid)
