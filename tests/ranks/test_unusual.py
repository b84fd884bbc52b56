"""Unusual networks end in the same bits on one and on two workers, or in one line."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import firecaffe
from benchmarks.training.unusual.cases import CASES, data
from benchmarks.training.unusual.layers import CLASSES, PIXELS
from benchmarks.training.unusual.tried import Tried, try_all
from benchmarks.training.unusual_networks import end_of, is_right
from firecaffe import ParallelConfig, Recipe, SynchronyConfig, TaskConfig, TrainConfig
from firecaffe.cluster.world import join
from firecaffe.errors import RecipeError
from tests.world import Ranks

ELSEWHERE = {
    "stages": Recipe(parallel=ParallelConfig(1, stages=["2"])),
    "split": Recipe(parallel=ParallelConfig(1, 2, {"3": "neurons"}, 2)),
    "local": Recipe(synchrony=SynchronyConfig(mode="local", replicas=2, local_steps=2)),
}
"""Where parameters that are not trained are not kept as buffers are."""


def refused(words: Recipe) -> str:
    case = CASES["teacher, frozen"]
    train = TrainConfig(global_batch_size=32, micro_batch_size=8, steps=4, device="cpu")
    recipe = replace(words, train=train, task=TaskConfig(args={"num_classes": 4}))
    samples = data(case)
    with pytest.raises(RecipeError) as caught:
        firecaffe.train(recipe, case.make, samples, samples)
    return str(caught.value)


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_teacher_that_no_step_keeps_is_refused_on_all_ranks(where: str, ranks: Ranks) -> None:
    [line] = set(ranks.shared(2, refused, ELSEWHERE[where]))
    for part in ("forward changes the parameter", "teacher.weight", "make it a buffer"):
        assert part in line


class Triangle(nn.Module):
    """Its zeros above the diagonal mean something, and torch looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(PIXELS, CLASSES)
        self.factor = nn.Parameter(torch.eye(CLASSES))

    def forward(self, values: Tensor) -> Any:
        density: Any = MultivariateNormal(torch.zeros(CLASSES), scale_tril=self.factor)
        outputs = self.layer(values.flatten(1))
        return outputs + density.log_prob(outputs).unsqueeze(1)


def test_zeros_that_mean_something_stay_in_the_look_at_moved_weights() -> None:
    samples = data(CASES["plain"])
    train = TrainConfig(global_batch_size=32, micro_batch_size=8, steps=1, device="cpu")
    recipe = Recipe(train=train, task=TaskConfig(args={"num_classes": 4}))
    assert firecaffe.train(recipe, Triangle, samples, samples).steps == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unusual")


def try_in_one_world(folder: str, begun: str) -> dict[str, Tried]:
    """All cases. Those that are trained share a world, for to join one takes as long as a training;
    a case that is refused ends its own.
    """
    refused = [name for name, case in CASES.items() if case.ends]
    with (
        join("cpu", 300) as world,
        patch("firecaffe.training.build_training.join", lambda *_: nullcontext(world)),
    ):
        tried = try_all([name for name in CASES if name not in refused], folder, begun)
    return tried | try_all(refused, folder, begun)


@pytest.fixture(scope="module")
def trials(ranks: Ranks, folder: Path) -> dict[str, dict[str, Tried]]:
    """By where: on one worker, on two, and on one from half of what two have done."""
    by_place = {}
    for on, count, begun in (("1", 1, ""), ("2", 2, ""), ("resumed", 1, str(folder / "2"))):
        by_rank = ranks.shared(count, try_in_one_world, str(folder / on), begun)
        for name in CASES:
            assert len({(tried[name].line, tried[name].state) for tried in by_rank}) == 1
        by_place[on] = by_rank[0]
    return by_place


@pytest.mark.parametrize("name", CASES)
def test_an_unusual_network(name: str, trials: dict[str, dict[str, Tried]], folder: Path) -> None:
    end = end_of(name, {on: each[name] for on, each in trials.items()}, folder)
    case = CASES[name]
    assert is_right(case, end), end
    if case.told and not case.doubted:
        assert any(case.told in note for note in trials["1"][name].notes)
