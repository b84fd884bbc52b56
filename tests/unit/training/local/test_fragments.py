"""Fragments against a loop that is written out, in which a table says what is averaged when."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import Recipe, RunConfig, SolverConfig, SynchronyConfig
from firecaffe.data import TensorDataset
from firecaffe.schema import read_rows
from tests.unit.training.local.test_rules import (
    BETA,
    RATE,
    REPLICAS,
    SAMPLES,
    TRAIN,
    bent_loss,
    gradient,
    outer_step,
)

START = torch.tensor([1.0, -2.0, 0.5])
FIRST, LAST = torch.tensor([True, True, False]), torch.tensor([False, False, True])
"""Of the three weights those of each fragment: the parameter `pair`, and `one`."""

Turns = dict[int, list[Tensor]]
"""After which step an average of which weights is taken, of 8."""

IN_THREE: Turns = {1: [FIRST], 3: [LAST], 4: [FIRST], 6: [LAST], 7: [FIRST], 8: [FIRST, LAST]}
IN_FIVE: Turns = {2: [FIRST], 5: [LAST], 7: [FIRST], 8: [FIRST, LAST]}


class Parted(nn.Module):
    """`Quadratic` with two parameters, and a buffer that changes with each micro-batch."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(START[2:].clone())
        self.pair = nn.Parameter(START[:2].clone())
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, samples: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += 0.5
        return torch.cat([self.pair, self.one]) - samples


def train(folder: Path, momentum: float, words: dict[str, Any]) -> firecaffe.Result:
    recipe = Recipe(
        train=TRAIN,
        solver=SolverConfig(base_lr=RATE, momentum=momentum),
        run=RunConfig(folder=str(folder), tensorboard=False, digests=True),
        synchrony=SynchronyConfig("local", **{"replicas": REPLICAS, "fragments": 2, **words}),
    )
    data = TensorDataset(SAMPLES, torch.zeros(len(SAMPLES)))
    return firecaffe.train(recipe, Parted, data, data, bent_loss)


def weights(result: firecaffe.Result) -> Tensor:
    made = result.model
    assert isinstance(made, Parted)
    return torch.cat([made.pair, made.one]).detach()


def written_out(
    turns: Turns,
    outer: str = "average",
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    inner_momentum: str = "keep",
    overlap_steps: int = 0,
) -> Tensor:
    """SGD with momentum, of replicas that are averaged in turns."""
    x, slow = START.clone(), torch.zeros(3)
    replicas = [x.clone() for _ in range(REPLICAS)]
    momenta = [torch.zeros(3) for _ in range(REPLICAS)]
    under_way: dict[int, tuple[Tensor, Tensor, list[Tensor]]] = {}

    def apply(part: Tensor, difference: Tensor, then: list[Tensor]) -> None:
        nonlocal x, slow, replicas, momenta
        moved = outer_step(outer, x, slow, difference, outer_lr, outer_momentum)
        x, slow = torch.where(part, moved[0], x), torch.where(part, moved[1], slow)
        gone = [y - y0 for y, y0 in zip(replicas, then, strict=True)]
        replicas = [torch.where(part, x + d, y) for d, y in zip(gone, replicas, strict=True)]
        mean = torch.stack(momenta).mean(0)
        of_part = {"zero": [torch.zeros(3)] * REPLICAS, "average": [mean] * REPLICAS}
        after = of_part.get(inner_momentum, momenta)
        momenta = [torch.where(part, a, b) for a, b in zip(after, momenta, strict=True)]

    for done in range(1, TRAIN.steps + 1):
        for r in range(REPLICAS):
            momenta[r] = BETA * momenta[r] + gradient(replicas[r], done - 1, r)
            replicas[r] = replicas[r] - RATE * momenta[r]
        if done in under_way:
            apply(*under_way.pop(done))
        for part in turns.get(done, []):
            taken = part, x - torch.stack(replicas).mean(0), list(replicas)
            if overlap_steps and done < TRAIN.steps:
                under_way[min(done + overlap_steps, TRAIN.steps)] = taken
            else:
                apply(*taken)
    return x


CASES: dict[str, tuple[Turns, dict[str, Any]]] = {
    "average": (IN_THREE, {}),
    "slowmo": (IN_THREE, {"outer": "slowmo", "outer_lr": 0.9, "outer_momentum": 0.4}),
    "nesterov": (IN_FIVE, {"outer": "nesterov", "outer_lr": 0.8, "outer_momentum": 0.3}),
    "beside": (
        IN_FIVE,
        {"outer": "nesterov", "outer_lr": 0.8, "outer_momentum": 0.3, "overlap_steps": 1},
    ),
    "zero": (IN_THREE, {"inner_momentum": "zero"}),
    "averaged": (IN_THREE, {"inner_momentum": "average"}),
}


@pytest.mark.parametrize("name", CASES)
def test_fragments_are_averaged_in_turns(name: str, tmp_path: Path) -> None:
    turns, words = CASES[name]
    local_steps = 3 if turns is IN_THREE else 5
    found = weights(train(tmp_path / "run", BETA, {"local_steps": local_steps, **words}))
    torch.testing.assert_close(found, written_out(turns, **words), rtol=1e-5, atol=1e-6)
    other = IN_FIVE if turns is IN_THREE else IN_THREE
    assert not torch.allclose(found, written_out(other, **words), rtol=1e-3)


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_the_average_moves_where_it_is_its_turn(overlap_steps: int, tmp_path: Path) -> None:
    """And buffers with the last fragment."""
    train(tmp_path / "run", BETA, {"local_steps": 4, "overlap_steps": overlap_steps})
    rows = list(read_rows(tmp_path / "run" / "digests.jsonl", dict))
    moved: dict[str, list[int]] = {}
    for before, after in pairwise(rows):
        for name, digest in after["tensors"].items():
            if before["tensors"].get(name) != digest:
                moved.setdefault(name, []).append(after["step"])
    late = overlap_steps
    expected = {
        "parameter/pair": [2 + late, 6 + late, 8],
        "parameter/one": [4 + late, 8],
        "buffer/seen": [4 + late, 8],
    }
    assert {name: moved[name] for name in expected} == expected
