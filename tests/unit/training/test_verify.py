"""A run's first steps once more: the same if it is whole, and what was changed is named."""

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import firecaffe
from firecaffe import RunConfig
from firecaffe.cluster.world import World
from firecaffe.errors import CheckpointError, NotIdenticalError, RunError
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.training.checkpoint import STATE, SUMS
from firecaffe.training.parts import Parts
from firecaffe.training.verification import Verified, verify_run
from tests.unit.training.served.test_trainings import data, network, recipe

ALONE = World(0, 1, torch.device("cpu"))

MODES: dict[str, dict[str, Any]] = {
    "every_step": {"mode": "every_step"},
    "asynchronous": {"mode": "asynchronous", "staleness_rate": "inverse", "warm_steps": 2},
    "backup": {"mode": "backup"},
    "local": {"mode": "local", "outer": "nesterov", "local_steps": 3, "overlap_steps": 1},
}
STEPS = 12


def train(folder: Path, name: str, digests: bool = False, resume: Path | None = None) -> None:
    made = recipe(folder, MODES[name], steps=STEPS, eval_every=5)
    checkpoints = dataclasses.replace(made.checkpoint, every=4, keep_last=1)
    words = RunConfig(folder=str(folder), tensorboard=False, digests=digests)
    made = dataclasses.replace(made, checkpoint=checkpoints, run=words)
    firecaffe.train(made, network, data(300, 0), data(100, 1), resume=resume)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("runs")
    for name in MODES:
        train(parent / name, name)
    return {name: parent / name for name in MODES}


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of an asynchronous run, to be changed."""
    return Path(shutil.copytree(runs["asynchronous"], tmp_path / "run"))


def verified(folder: Path, steps: int, seed: int = 0) -> Verified:
    parts = Parts(network, train=data(300, seed), test=data(100, 1))
    return verify_run(folder, recipe_of(folder), ALONE, steps, parts)


@pytest.mark.parametrize("name", MODES)
def test_a_right_run(runs: dict[str, Path], name: str) -> None:
    found = verified(runs[name], 8)
    # Rounds of 3 steps are averaged a step later: evaluations and checkpoints are due then.
    looked_at = [4, 7, 10] if name == "local" else [4, 5, 8]
    assert (found.steps, found.last) == (10 if name == "local" else 8, STEPS)
    assert (found.losses, found.weights, found.tensors) == (found.steps, looked_at, [])
    assert bool(found.updates) == (name in ("asynchronous", "backup"))
    assert not found.result
    whole = verified(runs[name], 100)
    assert (whole.steps, whole.losses, whole.tensors, whole.result) == (STEPS, STEPS, [STEPS], True)


@pytest.mark.parametrize("name", MODES)
def test_other_data_differ_in_the_first_loss(runs: dict[str, Path], name: str) -> None:
    with pytest.raises(NotIdenticalError, match="in step 1: loss "):
        verified(runs[name], 3, seed=7)


def test_a_changed_loss_is_named(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"train", "step": 3,' in line)
    row = json.loads(lines[place])
    row["loss"] += 2**-20
    path.write_text("\n".join([*lines[:place], json.dumps(row), *lines[place + 1 :], ""]))
    assert verified(run, 2).steps == 2
    with pytest.raises(NotIdenticalError, match=r"in step 3: loss .* in metrics\.jsonl"):
        verified(run, 4)
    path.write_text("\n".join([*lines[:place], "{", *lines[place + 1 :], ""]))
    with pytest.raises(RunError, match=r"metrics\.jsonl: has no loss of step 3"):
        verified(run, 4)
    path.write_text("\n".join([*lines[:place], *lines[place + 1 :], ""]))
    with pytest.raises(RunError, match=r"metrics\.jsonl: has no loss of step 3"):
        verified(run, 4)


def test_a_changed_digest_of_the_weights_is_named(run: Path) -> None:
    path = run / "weights.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["sha256"] = "0" * 64
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = rf"after step {rows[1]['step']}: weights 000000000000 in weights\.jsonl"
    with pytest.raises(NotIdenticalError, match=said):
        verified(run, 8)


def test_a_changed_weight_of_a_checkpoint_is_named(run: Path) -> None:
    where = run / "checkpoints" / f"step-{STEPS:08d}"
    tensors = load_file(where / STATE)
    tensors["parameter/4.bias"][2] += 1e-6
    save_file(tensors, where / STATE)
    with pytest.raises(CheckpointError, match=r"state\.safetensors: damaged"):
        verified(run, STEPS)
    sums = [line.split("  ") for line in (where / SUMS).read_text().splitlines()]
    files = [(hashlib.sha256((where / name).read_bytes()).hexdigest(), name) for _, name in sums]
    (where / SUMS).write_text("".join(f"{sha}  {name}\n" for sha, name in files))
    said = f"after step {STEPS}: first in parameter/4.bias, by checkpoints/step-{STEPS:08d}"
    with pytest.raises(NotIdenticalError, match=re.escape(said)):
        verified(run, STEPS)


def test_a_changed_result_is_named(run: Path) -> None:
    path = run / "result.json"
    row = json.loads(path.read_text())
    path.write_text(json.dumps({**row, "state_sha256": "0" * 64}))
    said = f"at its end, after step {STEPS}: state 000000000000 in result.json"
    with pytest.raises(NotIdenticalError, match=re.escape(said)):
        verified(run, STEPS)


def test_a_damaged_line_of_the_log_is_named(run: Path) -> None:
    log = run / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:30], *lines[31:]]))
    assert verified(run, 3).steps == 3  # a prefix reads no further
    with pytest.raises(RunError, match=r"events\.jsonl line 31: is not what was written"):
        verified(run, 8)


def test_digests_of_each_step_name_the_tensor(tmp_path: Path) -> None:
    train(tmp_path / "run", "every_step", digests=True)
    assert verified(tmp_path / "run", 3).tensors == [1, 2, 3]
    path = tmp_path / "run" / "digests.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["tensors"]["optimizer/4.weight/momentum_buffer"] = "0"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = "after step 2: first in optimizer/4.weight/momentum_buffer, by digests.jsonl"
    with pytest.raises(NotIdenticalError, match=re.escape(said)):
        verified(tmp_path / "run", 3)


def test_a_resumed_run_has_its_own_steps(runs: dict[str, Path], tmp_path: Path) -> None:
    again = tmp_path / "again"
    made = recipe_of(runs["asynchronous"])
    made = dataclasses.replace(made, run=RunConfig(folder=str(tmp_path / "first")))
    every = dataclasses.replace(made.checkpoint, keep_last=0)
    made = dataclasses.replace(made, checkpoint=every)
    firecaffe.train(made, network, data(300, 0), data(100, 1))
    train(again, "asynchronous", resume=tmp_path / "first/checkpoints/step-00000008")
    assert verified(again, 10).losses == 2
    with pytest.raises(RunError, match="begins with step 9, where it was resumed"):
        verified(again, 8)


def test_what_is_known_of_the_difference_is_told(run: Path) -> None:
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0", "source": "x"}))
    assert verified(run, 2).losses == 2  # it is no difference by itself
    with pytest.raises(NotIdenticalError, match=r"this machine is another in torch, source$"):
        verified(run, 2, seed=7)
