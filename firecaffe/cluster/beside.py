"""Starts the process that beats beside this one's watch, over the same sockets."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from firecaffe.cluster import pulse
from firecaffe.cluster.message import PULSE, Place, pack
from firecaffe.cluster.verdict import beat_s
from firecaffe.errors import LaunchError

LIBRARIES = ("LD_LIBRARY_PATH",)


@contextmanager
def pulse_beside(sockets: Iterable[socket.socket], silent_s: float) -> Iterator[None]:
    """Runs `cluster.pulse` as a process for the length of a `with` block.

    Raises: LaunchError if it cannot be started.
    """
    if not sys.platform.startswith("linux"):  # only there the kernel says who is stopped
        yield
        return
    numbers = [each.fileno() for each in sockets]
    words = [os.getpid(), beat_s(silent_s), pack(PULSE, Place()).hex(), *numbers]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", pulse.__file__, *map(str, words)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # It is no rank. And an interpreter may need to be told where its libraries are.
            env={name: os.environ[name] for name in LIBRARIES if name in os.environ},
            start_new_session=True,  # a terminal's signals are for the rank
        )
    except OSError as error:
        raise LaunchError(f"no process can be started beside the rank: {error}") from error
    try:
        yield
    finally:
        process.kill()
        process.wait()
