"""A small training as a process, and what it leaves: what benchmarks and tests of faults run."""

import json
import sys
from pathlib import Path

RECIPE = """
[model]
name = "lenet"
[data]
name = "generated"
[train]
global_batch_size = 24
micro_batch_size = 4
eval_batch_size = 500
[run]
tensorboard = false
"""
"""LeNet on generated images: no files, some 10 ms a step."""


def command(recipe: Path, folder: Path, workers: int, *words: str) -> list[str]:
    """`firecaffe train` on so many local workers; words: of the recipe, and other options."""
    start = [sys.executable, "-m", "firecaffe", "train", str(recipe)]
    return [*start, "--nproc-per-node", str(workers), "--run.folder", str(folder), *words]


def state_of(folder: Path) -> str:
    """The digest of all that a finished run came to. Raises: OSError where it is not finished."""
    state: str = json.loads((folder / "result.json").read_text())["state_sha256"]
    return state


def steps_of(folder: Path) -> list[int]:
    """The steps that a run has recorded so far, as they stand in its file."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []
    return [row["step"] for row in rows if row["kind"] == "train"]
