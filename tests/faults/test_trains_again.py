"""A script that catches the error of one rank and trains again, in the same processes."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import firecaffe
from firecaffe import ExchangeConfig, ParallelConfig, RunConfig
from tests.ranks.networks import small_data
from tests.ranks.test_layouts import HEAD, RECIPE, Net
from tests.world import Ranks

LAYOUTS = {
    "data": ParallelConfig(),
    "split": ParallelConfig(1, 2, HEAD, 4),
    "stages": ParallelConfig(1, stages=["classifier"]),
}
WAIT_S = 100.0


class Failing:
    """A loss that fails on rank 1 in the second step or so."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 20 and os.environ.get("RANK") == "1":
            raise ArithmeticError("no luck")
        return F.cross_entropy(outputs, labels)


def fit(parallel: ParallelConfig, folder: str, fails: bool) -> str:
    run = RunConfig(folder=folder, tensorboard=False)
    exchange = ExchangeConfig(timeout_s=WAIT_S, shared_memory=False)
    recipe = dataclasses.replace(RECIPE, parallel=parallel, run=run, exchange=exchange)
    loss = Failing() if fails else F.cross_entropy
    data = small_data(100), small_data(30, 1)
    return firecaffe.train(recipe, Net, *data, loss=loss).weights_sha256


def fit_twice(parallel: ParallelConfig, folder: str) -> tuple[str, bool, str]:
    """The error of the first training, whether its world is still there, and what the second one
    comes to.
    """
    told = ""
    try:
        fit(parallel, f"{folder}/first", fails=True)
    except Exception as error:
        told = type(error).__name__
    is_left = not dist.is_initialized()
    return told, is_left, fit(parallel, f"{folder}/second", fails=False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_one_rank_told_ends_one_training(ranks: Ranks, name: str, tmp_path: Path) -> None:
    words = LAYOUTS[name]
    alone = words.over(1, 1) if words.split else ParallelConfig()
    [expected] = ranks.shared(1, fit, alone, str(tmp_path / "alone"), False)
    found = ranks.run(2, fit_twice, words, str(tmp_path / "run"))
    assert found == [("PeerLostError", True, expected), ("ArithmeticError", True, expected)]
