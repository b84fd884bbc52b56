"""Starts the process that sends beats next to this one's watch, over the same sockets."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from firecaffe.cluster import pulse
from firecaffe.cluster.verdict import beat_s
from firecaffe.cluster.watch_message import PULSE, WatchedPlace, pack
from firecaffe.errors import LaunchError

LIBRARIES = ("LD_LIBRARY_PATH",)


@contextmanager
def pulse_beside(sockets: Iterable[socket.socket], silent_s: float) -> Iterator[None]:
    """Run `cluster.pulse` as a process for a `with` block. Raises: LaunchError."""
    if not sys.platform.startswith("linux"):  # other kernels do not say who is stopped
        yield
        return
    numbers = [peer.fileno() for peer in sockets]
    arguments = [os.getpid(), beat_s(silent_s), pack(PULSE, WatchedPlace()).hex(), *numbers]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", pulse.__file__, *map(str, arguments)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # It is no rank. But an interpreter may need the path of its libraries.
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
