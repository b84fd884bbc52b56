"""The secret of a run: who knows it belongs to the run; see SECURITY.md.

Ranks have it from their launcher, in their environment, which their user alone can read. A launcher
of one host makes one by itself; those of several hosts are given the same.
"""

import os
import secrets
import stat
from collections.abc import Mapping

from firecaffe.errors import LaunchError

SECRET = "FIRECAFFE_SECRET"
"""An environment variable: the secret itself."""

LEAST = 16
"""Characters of a secret, at least."""

MOST_BYTES = 4096

HOW = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"


def own_secret(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret in this process's environment; None without one.

    Raises: LaunchError if it is too short to be one.
    """
    text = environment.get(SECRET)
    return None if text is None else _checked(text, SECRET)


def secret_of(path: str, one_host: bool) -> bytes:
    """The secret of a launch. path: `--secret-file`, or empty: then it is that of the environment,
    or on one host one that nobody else knows.

    Raises: LaunchError if several hosts have none, or it is none.
    """
    found = read_secret(path) if path else own_secret()
    if found is not None:
        return found
    if not one_host:
        raise LaunchError(
            f"several hosts need a secret, the same on all: --secret-file FILE, or {SECRET}; {HOW}"
        )
    return secrets.token_hex(32).encode()


def read_secret(path: str) -> bytes:
    """Reads a file with a secret.

    Raises: LaunchError if it cannot be read, others can read it, or it holds none.
    """
    word = f"--secret-file {path}"
    try:
        # A pipe that nobody writes to would not be opened.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise LaunchError(f"{word} is not a regular file; {HOW}")
            if status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise LaunchError(
                    f"{word} has mode {mode:04o}, so others may read it or write to it; "
                    f"it must be 0600 (chmod 600 {path})"
                )
            text = file.read(MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LaunchError(f"{word} cannot be read: {reason}; {HOW}") from error
    return _checked(text, word)


def _checked(text: str, word: str) -> bytes:
    text = text.strip()
    if len(text) < LEAST:
        raise LaunchError(
            f"{word} holds {len(text)} characters; a secret has at least {LEAST}; {HOW}"
        )
    return os.fsencode(text)
