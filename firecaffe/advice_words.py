"""How what a user is advised to do is said: a command's options, or a script's arguments."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OF_LAUNCHERS = ("FIRECAFFE_LAUNCHED", "TORCHELASTIC_RUN_ID")
"""Environment variables of launchers that restart ranks, `firecaffe.launch` and torchrun."""

_typed = [False]
"""Whether this process runs a command. Of all threads: a watch tells of faults, too."""


@contextmanager
def command_typed() -> Iterator[None]:
    """Lets advice in the block be a command's; without it a script is taken to run."""
    before, _typed[0] = _typed[0], True
    try:
        yield
    finally:
        _typed[0] = before


def resume_word(folder: str | Path = "") -> str:
    """What goes on with the run of a folder, or, without one, of any."""
    if _typed[0]:
        return f"--resume {folder}" if str(folder) else "--resume"
    return f'resume="{folder}"' if str(folder) else "resume=…"


def or_restarts() -> str:
    """What lets a launcher start lost ranks again; nothing if no launcher does, as of srun's or a
    shell's ranks.
    """
    if _typed[0]:
        return ", or let --max-restarts do so"
    has_launcher = any(name in os.environ for name in OF_LAUNCHERS)
    return ", or let max_restarts do so" if has_launcher else ""
