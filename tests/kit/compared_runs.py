"""Folders of finished runs, for what reads and compares them."""

import json
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from firecaffe.runs.checklist import Item, checklist
from firecaffe.runs.run_table import TableRun, read_run
from firecaffe.runs.seed_groups import GroupRow, group_rows, group_runs

DIGESTS = {"a": "5f59c6bf0087" + 52 * "a", "b": "958065d44b59" + 52 * "b"}
FILES: dict[str, dict[str, Any]] = {
    "result": {
        "world_size": 1, "exchange": "tree", "route": "tree", "steps": 400, "images_per_s": 1000.0,
        "data": "mnist: 60000 training images", "exposed_communication": 0.0, "top1": 0.9,
        "largest_class_share": 0.1, "test_samples": 10_000, "weights_sha256": DIGESTS["a"],
    },
    "environment": {
        "host": "one", "cpu": "A", "gpus": [], "torch": "2.13.0", "firecaffe": "0.1.0",
        "commit": "c0ffee", "source": 64 * "a",
    },
    "recipe": {
        "model": {"name": "lenet"}, "data": {"name": "mnist", "crop": 0}, "run": {}, "task": {},
        "train": {"global_batch_size": 64, "steps": 400, "epochs": 1},
        "solver": {"base_lr": 0.01, "stepvalue": []},
    },
}  # fmt: skip


def plant(folder: Path, **changes: Any) -> Path:
    """A finished run's folder. A change is written as file__key or recipe__section__word."""
    contents = deepcopy(FILES)
    for section, word in (("data", "path"), ("run", "folder")):
        contents["recipe"][section][word] = str(folder)
    for name, value in changes.items():
        *path, word = name.split("__")
        target = contents
        for part in path:
            target = target[part]
        target[word] = value
    folder.mkdir(parents=True)
    for name in ("result", "environment"):
        (folder / f"{name}.json").write_text(json.dumps(contents[name]))
    (folder / "recipe.toml").write_text(tomli_w.dumps(contents["recipe"]))
    return folder


def planted(folder: Path, **changes: Any) -> TableRun:
    return read_run(plant(folder, **changes))


def over_seeds(
    folder: Path, values: Iterable[float], metric: str = "top1", **changes: Any
) -> list[TableRun]:
    """A run for each value of the metric, of another seed and with other weights."""
    runs = []
    for seed, value in enumerate(values):
        words: dict[str, Any] = {"recipe__train__seed": seed, f"result__{metric}": value}
        words["result__weights_sha256"] = f"{abs(hash((str(folder), seed))):064x}"
        runs.append(planted(folder / str(seed), **words | changes))
    return runs


def with_metrics(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> TableRun:
    run = planted(folder, **changes)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def train(step: int, loss: float | None = 1.0, samples: int = 64) -> dict[str, Any]:
    return {"kind": "train", "step": step, "samples": samples, "images_per_s": 32, "loss": loss}


def compared_runs(folder: Path) -> list[str]:
    """Folders of two recipes of three seeds, on two workers."""
    folders = []
    for letter, rate in (("a", 0.1), ("b", 0.5)):
        for seed in range(3):
            rows: list[dict[str, Any]] = [train(step, 2 / step) for step in range(1, 41)]
            rows.insert(20, {"kind": "test", "step": 20, "top1": 0.5 + 0.01 * seed})
            rows.append({"kind": "test", "step": 40, "top1": 0.7})
            run = with_metrics(
                folder / f"{letter}{seed}",
                rows,
                recipe__train__seed=seed,
                recipe__solver__base_lr=rate,
                result__steps=40,
                result__top1=0.7 + 0.01 * seed,
                result__weights_sha256=f"{letter}{seed}" * 32,
                result__sent_bytes_per_step_by_rank=[1e6, 1e6],
            )
            folders.append(str(run.folder))
    return folders


def rows_of(
    runs: list[TableRun],
    target: float | None = None,
    allow_unequal: bool = False,
    band: float | None = None,
) -> tuple[list[GroupRow], dict[str, Item]]:
    """Groups as rows, and the checklist by what is asked."""
    groups = group_runs(runs)
    rows = group_rows(groups, target, allow_unequal, band)
    return rows, {item.what: item for item in checklist(groups, rows, band)}


def printed(parts: Iterable[Any], width: int = 300) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    return capture.get()
