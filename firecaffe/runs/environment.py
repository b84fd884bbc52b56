"""The environment of a run: hardware, versions, code, and the process's peak memory."""

import hashlib
import platform
import resource
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

SOURCES = ("*.py", "*.toml", "*.jinja")

RECIPES = "recipes/"
"""The shipped recipes: a run has its own, and in a checkout this folder is a link."""


def describe_environment() -> dict[str, Any]:
    """Return the facts of this host that may change bits or speed."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "host": platform.node(),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=True),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "firecaffe": version("firecaffe"),
        "commit": commit(),
        "source": source_digest(),
        "command": sys.argv,
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@lru_cache
def source_digest() -> str:
    """Return the SHA-256 of this package's files, which identifies the version without git."""
    sha = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted(path for kind in SOURCES for path in root.rglob(kind)):
        name = path.relative_to(root).as_posix()
        if not name.startswith(RECIPES):
            content = path.read_bytes()
            sha.update(f"{name} {len(content)}\n".encode() + content)
    return sha.hexdigest()


@lru_cache
def commit() -> str:
    """Return the commit of this code, with '+' if files have changed; empty outside of git."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip()

    # A repository may contain an installed copy of this package without tracking it.
    if not git("ls-files", "environment.py"):
        return ""
    changed = git("status", "--porcelain", "--", "..")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of the whole process with its libraries on a CPU, of the tensors on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
