"""Replays: a run's first steps or its log give its bits again, and what was changed is named."""

import hashlib
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import firecaffe
from firecaffe import Result, SynchronyConfig, TensorDataset
from firecaffe.errors import CheckpointError, NotIdenticalError, RecipeError, RunError
from firecaffe.recipe.checked_recipe import check_recipe, recipe_of_run
from firecaffe.synchrony.config import SERVED
from firecaffe.training.build_training import join_run
from firecaffe.training.checkpoint import STATE, SUMS, load_checkpoint
from firecaffe.training.given_parts import Parts
from firecaffe.training.verification import Replayed, Verified, replay, verify_run
from tests.kit.training import (
    ALONE,
    data,
    fit_points,
    network,
    recipe_in,
    recipe_of_points,
    recipe_with,
    record_of,
    rows_of,
)
from tests.kit.training_fixtures import Capture, Patch

# --- the first steps once more --------------------------------------------------------------------

VERIFIED_MODES: dict[str, dict[str, Any]] = {
    "every_step": {"mode": "every_step"},
    "asynchronous": {"mode": "asynchronous", "staleness_rate": "inverse", "warm_steps": 2},
    "backup": {"mode": "backup"},
    "local": {"mode": "local", "outer": "nesterov", "local_steps": 3, "overlap_steps": 1},
}
LENGTH = 12


def train_of_mode(
    folder: Path, name: str, resume: Path | None = None, keep_last: int = 1, digests: bool = False
) -> None:
    recipe = recipe_of_points(folder, VERIFIED_MODES[name], steps=LENGTH, eval_every=5)
    kept = {"checkpoint.every": 4, "checkpoint.keep_last": keep_last, "run.digests": digests}
    fit_points(recipe_with(kept, recipe), resume)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("runs")
    for name in VERIFIED_MODES:
        train_of_mode(parent / name, name)
    return {name: parent / name for name in VERIFIED_MODES}


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of an asynchronous run, to be changed."""
    return Path(shutil.copytree(runs["asynchronous"], tmp_path / "run"))


def verified(folder: Path, steps: int, seed: int = 0) -> Verified:
    parts = Parts(network, train=data(300, seed), test=data(100, 1))
    return verify_run(folder, recipe_of_run(folder), ALONE, steps, parts)


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


@pytest.mark.parametrize("name", VERIFIED_MODES)
def test_a_right_run(runs: dict[str, Path], name: str) -> None:
    found = verified(runs[name], 8)
    # Rounds of 3 steps are averaged a step later: evaluations and checkpoints are due then.
    looked_at = [4, 7, 10] if name == "local" else [4, 5, 8]
    assert (found.steps, found.last) == (10 if name == "local" else 8, LENGTH)
    assert (found.losses, found.weights, found.tensors) == (found.steps, looked_at, [])
    assert bool(found.updates) == (name in ("asynchronous", "backup"))
    assert not found.result
    whole = verified(runs[name], 100)
    assert (whole.steps, whole.losses) == (LENGTH, LENGTH)
    assert (whole.tensors, whole.result) == ([LENGTH], True)


@pytest.mark.parametrize("name", VERIFIED_MODES)
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
    where = run / "checkpoints" / f"step-{LENGTH:08d}"
    tensors = load_file(where / STATE)
    tensors["parameter/4.bias"][2] += 1e-6
    save_file(tensors, where / STATE)
    refused(run, LENGTH, r"state\.safetensors: damaged", CheckpointError)
    sums = [line.split("  ") for line in (where / SUMS).read_text().splitlines()]
    files = [(hashlib.sha256((where / name).read_bytes()).hexdigest(), name) for _, name in sums]
    (where / SUMS).write_text("".join(f"{sha}  {name}\n" for sha, name in files))
    said = f"after step {LENGTH}: first in parameter/4.bias, by checkpoints/step-{LENGTH:08d}"
    refused(run, LENGTH, re.escape(said))


def test_a_changed_result_is_named(run: Path) -> None:
    path = run / "result.json"
    row = json.loads(path.read_text())
    path.write_text(json.dumps({**row, "state_sha256": "0" * 64}))
    refused(run, LENGTH, rf"at its end, after step {LENGTH}: state 000000000000 in result\.json")


def test_a_damaged_line_of_the_log_is_named(run: Path, runs: dict[str, Path]) -> None:
    log = run / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:30], *lines[31:]]))
    assert verified(run, 3).steps == 3  # a prefix reads no further
    refused(run, 8, r"events\.jsonl line 31: is not what was written", RunError)
    log.write_bytes(b"".join([*lines[:20], lines[20].replace(b": ", b": 1", 2), *lines[21:]]))
    with pytest.raises(RunError, match=r"events\.jsonl line 21: is not (what was written|a log)"):
        replayed(run)
    log.write_bytes(b"".join(lines[:40]))
    with pytest.raises(RunError, match=r"line 41: is not there; the run has gone on"):
        replayed(run)
    with pytest.raises(RunError, match="every_step writes no events"):
        replayed(runs["every_step"])


def test_digests_of_each_step_name_the_tensor(tmp_path: Path) -> None:
    run, name = tmp_path / "run", "optimizer/4.weight/momentum_buffer"
    train_of_mode(run, "every_step", digests=True)
    assert verified(run, 3).tensors == [1, 2, 3]
    tensors = json.loads((run / "digests.jsonl").read_text().splitlines()[1])["tensors"]
    change(run / "digests.jsonl", 1, tensors={**tensors, name: "0"})
    refused(run, 3, re.escape(f"after step 2: first in {name}, by digests.jsonl"))


def test_a_resumed_run_has_its_own_steps(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    train_of_mode(first, "asynchronous", keep_last=0)
    train_of_mode(again, "asynchronous", first / "checkpoints" / "step-00000008")
    assert verified(again, 10).losses == 2
    refused(again, 8, "begins with step 9, where it was resumed", RunError)


def test_what_is_known_of_the_difference_is_told(run: Path) -> None:
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0", "source": "x"}))
    assert verified(run, 2).losses == 2  # it is no difference by itself
    with pytest.raises(NotIdenticalError, match=r"this machine is another in torch, source$"):
        verified(run, 2, seed=7)


# --- whole trainings with a server ----------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "backup": {"mode": "backup", "backup_workers": 2},
    "again": {"mode": "backup", "backup_workers": 2, "dropped": "again"},
    "stale": {"mode": "stale", "max_staleness": 0, "warm_steps": 2},
    "asynchronous": {"mode": "asynchronous", "staleness_rate": "inverse"},
    "softsync": {"mode": "asynchronous", "gradients_per_update": 3, "compensate": "delay"},
    "gap": {"mode": "asynchronous", "compensate": "gap", "server_momentum": "delayed_nesterov"},
    "encoded": {"mode": "asynchronous", "compressor": "one_bit"},
}
assert {words["mode"] for words in MODES.values()} == set(SERVED)


def train(folder: Path, words: dict[str, Any], resume: Path | None = None, **more: Any) -> Result:
    return fit_points(recipe_of_points(folder, words, **more), resume)


def replayed(folder: Path, to: Path | None = None, seed: int = 0) -> Replayed:
    parts = Parts(network, train=data(300, seed), test=data(100, 1))
    return replay(folder, recipe_of_run(folder), ALONE, to, parts)


@pytest.mark.parametrize("name", MODES)
def test_it_learns_and_a_resume_and_a_replay_give_its_bits(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The loss falls, from guessing's (1.39) to that of a network that tells most points apart."""
    run, again = tmp_path / "run", tmp_path / "again"
    result = train(run, MODES[name])
    losses = [row["loss"] for row in result.history if row["kind"] == "train"]
    assert losses[0] > 1.3
    assert sum(losses[-10:]) / 10 < 0.75  # BatchNorm over four samples is noise
    assert result.top1 > 0.93
    row = record_of(run)["synchrony"]
    # Of 270 samples: 68 leaves in the 9 steps of an epoch; 40 steps are four epochs and 4 steps.
    warm = MODES[name].get("warm_steps", 0)
    assert row["gradients"] + row["dropped"] == 4 * 68 + 4 * 8 - 8 * warm
    assert (row["dropped"] > 0, row["again"] > 0) == (name == "backup", name == "again")
    late = {"backup": 0, "again": 0, "softsync": 5 / 3, "stale": 2.7}.get(name, 4)
    assert row["mean_staleness"] == pytest.approx(late, abs=0.5)
    resumed = train(again, MODES[name], run / "checkpoints" / "step-00000021")
    assert resumed.state_sha256 == result.state_sha256
    assert (again / "events.jsonl").read_bytes() == (run / "events.jsonl").read_bytes()
    assert record_of(again)["synchrony"] == row
    monkeypatch.delattr("firecaffe.synchrony.clock.SimulatedClock.next")  # no clock is asked
    once_more = replayed(run)
    assert once_more.is_same
    assert once_more.computed.weights == result.weights_sha256
    assert once_more.computed.state == result.state_sha256


def test_a_run_that_was_ended_is_replayed_to_its_checkpoint(tmp_path: Path) -> None:
    """With statistics of BatchNorm that are estimated again."""
    length: dict[str, Any] = {"steps": 20, "batch_norm_samples": 50}
    run, on = tmp_path / "run", tmp_path / "on"
    whole = train(run, MODES["softsync"], **length)
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000020")
    log = run / "events.jsonl"
    log.write_bytes(log.read_bytes()[:-30])  # killed while it wrote a line
    again = replayed(run, tmp_path / "again")
    assert (again.is_same, again.computed.step) == (True, 14)
    # What is kept goes on as the run would have.
    own = run / "checkpoints" / "step-00000014"
    rest = train(on, MODES["softsync"], own, **length)
    assert rest.state_sha256 == whole.state_sha256
    assert replayed(on).is_same
    # So does what the replay kept.
    kept = tmp_path / "again" / "checkpoints" / "step-00000014"
    ours, theirs = (load_checkpoint(folder).tensors for folder in (own, kept))
    names = [name for name in ours if name.startswith("batch_norm/")]
    assert names == ["batch_norm/1.running_mean", "batch_norm/1.running_var"]
    assert all(torch.equal(ours[name], theirs[name]) for name in names)
    other = train(tmp_path / "other", MODES["softsync"], kept, **length)
    assert other.state_sha256 == whole.state_sha256
    assert replayed(tmp_path / "other").is_same
    with pytest.raises(RunError, match="exists already"):
        replayed(run, tmp_path / "again")


def test_warm_steps_are_those_of_every_step(tmp_path: Path) -> None:
    words = {"mode": "asynchronous", "warm_steps": 7}
    train(tmp_path / "served", words, steps=8)
    plain = recipe_of_points(tmp_path / "plain", words, steps=8)
    fit_points(replace(plain, synchrony=SynchronyConfig()))
    names = ("served", "plain")
    served, together = ([row["loss"] for row in rows_of(tmp_path / n, "train")] for n in names)
    assert served[:7] == together[:7]
    assert served[7] != together[7]


def test_events_that_are_gone_are_told_of(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    whole = train(run, MODES["stale"], steps=14)
    (run / "events.jsonl").unlink()
    checkpoint = run / "checkpoints" / "step-00000007"
    again = train(tmp_path / "again", MODES["stale"], checkpoint, steps=14)
    assert "cannot be replayed" in capsys.readouterr().out
    assert again.state_sha256 == whole.state_sha256


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (r"less than 1, the learners of 1 worker,", {"mode": "backup", "clock": "real"}),
        ("at most 2, .*in_flight 2", {"gradients_per_update": 3, "clock": "real", "in_flight": 2}),
        (r"speeds_from x\.jsonl: No such", {"speeds": "measured", "speeds_from": "x.jsonl"}),
    ],
)
def test_words_that_cannot_be_here(line: str, words: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=line) as caught:
        train(tmp_path / "run", {"mode": "asynchronous", **words})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("words", [{"server": "sharded"}, {"lock": "none"}])
def test_no_worker_comes_to_weights_in_parts(words: dict[str, Any], tmp_path: Path) -> None:
    made = recipe_of_points(tmp_path / "run", {"mode": "asynchronous", "clock": "real", **words})
    with pytest.raises(RecipeError, match="come to runs whose weights are at rank 0"):
        join_run(check_recipe(made), "localhost:1")


class Keeping(nn.Module):
    """Keeps what learners must not add up: a variance, a range from infinity, a place, bytes."""

    low: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=None)
        self.register_buffer("low", torch.tensor(math.inf))
        self.register_buffer("place", torch.tensor(0))
        self.mean = 0.0
        self.out = nn.Linear(2, 1)

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.low.copy_(torch.minimum(self.low, features.min()))
            self.place.copy_((self.place + len(features)) % 12)
            self.mean += 0.1 * (features.mean().item() - self.mean)
        output: Tensor = self.out(self.norm(features))
        return output

    def get_extra_state(self) -> dict[str, float]:
        return {"mean": self.mean}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.mean = state["mean"]


@pytest.mark.parametrize("mode", ["asynchronous", "stale"])
def test_statistics_of_many_learners_are_some_that_one_could_have(
    mode: str, tmp_path: Path
) -> None:
    features = 1 + torch.rand(256, 2, generator=torch.Generator().manual_seed(0))
    points = TensorDataset(features, features.sum(1, keepdim=True))
    words = {"synchrony.mode": mode, "synchrony.clock": "simulated", "synchrony.learners": 16}
    length = "train.steps=12 train.global_batch_size=16 train.micro_batch_size=4"
    of_run = recipe_in(tmp_path / "run", f"{length} task.name=regression solver.base_lr=0.01")
    result = firecaffe.train(recipe_with(words, of_run), Keeping, points, points)
    kept: Any = firecaffe.load(result.folder, model=Keeping)
    variance = features.var(0)
    assert torch.all((kept.norm.running_var > 0) & (kept.norm.running_var < 2 * variance))
    assert features.min() <= kept.low < 1.2
    assert 0 <= kept.place < 12
    assert 0 < kept.mean < 2
    assert math.isfinite(result.test_loss)
