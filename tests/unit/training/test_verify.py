"""A run's first steps once more: the same if it is whole, and what was changed is named."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from firecaffe.errors import CheckpointError, NotIdenticalError, RunError
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.training.checkpoint import STATE, SUMS
from firecaffe.training.given_parts import Parts
from firecaffe.training.verification import Verified, verify_run
from tests.kit.training import ALONE, data, fit_points, network, recipe_of_points, recipe_with

MODES: dict[str, dict[str, Any]] = {
    "every_step": {"mode": "every_step"},
    "asynchronous": {"mode": "asynchronous", "staleness_rate": "inverse", "warm_steps": 2},
    "backup": {"mode": "backup"},
    "local": {"mode": "local", "outer": "nesterov", "local_steps": 3, "overlap_steps": 1},
}
STEPS = 12


def train(
    folder: Path, name: str, resume: Path | None = None, keep_last: int = 1, digests: bool = False
) -> None:
    recipe = recipe_of_points(folder, MODES[name], steps=STEPS, eval_every=5)
    kept = {"checkpoint.every": 4, "checkpoint.keep_last": keep_last, "run.digests": digests}
    fit_points(recipe_with(kept, recipe), resume)


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


def refused(run: Path, steps: int, said: str, error: type[Exception] = NotIdenticalError) -> None:
    with pytest.raises(error, match=said):
        verified(run, steps)


def change(path: Path, line: int, **words: Any) -> int:
    """Changes words of a line, counted from 0. Returns its step."""
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    rows[line].update(words)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    step: int = rows[line]["step"]
    return step


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
    refused(run, 4, r"in step 3: loss .* in metrics\.jsonl")
    for damaged in (["{"], []):
        path.write_text("\n".join([*lines[:place], *damaged, *lines[place + 1 :], ""]))
        refused(run, 4, r"metrics\.jsonl: has no loss of step 3", RunError)


def test_a_changed_digest_of_the_weights_is_named(run: Path) -> None:
    step = change(run / "weights.jsonl", 1, sha256="0" * 64)
    refused(run, 8, rf"after step {step}: weights 000000000000 in weights\.jsonl")


def test_a_changed_weight_of_a_checkpoint_is_named(run: Path) -> None:
    where = run / "checkpoints" / f"step-{STEPS:08d}"
    tensors = load_file(where / STATE)
    tensors["parameter/4.bias"][2] += 1e-6
    save_file(tensors, where / STATE)
    refused(run, STEPS, r"state\.safetensors: damaged", CheckpointError)
    sums = [line.split("  ") for line in (where / SUMS).read_text().splitlines()]
    files = [(hashlib.sha256((where / name).read_bytes()).hexdigest(), name) for _, name in sums]
    (where / SUMS).write_text("".join(f"{sha}  {name}\n" for sha, name in files))
    said = f"after step {STEPS}: first in parameter/4.bias, by checkpoints/step-{STEPS:08d}"
    refused(run, STEPS, re.escape(said))


def test_a_changed_result_is_named(run: Path) -> None:
    path = run / "result.json"
    row = json.loads(path.read_text())
    path.write_text(json.dumps({**row, "state_sha256": "0" * 64}))
    refused(run, STEPS, rf"at its end, after step {STEPS}: state 000000000000 in result\.json")


def test_a_damaged_line_of_the_log_is_named(run: Path) -> None:
    log = run / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:30], *lines[31:]]))
    assert verified(run, 3).steps == 3  # a prefix reads no further
    refused(run, 8, r"events\.jsonl line 31: is not what was written", RunError)


def test_digests_of_each_step_name_the_tensor(tmp_path: Path) -> None:
    run, name = tmp_path / "run", "optimizer/4.weight/momentum_buffer"
    train(run, "every_step", digests=True)
    assert verified(run, 3).tensors == [1, 2, 3]
    tensors = json.loads((run / "digests.jsonl").read_text().splitlines()[1])["tensors"]
    change(run / "digests.jsonl", 1, tensors={**tensors, name: "0"})
    refused(run, 3, re.escape(f"after step 2: first in {name}, by digests.jsonl"))


def test_a_resumed_run_has_its_own_steps(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    train(first, "asynchronous", keep_last=0)
    train(again, "asynchronous", first / "checkpoints" / "step-00000008")
    assert verified(again, 10).losses == 2
    refused(again, 8, "begins with step 9, where it was resumed", RunError)


def test_what_is_known_of_the_difference_is_told(run: Path) -> None:
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0", "source": "x"}))
    assert verified(run, 2).losses == 2  # it is no difference by itself
    with pytest.raises(NotIdenticalError, match=r"this machine is another in torch, source$"):
        verified(run, 2, seed=7)
