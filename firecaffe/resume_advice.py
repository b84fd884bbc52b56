"""The wording of advice to the user: options of a command, or arguments in a script."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

OF_LAUNCHERS = ("FIRECAFFE_LAUNCHED", "TORCHELASTIC_RUN_ID")
"""Environment variables of launchers that restart ranks: `firecaffe.launch` and torchrun."""

_typed = [""]
"""The command that this process runs, if any. All threads share it: the watch reports faults."""


@contextmanager
def command_wording(command: str = "train") -> Iterator[None]:
    """Word advice in the block for a command; outside such a block, it is worded for a script."""
    before, _typed[0] = _typed[0], command
    try:
        yield
    finally:
        _typed[0] = before


def resume_option(folder: str | Path = "") -> str:
    """Return the option or argument that resumes the run of `folder`, or of any run if empty."""
    if _typed[0]:
        return f"--resume {folder}" if str(folder) else "--resume"
    return f'resume="{folder}"' if str(folder) else "resume=…"


def restart_hint() -> str:
    """Return the advice of automatic restarts; empty for a script that no launcher restarts."""
    if _typed[0]:
        return ", or let --max-restarts do so" * (_typed[0] == "train")
    has_launcher = any(name in os.environ for name in OF_LAUNCHERS)
    return ", or let max_restarts do so" if has_launcher else ""


def option(name: str) -> str:
    """Return an option as the user writes it: --nproc-per-node for a command, nproc_per_node."""
    return f"--{name.replace('_', '-')}" if _typed[0] else name


def positional(name: str) -> str:
    """Return an argument without dashes as the user writes it: WORKERS for a command, workers."""
    return name.upper() if _typed[0] else name


def replaced(settings: Mapping[str, str]) -> str:
    """Return settings of a run's recipe as the user writes them: options, or `replace={…}`."""
    if _typed[0]:
        return " ".join(f"--{name} {value}" for name, value in settings.items())
    return f"replace={dict(settings)}"
