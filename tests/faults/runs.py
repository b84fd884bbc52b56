"""Runs that faults happen to: their recipes, what they say, and what they leave."""

import json
from pathlib import Path
from typing import Any

from benchmarks.kit.small_run import RECIPE

SERVED = """
[exchange]
silent_s = 2.0
[solver]
base_lr = 0.002
[synchrony]
mode = "asynchronous"
warm_steps = 2
"""
"""More of a recipe: rank 0 is a server, and goes on without ranks that are lost."""


def write_recipe(folder: Path, more: str = "") -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE + more)
    return path


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def lines_of_ours(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("firecaffe: ")]


def meeting(port: int, name: str) -> list[str]:
    """Words by which the launchers of two hosts meet on this one."""
    return ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", name]
