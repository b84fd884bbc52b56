"""Another program, run to its end without questions; what it complains of is an error of ours."""

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from firecaffe.errors import DataError

_TIMEOUT_S = 300


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What most programs say last: why they ended."""
    return (done.stderr.strip().splitlines() or ["no message"])[-1]


def run_command(
    command: Sequence[str],
    work: Path,
    shown: str,
    complaint: Callable[[subprocess.CompletedProcess[str]], str] = last_line,
) -> None:
    """Run it in the folder `work`.

    shown: the command as an error names it. complaint: why it failed, in one line.

    Raises:
        DataError: it cannot be started, takes too long, or fails.
    """
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{shown} took more than {_TIMEOUT_S} s") from None
    except OSError as error:
        raise DataError(f"{shown}: {error.strerror}") from error
    if done.returncode != 0:
        raise DataError(f"{shown} ended with {done.returncode}: {complaint(done)}")
