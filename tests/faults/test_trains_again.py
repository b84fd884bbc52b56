"""A script that catches the error of one rank and trains again, in the same processes."""

import dataclasses
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import firecaffe
from firecaffe import ExchangeConfig, ParallelConfig, Recipe
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.compressors.casts import FLOAT16
from firecaffe.runs.run_folder import read_run_file
from tests.kit.worlds import changed
from tests.ranks.networks import small_data
from tests.ranks.test_layouts import HEAD, RECIPE, Net
from tests.unit.cluster.watches import until
from tests.world import Ranks

LAYOUTS = {
    "data": ParallelConfig(),
    "split": ParallelConfig(1, 2, HEAD, 4),
    "stages": ParallelConfig(1, stages=["classifier"]),
}
SHORT = changed(
    RECIPE,
    train={"global_batch_size": 48, "steps": 3},
    exchange=ExchangeConfig(timeout_s=100.0, bucket_bytes=1000),
)
Loss = Callable[[Tensor, Tensor], Tensor]


FAILS_AT = 12
"""The call, counted from the first step's, of the last micro-batch of the second step."""

STARTS = {
    **dict.fromkeys(("loss", "backward"), -3),  # forwards of the look at the network
    **dict.fromkeys(("data", "exit"), -2),  # it is asked twice, and twice more since it counts
    **dict.fromkeys(("codec", "hook"), FAILS_AT - 4),  # each step has several
}
"""By what fails: calls before the first step, of which none is to count."""


class Failing:
    """Fails on rank 1, with its last micro-batch of the second step at the earliest."""

    def __init__(self, fails: str, folder: Path) -> None:
        self.calls, self.told = STARTS.get(fails, 0), folder / "fault.json"
        self.error = SystemExit("no luck") if fails == "exit" else ArithmeticError("no luck")

    def check(self, *_: Tensor) -> None:
        if self.calls >= FAILS_AT and os.environ.get("RANK") == "1":
            raise self.error

    def count(self, calls: int = 1) -> None:
        self.calls += calls
        self.check()

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.count(torch.is_grad_enabled())  # not where it is tried on samples
        return F.cross_entropy(outputs, labels)

    def backward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """A loss whose gradients fail when those of the last layers are on their way; on rank 0 it
        fails then, so that nobody answers them.
        """
        self.calls += torch.is_grad_enabled()
        if self.calls == FAILS_AT and os.environ.get("RANK") == "0":
            until(self.told.exists)
            raise ArithmeticError("no luck either")
        return F.cross_entropy(outputs, labels)

    def encode(self, vector: Tensor) -> Tensor:
        self.count()
        return FLOAT16.encode(vector)

    def hook(self, state: Any, bucket: Any) -> Any:
        self.count()
        return allreduce_hook(state, bucket)


class FailingData:
    """A training set that fails."""

    sample_CHW, num_classes = (1, 6, 6), 4

    def __init__(self, failing: Failing) -> None:
        self.data, self.failing = small_data(100), failing

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        self.failing.count()
        return self.data.batch(indices_B)


def fit(recipe: Recipe, folder: Path, fails: str = "") -> str:
    # Buckets go through the process group: there a thread may wait for another rank.
    recipe = changed(
        recipe,
        exchange={
            "shared_memory": fails == "data",
            "compressor": "float16" if fails == "codec" else "none",
        },
        run={"folder": str(folder), "tensorboard": False},
    )
    failing = Failing(fails, folder)
    losses: dict[str, Loss] = {"loss": failing.loss, "backward": failing.backward}

    def network() -> nn.Module:
        net = Net()
        if fails == "backward":
            next(net.parameters()).register_hook(failing.check)  # type: ignore[no-untyped-call]
        return net

    train_set = FailingData(failing) if fails in ("data", "exit") else small_data(100)
    codec = dataclasses.replace(FLOAT16, encode=failing.encode) if fails == "codec" else FLOAT16
    with patch.dict(COMPRESSORS, float16=codec):
        result = firecaffe.train(
            recipe,
            network,
            train_set,
            small_data(30, 1),
            loss=losses.get(fails, F.cross_entropy),
            comm_hook=(None, failing.hook) if fails == "hook" else None,
        )
    return result.weights_sha256


def fit_twice(recipe: Recipe, folder: Path, fails: str, own_world: bool) -> tuple[str, bool, str]:
    """The error of the first training, whether its world is still there, and what the second one
    comes to.
    """
    if own_world:
        dist.init_process_group("gloo")
    told = ""
    try:
        fit(recipe, folder / "first", fails)
    except BaseException as error:
        told = type(error).__name__
    is_left = dist.is_initialized() == own_world
    found = told, is_left, fit(recipe, folder / "second")
    if own_world:
        dist.destroy_process_group()
    return found


TOLD = {
    **dict.fromkeys(("loss", "hook", "codec"), ("PeerLostError", "ArithmeticError")),
    "data": ("PeerLostError", "OwnCodeError"),
    "exit": ("PeerLostError", "SystemExit"),
    "backward": ("ArithmeticError", "ArithmeticError"),
}
"""What each rank's script catches."""


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a layout's training comes to on one rank."""

    @cache
    def weights(layout: str) -> str:
        words = LAYOUTS[layout]
        parallel = words.over(1, 1) if words.split else ParallelConfig()
        recipe, folder = changed(SHORT, parallel=parallel), tmp_path_factory.mktemp("alone")
        (found,) = ranks.shared(1, fit, recipe, folder / "run")
        return str(found)

    return weights


@pytest.mark.parametrize(
    ("layout", "fails", "own_world"),
    [
        ("data", "loss", False),
        ("data", "data", True),
        ("data", "exit", False),
        ("data", "backward", False),
        ("data", "hook", False),
        ("data", "codec", False),
        ("split", "data", True),
        ("stages", "loss", False),
    ],
)
def test_what_one_rank_told_ends_one_training(
    ranks: Ranks,
    alone: Callable[[str], str],
    layout: str,
    fails: str,
    own_world: bool,
    tmp_path: Path,
) -> None:
    recipe = changed(SHORT, parallel=LAYOUTS[layout])
    found = ranks.run(2, fit_twice, recipe, tmp_path / "run", fails, own_world)
    assert found == [(told, True, alone(layout)) for told in TOLD[fails]]
    fault = read_run_file(tmp_path / "run" / "first", "fault.json")
    assert fault["kind"] == ("other" if fails == "data" else "exception")
    assert "no luck" in str(fault["detail"])
    assert fault["rank"] == 1 or fails == "backward"  # where rank 0 fails, too
