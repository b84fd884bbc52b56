"""Readers of recipes, of clusters, of checkpoints, and of what runs write down."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor

from benchmarks.faults.fuzzed.reader import Reader
from firecaffe.api.answer import as_table
from firecaffe.cli import compare as compare_command
from firecaffe.cli import explain as explain_command
from firecaffe.cli.train import make_parser
from firecaffe.cli.typed_recipe import parse_recipe
from firecaffe.files import sha256_of
from firecaffe.planner.cluster import load_cluster
from firecaffe.recipe.sections import Recipe, to_toml
from firecaffe.shrink.scheme import FOLDER as SCHEMES
from firecaffe.shrink.scheme import find_scheme
from firecaffe.training import checkpoint as checkpoints
from firecaffe.training.checkpoint import Checkpoint, load_newest, save_checkpoint
from firecaffe.training.tensor_file import InMemory


def make_recipe(folder: Path) -> None:
    (folder / "recipe.toml").write_text(to_toml(Recipe()))


def make_cluster(folder: Path) -> None:
    (folder / "cluster.toml").write_text(tomli_w.dumps(as_table(load_cluster("ec2-p3"))))


def make_checkpoint(folder: Path) -> None:
    tensors = {"parameter/w": torch.arange(12.0), "buffer/n": torch.tensor(3)}
    numbers = {"scalars": {"w/x": 1}, "scaler": {}}
    save_checkpoint(folder, Checkpoint(3, {"a": 1}, "p", "h", InMemory(tensors), numbers))


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    return dict(load_newest(folder)[0].tensors)


def digest_anew(folder: Path) -> None:
    """As a stranger would, so that the damage gets behind the digests."""
    for each in folder.rglob("step-*"):
        names = [path.name for path in sorted(each.iterdir())]
        if all((each / name).is_file() and not (each / name).is_symlink() for name in names):
            names = [name for name in names if name != checkpoints.SUMS]
            sums = "".join(f"{sha256_of(each / name)}  {name}\n" for name in names)
            (each / checkpoints.SUMS).write_text(sums)


METRICS = {"loss": 1.5, "top1": 0.5, "top5": 0.9}


def make_runs(folder: Path) -> None:
    for seed, name in enumerate("ab"):
        _make_run(folder / name, seed)


def _make_run(folder: Path, seed: int) -> None:
    folder.mkdir()
    result: dict[str, Any] = {
        "world_size": 2,
        "exchange": "tree",
        "route": "tree",
        "data": "x",
        "steps": 12,
    }
    result |= {"images_per_s": 1.5 + seed, "exposed_communication": 0.1, "top1": 0.5, "top5": 0.9}
    result |= {"metric": "top1", "higher_is_better": True, "shares": ["top1", "top5"]}
    result |= {"metrics": ["top1", "top5"], "test_loss": 1.5, "test_samples": 100}
    result |= {"largest_class_share": 0.1, "timed_s": 3.5, "timed_samples": 100, "stages": None}
    result |= {"identity_doubts": ["it is old"], "sent_bytes_per_step_by_rank": [5, 7]}
    result |= {"idle_by_stage": None, "samples_seen": 384, "resumed_from": ""}
    result |= {"first_weights": None, "epoch_samples": 100, "weights_sha256": f"ab{seed}"}
    (folder / "result.json").write_text(json.dumps(result))
    environment = {"host": "a", "cores": 2, "cpu": "x", "gpus": [], "own_code": {"task": "ab"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "recipe.toml").write_text(to_toml(Recipe()))
    steps = [
        {"kind": "train", "step": s, "samples": 32, "images_per_s": 9.5, **METRICS}
        for s in range(1, 13)
    ]
    rows = [*steps, {"kind": "validation", "step": 12, **METRICS}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def compare(folder: Path) -> None:
    runs = [str(folder / name) for name in "ab"]
    with contextlib.redirect_stdout(io.StringIO()):
        compare_command.main(runs)
        compare_command.main([*runs, "--json"])
        compare_command.main([*runs, "--by", "recipe", "--target", "40"])
        compare_command.main([*runs, "--by", "recipe", "--json"])


PARTS = ("data_s", "compute_s", "exposed_communication_s", "exchange_s", "update_s")
FORECAST = {
    "cluster": "x",
    "step_s": 0.5,
    "step_low_s": 0.4,
    "step_high_s": 0.6,
    "stragglers_s": 0.01,
    "compute_s": 0.3,
    "data_s": 0.01,
    "update_s": 0.02,
    "exposed_communication_s": 0.1,
    "low": dict.fromkeys(PARTS, 0.01),
    "high": dict.fromkeys(PARTS, 0.5),
}


def make_timings(folder: Path) -> None:
    (folder / "timings").mkdir()
    for rank in range(2):
        rows = [
            {"step": s, **dict.fromkeys(PARTS, 0.1), "step_s": 0.5, "micro_batches": 2 + rank}
            for s in range(1, 64)
        ]
        (folder / f"timings/rank-{rank}.jsonl").write_text("".join(map(_line, rows)))
        trips = [
            {"step": s, "peer": 1 - rank, "in_host": False, "round_trip_s": 0.001 * s}
            for s in range(1, 20)
        ]
        (folder / f"timings/round-trips-{rank}.jsonl").write_text("".join(map(_line, trips)))
    (folder / "forecast.json").write_text(json.dumps(FORECAST))
    fault = {"kind": "killed", "rank": 1, "line": "rank 1 was killed", "then": "x", "earlier": []}
    (folder / "fault.json").write_text(json.dumps(fault))
    make_recipe(folder)


def _line(row: object) -> str:
    return json.dumps(row) + "\n"


def make_served(folder: Path) -> None:
    """Timings and a result of a run with a server."""
    make_timings(folder)
    by_rank = {"0": [1, 0.2], "1": [2, 0.4]}
    rows = [
        {"step": s, **dict.fromkeys(PARTS, 0.1), "step_s": 0.5, "by_rank": by_rank}
        for s in range(1, 64)
    ]
    (folder / "timings/rank-0.jsonl").write_text("".join(map(_line, rows)))
    by_learner = {"0": 5, "1": 7}
    came_to: dict[str, Any] = {
        "updates": 60,
        "gradients": 120,
        "dropped": 1,
        "again": 0,
        "lost_learners": 0,
    }
    came_to |= {"staleness": {"0": 50, "1": 70}, "mean_staleness": 0.6}
    came_to |= {"idle_by_rank": {"0": 0.1, "1": 0.3}, "rank_by_learner": {"0": 0, "1": 1}}
    came_to |= {"pulled_bytes_by_learner": by_learner, "pushed_bytes_by_learner": by_learner}
    result = {"synchrony": came_to, "steps": 63, "resumed_from": ""}
    (folder / "result.json").write_text(json.dumps(result))
    forecast: dict[str, Any] = {
        "mode": "stale",
        "mode_in_words": "stale 4",
        "after_step": 1,
        "average_s": None,
    }
    forecast |= {"cluster": "x", "step_s": 0.5, "step_low_s": 0.4, "step_high_s": 0.6}
    forecast |= {"staleness": 0.5, "dropped": 0.01, "idle": 0.1, "bytes_per_step": 100}
    (folder / "forecast.json").write_text(json.dumps(forecast))


def explain(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        explain_command.main([str(folder)])
        explain_command.main([str(folder), "--json"])


def make_scheme(folder: Path) -> None:
    shutil.copy(sorted(SCHEMES.glob("*.toml"))[0], folder / "scheme.toml")


def make_trace(folder: Path) -> None:
    """A trace of torch's profiler."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "ts": 100 * s + at, "dur": 20}
        for s in range(4)
        for at, name in ((0, f"ProfilerStep#{s}"), (1, "aten::mm"), (30, "Optimizer.step#SGD"))
    ]
    trace = {"traceEvents": events, "distributedInfo": {"rank": 0}}
    (folder / "trace.json").write_text(json.dumps(trace))


def explain_trace(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        explain_command.main([str(folder / "trace.json")])


READERS = {
    "recipe": Reader(make_recipe, lambda f: parse_recipe(make_parser(), [str(f / "recipe.toml")])),
    "cluster": Reader(make_cluster, lambda f: load_cluster(str(f / "cluster.toml"))),
    "scheme": Reader(make_scheme, lambda f: find_scheme(str(f / "scheme.toml"))),
    "checkpoint": Reader(make_checkpoint, read_checkpoint),
    "checkpoint, new digests": Reader(make_checkpoint, read_checkpoint, digest_anew),
    "compare": Reader(make_runs, compare),
    "explain": Reader(make_timings, explain),
    "explain, with a server": Reader(make_served, explain),
    "explain, a trace": Reader(make_trace, explain_trace),
}
