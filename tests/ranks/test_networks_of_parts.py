"""A network of which each rank has a part, from its first weights to the result's network: the bits
are those of a whole. No rank ever has all of it in training; it holds the bytes of the formulas.
"""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from firecaffe import ModelConfig, ParallelConfig, Recipe, Result, SolverConfig, TrainConfig
from firecaffe.cluster.agree import digest
from firecaffe.cluster.world import join
from firecaffe.errors import RecipeError
from firecaffe.recipe.worker_numbers import layout_of
from firecaffe.training import build_training
from firecaffe.training.given_parts import Parts
from firecaffe.training.loop import Training as LoopTraining
from firecaffe.training.loop import train
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.parallel.cut_pieces import FreshNetwork
from firecaffe.training.parallel.mesh import make_mesh
from firecaffe.training.parallel.split_network import split_network
from firecaffe.training.parallel.staged import cut_network
from firecaffe.training.updates.every_rank import EveryRank
from tests.kit.worlds import Trained, Training, changed, end
from tests.ranks.networks import small_data
from tests.ranks.test_layouts import HEAD, RECIPE, Net
from tests.world import Ranks

LAYOUTS = {
    "split": ParallelConfig(1, 2, HEAD, 4),
    "paths": ParallelConfig(1, 2, {"features.6": "paths", **HEAD}, 2),
    "stages": ParallelConfig(1, stages=["features.4"]),
}
SHORT = changed(RECIPE, train={"steps": 2, "ema_decay": 0.0})


def alone(layout: str) -> ParallelConfig:
    parallel = LAYOUTS[layout]
    return ParallelConfig() if parallel.stages else parallel.over(1, 1)


WIDE, LAYERS, MIB = 3072, 4, 2**20
LAYER_MIB = WIDE * WIDE * 4 // MIB


class Wide(nn.Sequential):
    def __init__(self, width: int = WIDE) -> None:
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
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
        for network in (partial(Wide, 64), Wide):  # the code is in memory after the first one
            before = memory_mib("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
            fresh = FreshNetwork(recipe, Parts(model=network), small_data(10))
            if parallel.is_split:
                split_network(fresh, parallel, mesh, recipe.exchange, resources)
            else:
                cut_network(fresh, parallel, mesh)
        return memory_mib("VmHWM") - before


@pytest.mark.parametrize(
    "words",
    [ParallelConfig(1, 2, {"*": "neurons", "[13]": "inputs"}), ParallelConfig(1, stages=["2"])],
    ids=["split", "stages"],
)
def test_a_rank_never_has_the_whole_network(ranks: Ranks, words: ParallelConfig) -> None:
    """Beside its own one tensor at a time, and less than a tensor for all else."""
    part = LAYERS / 2 * LAYER_MIB
    for peak in ranks.run(2, make, words):
        assert part <= peak < part + 1.2 * LAYER_MIB < LAYERS * LAYER_MIB, peak


MICRO, LEAVES, FLOAT = 8, 6, 4
HIDDEN = 512


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(36, HIDDEN)
        self.body = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(4)))
        self.last = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.body(self.first(x.flatten(1))))
        return y


class Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Activations:
    """The bytes that autograd keeps for backward, without weights, and the most of them at once."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = {each.untyped_storage().data_ptr() for each in weights}
        self.kept = Counter[int]()
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> Kept:
        kept, storage = Kept(tensor), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self.weights:
            self.now += size * (not self.kept[place])
            self.most = max(self.most, self.now)
            self.kept[place] += 1
            weakref.finalize(kept, self.released, place, size)
        return kept

    def released(self, place: int, size: int) -> None:
        self.kept[place] -= 1
        self.now -= size * (not self.kept[place])


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def fit(parallel: ParallelConfig, folder: Path) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state at the end, and the most of activations."""
    held = dict[str, int]()
    recipe = Recipe(
        train=TrainConfig(MICRO * LEAVES, MICRO, steps=2, device="cpu"),
        solver=SolverConfig(base_lr=0.1, momentum=0.9),
        parallel=parallel,
    )

    def run_training(t: LoopTraining) -> Result:
        activations = Activations(t.learner.holding.forward.model.parameters())
        with torch.autograd.graph.saved_tensors_hooks(activations.pack, lambda kept: kept.tensor):
            result = train(t)
        assert isinstance(t.steps.stepper, EveryStep)
        assert isinstance(t.learner.update, EveryRank)
        for name in ("parameter", "optimizer"):
            parts = t.state.pieces[name].parts().values()
            held[name] = sum(nbytes(part.tensors) for part in parts)
        held["gradient"] = nbytes(bucket.flat for bucket in t.learner.update.reducer.buckets)
        held["activation"] = activations.most
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_training, "run_training", run_training)
        Training(Dense)(recipe, folder)
    return held


def linear(inputs: int, outputs: int) -> int:
    return FLOAT * (inputs * outputs + outputs)


BODY, FIRST, LAST = linear(HIDDEN, HIDDEN), linear(36, HIDDEN), linear(HIDDEN, 4)


@pytest.mark.parametrize(("pipeline", "held"), [("1f1b", (2, 1)), ("gpipe", (LEAVES, LEAVES))])
def test_bytes_of_a_stage(
    ranks: Ranks, pipeline: Any, held: tuple[int, int], tmp_path: Path
) -> None:
    """Stage k of K holds K - k micro-batches at once, or all; of each the inputs of its layers."""
    layout = ParallelConfig(1, stages=["body.2"], pipeline=pipeline)
    weights = FIRST + 2 * BODY, 2 * BODY + LAST
    inputs = FLOAT * MICRO * (36 + 2 * HIDDEN), FLOAT * MICRO * 3 * HIDDEN
    for stage, of_stage in enumerate(ranks.shared(2, fit, layout, tmp_path / "run")):
        assert of_stage["parameter"] == of_stage["optimizer"] == weights[stage]
        assert of_stage["gradient"] == pytest.approx(weights[stage], rel=0.01)
        assert of_stage["activation"] == pytest.approx(held[stage] * inputs[stage], rel=0.05)


def test_bytes_of_a_split(ranks: Ranks, tmp_path: Path) -> None:
    weights = FIRST + 4 * BODY / 2 + LAST
    layout = ParallelConfig(1, 2, {"body.*": "neurons"})
    for of_rank in ranks.shared(2, fit, layout, tmp_path / "run"):
        assert of_rank["parameter"] == of_rank["optimizer"] == weights
        assert of_rank["gradient"] == pytest.approx(weights, rel=0.01)


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


class Seeded(Training):
    """Whose result's network is made by its function, and has the weights of the training."""

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        np.random.seed(7)
        result = super().__call__(recipe, folder, resume)
        model = result.model
        named: list[tuple[str, Tensor]] = [
            *((f"parameter/{name}", each) for name, each in model.named_parameters()),
            *((f"buffer/{name}", each) for name, each in model.named_buffers()),
        ]
        assert (type(model), model.training) == (self.network, False)
        assert digest(named) == result.weights_sha256
        return result


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(Truncated, "stages"), (OfNumpy, "paths"), (ByRank, "split"), (ByRank, "stages")],
)
def test_networks_that_are_drawn_in_other_ways(
    trained: Trained, kind: type[nn.Module], layout: str
) -> None:
    training = Seeded(kind)
    expected = trained(1, changed(SHORT, parallel=alone(layout)), training)
    result = trained(2, changed(SHORT, parallel=LAYOUTS[layout]), training)
    assert result.state_sha256 == expected.state_sha256
    doubt = "rank 1 made other initial weights from the same seed; rank 0's were taken"
    assert result.identity_doubts == ([doubt] if kind is ByRank else [])


@pytest.mark.parametrize("layout", ["split", "stages"])
def test_first_weights_of_a_file(trained: Trained, layout: str, tmp_path: Path) -> None:
    """What fits is the file's, what does not is rank 0's."""
    torch.manual_seed(1)
    state = Net().state_dict()
    del state["classifier.0.weight"], state["features.1.running_mean"]  # these stay fresh
    torch.save(state, file := tmp_path / "w.pt")
    recipe = changed(SHORT, model=ModelConfig(weights=str(file)))
    expected = trained(1, changed(recipe, parallel=alone(layout)), Training(Net))
    result = trained(2, changed(recipe, parallel=LAYOUTS[layout]), Training(Net))
    assert end(result) == end(expected)


def test_one_and_the_same_network_is_whole_no_more(tmp_path: Path) -> None:
    network = Net()
    training = Training(lambda: network)
    recipe = changed(SHORT, parallel=alone("split"))
    result = training(recipe, tmp_path / "run")
    again: Callable[[], object] = lambda: training(recipe, tmp_path / "again")  # noqa: E731
    for call in (lambda: result.model, again):
        with pytest.raises(RecipeError, match=r"cut up before, by parallel\.split .*lambda: Net\("):
            call()
