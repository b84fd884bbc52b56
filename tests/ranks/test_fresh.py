"""A network that ranks make together: none ever has all of it, and bits are those of a whole."""

import dataclasses
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import firecaffe
from firecaffe import ParallelConfig, Recipe, RunConfig, TrainConfig
from firecaffe.cluster.world import join
from firecaffe.recipe.parallel import layout_of
from firecaffe.training.parallel.cut_pieces import FreshNetwork
from firecaffe.training.parallel.mesh import make_mesh
from firecaffe.training.parallel.split_network import split_network
from firecaffe.training.parallel.staged import cut_network
from firecaffe.training.parts import Parts
from tests.ranks.networks import small_data
from tests.ranks.test_layouts import HEAD, RECIPE, Net
from tests.world import Ranks

WIDE, LAYERS, MIB = 3072, 6, 2**20
LAYER_MIB = WIDE * WIDE * 4 // MIB


class Wide(nn.Sequential):
    """Six layers of 36 MiB."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)))
        for layer in self:
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight)  # once more, when all are there


def memory_mib(word: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(word)) / 1024


def make(parallel: ParallelConfig) -> float:
    """Makes the network; returns the most memory that this took, in MiB."""
    recipe = Recipe(train=TrainConfig(8, 8, steps=1, device="cpu"), parallel=parallel)
    with join("cpu") as world, ExitStack() as resources:
        mesh = make_mesh(world, layout_of(parallel, world.world_size), resources)
        before = memory_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
        fresh = FreshNetwork(recipe, Parts(model=Wide), small_data(10))
        if parallel.is_split:
            split_network(fresh, parallel, mesh, recipe.exchange, resources)
        else:
            cut_network(fresh, parallel, mesh)
        return memory_mib("VmHWM") - before


@pytest.mark.parametrize(
    "words",
    [
        ParallelConfig(1, 2, {"*": "neurons", "[135]": "inputs"}),
        ParallelConfig(1, stages=["3"]),
    ],
    ids=["split", "stages"],
)
def test_a_rank_never_has_the_whole_network(ranks: Ranks, words: ParallelConfig) -> None:
    """Beside its own one tensor at a time, and less than a tensor for all else."""
    own = LAYERS / 2 * LAYER_MIB
    for peak in ranks.run(2, make, words):
        assert own <= peak < own + 1.8 * LAYER_MIB < LAYERS * LAYER_MIB, peak


class Truncated(Net):
    """One that has to be made whole: how much it draws depends on what it draws."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.classifier:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.1)


class OfNumpy(Net):
    """One whose numbers are not all torch's."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.features[0].weight
        assert isinstance(weight, nn.Parameter)
        with torch.no_grad():
            weight.copy_(torch.from_numpy(np.random.randn(6, 1, 3, 3)))


class ByRank(Net):
    """Rank 1 draws other numbers, as another kind of processor may."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.parameters():
            with torch.no_grad():
                each.add_(0.01 * int(os.environ.get("RANK", "0")))


def fit(kind: type[nn.Module], parallel: ParallelConfig, folder: str) -> tuple[str, list[str]]:
    np.random.seed(7)
    run = RunConfig(folder=folder, tensorboard=False)
    train = dataclasses.replace(RECIPE.train, steps=3)
    recipe = dataclasses.replace(RECIPE, train=train, parallel=parallel, run=run)
    result = firecaffe.train(recipe, kind, small_data(100), small_data(30, 1))
    return result.state_sha256, result.identity_doubts


WAYS = {
    "split": ParallelConfig(1, 2, HEAD, 4),
    "paths": ParallelConfig(1, 2, {"features.6": "paths", **HEAD}, 2),
    "stages": ParallelConfig(1, stages=["features.4"]),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (Truncated, "split"),
        (Truncated, "stages"),
        (OfNumpy, "paths"),
        (OfNumpy, "stages"),
        (ByRank, "split"),
        (ByRank, "stages"),
    ],
)
def test_networks_that_are_drawn_in_other_ways(
    ranks: Ranks, kind: type[nn.Module], way: str, tmp_path: Path
) -> None:
    words = WAYS[way]
    alone = ParallelConfig() if words.stages else words.over(1, 1)
    [(expected, _)] = ranks.shared(1, fit, kind, alone, str(tmp_path / "alone"))
    told = "rank 1 made other initial weights from the same seed; rank 0's were taken"
    for found, doubts in ranks.shared(2, fit, kind, words, str(tmp_path / "run")):
        assert found == expected
        assert doubts == ([told] if kind is ByRank else [])
