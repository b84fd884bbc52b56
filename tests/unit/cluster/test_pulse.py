"""The process beside a rank: what it takes for a stopped one, and that it needs nothing of it."""

import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from firecaffe.cluster.pulse import is_stopped
from firecaffe.cluster.pulse_process import pulse_beside
from firecaffe.cluster.verdict import BEATS
from firecaffe.cluster.watch_message import HEADER, PULSE, take_messages

LONG_MS = 60_000
SEIZE, INTERRUPT = 0x4206, 0x4207
"""Of <linux/ptrace.h>."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def test_it_beats_while_the_interpreters_lock_is_held() -> None:
    near, far = socket.socketpair()
    with near, far, pulse_beside([near], BEATS * 0.01):
        # As a PyDLL's function, poll keeps the lock: no other thread of this process can send.
        wanted = ctypes.create_string_buffer(struct.pack("ihh", far.fileno(), select.POLLIN, 0))
        assert ctypes.PyDLL(None).poll(wanted, 1, LONG_MS) == 1
        (message,) = take_messages(bytearray(far.recv(HEADER.size)))
        assert message.kind == PULSE


def test_it_goes_when_it_is_not_needed() -> None:
    before = set(psutil.Process().children())
    near, far = socket.socketpair()
    with near, far:
        with pulse_beside([near], BEATS * 0.01):
            assert len(set(psutil.Process().children()) - before) == 1
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
