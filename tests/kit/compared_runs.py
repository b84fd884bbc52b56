"""Finished runs of two recipes, for what compares them."""

from pathlib import Path
from typing import Any

from tests.unit.runs.test_curves import train, with_metrics


def compared_runs(tmp_path: Path) -> list[str]:
    """Write two recipes of three seeds, on two workers."""
    folders = []
    for letter, rate in (("a", 0.1), ("b", 0.5)):
        for seed in range(3):
            rows: list[dict[str, Any]] = [train(step, 2 / step) for step in range(1, 41)]
            rows.insert(20, {"kind": "test", "step": 20, "top1": 0.5 + 0.01 * seed})
            rows.append({"kind": "test", "step": 40, "top1": 0.7})
            run = with_metrics(
                tmp_path / f"{letter}{seed}",
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
