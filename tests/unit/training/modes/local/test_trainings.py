"""Local training: each rule against a loop that is written out; rounds, a stop, what is refused."""

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import Recipe, Result
from firecaffe.data import Batch, SampleOrder, TensorDataset
from firecaffe.errors import CheckpointError, PreemptedError, RecipeError
from firecaffe.schema import read_rows
from tests.kit.training import data, fit_points, recipe_in, recipe_of_points, record_of
from tests.unit.training.modes.served.made import CURVATURE

# --- rules, in which a table says which weights are averaged when ---------------------------------

REPLICAS, STEPS, RATE, BETA = 4, 8, 0.4, 0.6
TRAIN = {"global_batch_size": 16, "micro_batch_size": 2, "steps": STEPS, "seed": 2}
ORDER = SampleOrder(2, 32, 16, 2)
SAMPLES = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
START = torch.tensor([1.0, -2.0, 0.5])
ALL = torch.ones(3).bool()
FIRST, LAST = torch.tensor([True, True, False]), torch.tensor([False, False, True])
"""Of the three weights those of each fragment: the parameter `pair`, and `one`."""

Turns = dict[int, list[Tensor]]
"""After which step an average of which weights is taken, of 8."""

IN_THREE: Turns = {1: [FIRST], 3: [LAST], 4: [FIRST], 6: [LAST], 7: [FIRST], 8: [FIRST, LAST]}
IN_FIVE: Turns = {2: [FIRST], 5: [LAST], 7: [FIRST], 8: [FIRST, LAST]}
TOGETHER: Turns = {3: [ALL], 6: [ALL], 8: [ALL]}


class Parted(nn.Module):
    """Two parameters, and a buffer that changes with each micro-batch."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.pair = nn.Parameter(START[2:].clone()), nn.Parameter(START[:2].clone())
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, samples: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += 0.5
        return torch.cat([self.pair, self.one]) - samples


def bent_loss(differences: Tensor, _: Tensor) -> Tensor:
    return (CURVATURE * differences.cosh().log()).sum(1).mean()


def trained(folder: Path, momentum: float, words: dict[str, Any]) -> Tensor:
    local = {"mode": "local", "replicas": REPLICAS, "local_steps": 3, **words}
    solver = {"base_lr": RATE, "momentum": momentum}
    recipe = recipe_in(folder, train=TRAIN, solver=solver, synchrony=local, run={"digests": True})
    data = TensorDataset(SAMPLES, torch.zeros(len(SAMPLES)))
    net: Any = firecaffe.train(recipe, Parted, data, data, bent_loss).model
    return torch.cat([net.pair, net.one]).detach()


def gradient(weights: Tensor, step: int, replica: int) -> Tensor:
    own = range(2 * replica, 2 * replica + 2)
    samples = SAMPLES[torch.cat([ORDER.micro_batch(step, leaf) for leaf in own])]
    return CURVATURE * (weights - samples).tanh().mean(0)


def outer_step(
    x: Tensor, slow: Tensor, difference: Tensor, outer: str, outer_lr: float, outer_momentum: float
) -> tuple[Tensor, Tensor]:
    if outer == "slowmo":
        slow = outer_momentum * slow + difference / RATE
        return x - outer_lr * RATE * slow, slow
    if outer == "nesterov":
        slow = outer_momentum * slow + difference
        return x - outer_lr * (difference + outer_momentum * slow), slow
    return x - difference, slow


USUAL = {"outer": "average", "outer_lr": 1.0, "outer_momentum": 0.0}


def written_out(
    turns: Turns, inner: float, inner_momentum: str = "keep", overlap_steps: int = 0, **words: Any
) -> Tensor:
    """SGD with momentum `inner`, of replicas that are averaged in turns. words: of `USUAL`."""
    rule: dict[str, Any] = {**USUAL, **words}
    x, slow = START.clone(), torch.zeros(3)
    replicas = [x.clone() for _ in range(REPLICAS)]
    momenta = [torch.zeros(3) for _ in range(REPLICAS)]
    under_way: dict[int, tuple[Tensor, Tensor, list[Tensor]]] = {}

    def apply(part: Tensor, difference: Tensor, then: list[Tensor]) -> None:
        nonlocal x, slow, replicas, momenta
        moved = outer_step(x, slow, difference, **rule)
        x, slow = torch.where(part, moved[0], x), torch.where(part, moved[1], slow)
        gone = [y - y0 for y, y0 in zip(replicas, then, strict=True)]
        replicas = [torch.where(part, x + d, y) for d, y in zip(gone, replicas, strict=True)]
        mean = torch.stack(momenta).mean(0)
        of_part = {"zero": [torch.zeros(3)] * REPLICAS, "average": [mean] * REPLICAS}
        after = of_part.get(inner_momentum, momenta)
        momenta = [torch.where(part, a, b) for a, b in zip(after, momenta, strict=True)]

    for done in range(1, STEPS + 1):
        for r in range(REPLICAS):
            momenta[r] = inner * momenta[r] + gradient(replicas[r], done - 1, r)
            replicas[r] = replicas[r] - RATE * momenta[r]
        if done in under_way:
            apply(*under_way.pop(done))
        for part in turns.get(done, []):
            taken = part, x - torch.stack(replicas).mean(0), list(replicas)
            if overlap_steps and done < STEPS:
                under_way[min(done + overlap_steps, STEPS)] = taken
            else:
                apply(*taken)
    return x


SLOWMO = {"outer": "slowmo", "outer_lr": 0.9, "outer_momentum": 0.4}
NESTEROV = {"outer": "nesterov", "outer_lr": 0.8, "outer_momentum": 0.3}
PARTS: dict[str, Any] = {"fragments": 2}
CASES: dict[str, tuple[Turns, dict[str, Any], dict[str, Any]]] = {
    "average": (TOGETHER, {}, {}),
    "momentum zero": (TOGETHER, {"inner_momentum": "zero"}, {}),
    "momentum averaged": (TOGETHER, {"inner_momentum": "average"}, {}),
    "slowmo": (TOGETHER, SLOWMO, {}),
    "nesterov": (TOGETHER, NESTEROV, {}),
    "usual slowmo": (TOGETHER, {"outer": "slowmo"}, {"outer_momentum": 0.5}),
    "usual nesterov": (TOGETHER, {"outer": "nesterov"}, {"outer_lr": 0.7, "outer_momentum": 0.9}),
    "overlap": (TOGETHER, {"overlap_steps": 1}, {}),
    "both": (TOGETHER, {**NESTEROV, "overlap_steps": 2}, {}),
    "parts": (IN_THREE, PARTS, {}),
    "parts by slowmo": (IN_THREE, {**PARTS, **SLOWMO}, {}),
    "parts by nesterov": (IN_FIVE, {**PARTS, **NESTEROV}, {}),
    "parts beside": (IN_FIVE, {**PARTS, **NESTEROV, "overlap_steps": 1}, {}),
    "parts, momentum zero": (IN_THREE, {**PARTS, "inner_momentum": "zero"}, {}),
    "parts, momentum averaged": (IN_THREE, {**PARTS, "inner_momentum": "average"}, {}),
}
"""What is averaged when, words, and what words that are not given are."""


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        *((name, BETA) for name in CASES),
        *((name, 0.0) for name in ("average", "nesterov", "parts")),
    ],
)
def test_an_average(name: str, inner: float, tmp_path: Path) -> None:
    turns, words, usual = CASES[name]
    length = {"local_steps": 5 if turns is IN_FIVE else 3}
    weights = trained(tmp_path / "run", inner, {**words, **length})
    rule = {word: value for word, value in {**words, **usual}.items() if word != "fragments"}
    torch.testing.assert_close(weights, written_out(turns, inner, **rule), rtol=1e-5, atol=1e-6)
    if turns is not TOGETHER:
        other = IN_FIVE if turns is IN_THREE else IN_THREE
        assert not torch.allclose(weights, written_out(other, inner, **rule), rtol=1e-3)
    if inner and "inner_momentum" in rule:
        kept = written_out(turns, inner, **{**rule, "inner_momentum": "keep"})
        assert not torch.allclose(weights, kept, rtol=1e-3)


@pytest.mark.parametrize("late", [0, 1])
def test_the_average_moves_where_it_is_its_turn(late: int, tmp_path: Path) -> None:
    """And buffers with the last fragment."""
    trained(tmp_path / "run", BETA, {**PARTS, "local_steps": 4, "overlap_steps": late})
    moved: dict[str, list[int]] = {}
    for before, after in pairwise(read_rows(tmp_path / "run" / "digests.jsonl", dict)):
        for name, digest in after["tensors"].items():
            if before["tensors"].get(name) != digest:
                moved.setdefault(name, []).append(after["step"])
    assert moved["parameter/pair"] == [2 + late, 6 + late, 8]
    assert moved["parameter/one"] == moved["buffer/seen"] == [4 + late, 8]


# --- whole trainings ------------------------------------------------------------------------------


def recipe(folder: Path, words: dict[str, Any], **train: Any) -> Recipe:
    local = {"mode": "local", "replicas": 4, "local_steps": 4, **words}
    recipe = recipe_of_points(folder, local, **train).replace("data.hold_out", 0.0)
    return recipe.replace("checkpoint.every", 4)


def train(folder: Path, words: dict[str, Any], resume: Path | None = None, **more: Any) -> Result:
    return fit_points(recipe(folder, words, **more), resume)


def test_a_training_may_be_made_longer_after_a_whole_round(tmp_path: Path) -> None:
    long = train(tmp_path / "long", {}, steps=20)
    train(tmp_path / "whole", {}, steps=12)
    again = train(tmp_path / "again", {}, tmp_path / "whole", steps=20)
    assert again.state_sha256 == long.state_sha256
    train(tmp_path / "cut", {}, steps=10)
    with pytest.raises(CheckpointError, match=r"at step 10, .* cut short: .* after step 8 and"):
        train(tmp_path / "no", {}, tmp_path / "cut", steps=20)
    for words in ({"overlap_steps": 1}, {"fragments": 2}):
        (name,) = words
        train(tmp_path / name, words, steps=12)
        with pytest.raises(CheckpointError, match=r"train\.steps is 20 in the recipe, 12 in the"):
            train(tmp_path / "not", words, tmp_path / name, steps=20)


@pytest.mark.parametrize(
    ("words", "synchronous", "averages"),
    [({"warm_steps": 3}, 3, 5), ({"warm_epochs": 1}, 10, 3), ({"growth_coefficient": 0.15}, 0, 3)],
)
def test_the_record_tells_of_rounds(
    words: dict[str, Any], synchronous: int, averages: int, tmp_path: Path
) -> None:
    """And the loss falls, from guessing's (1.39)."""
    result = train(tmp_path / "run", words, steps=20)
    losses = [row["loss"] for row in result.history if row["kind"] == "train"]
    assert losses[0] > 1.3 > losses[-1] + 0.1
    row = record_of(tmp_path / "run")["synchrony"]
    counted = {"synchronous_steps": synchronous, "averages": averages}
    assert row == {"replicas": 4, **counted}


class Stopping(TensorDataset):
    """Asks its own process to stop when it is asked for samples so often."""

    def __init__(self, made: TensorDataset, after: int) -> None:
        super().__init__(made.inputs, made.targets, 4)
        self.left = after

    def batch(self, indices: torch.Tensor) -> Batch:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(indices)


def test_a_stop_comes_when_the_state_is_whole(tmp_path: Path) -> None:
    words = {"overlap_steps": 2}
    whole = train(tmp_path / "whole", words)
    stopping = Stopping(data(300, 0), 8 * 14)
    with pytest.raises(PreemptedError, match="a checkpoint is saved"):
        fit_points(recipe(tmp_path / "half", words), train_set=stopping)
    names = sorted(path.name for path in (tmp_path / "half" / "checkpoints").glob("step-*"))
    assert int(names[-1][5:]) % 4 == 2  # rounds of four steps, and two under way
    again = train(tmp_path / "again", words, tmp_path / "half")
    assert again.state_sha256 == whole.state_sha256


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"warm_epochs": 5}, "local_steps is 4 after 50 synchronous steps, but .* 40 steps"),
        ({"fragments": 30, "local_steps": 30}, "fragments is 30, but .* 6 parameters that are"),
    ],
)
def test_refused(words: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=line):
        train(tmp_path / "run", words)
