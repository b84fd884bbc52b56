"""The network of a result of which each rank has held a part: whole, from the run's folder."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn

import firecaffe
from firecaffe import ParallelConfig, Result, RunConfig
from firecaffe.cluster.agree import digest
from firecaffe.errors import RecipeError
from tests.ranks.networks import small_data
from tests.ranks.test_layouts import HEAD, RECIPE, Net
from tests.world import Ranks

LAYOUTS = {
    "split": ParallelConfig(1, 2, HEAD, 4),
    "stages": ParallelConfig(1, stages=["features.4"]),
}
TRAIN = dataclasses.replace(RECIPE.train, steps=2, ema_decay=0.0)


EXPECTED = (
    "model() returned a network that a training has cut up before, by parallel.split or "
    "parallel.stages; expected a new one each time: Net, or lambda: Net(…)"
)


def train(parallel: ParallelConfig, folder: Path, make: Callable[[], nn.Module]) -> Result:
    run = RunConfig(folder=str(folder), tensorboard=False)
    recipe = dataclasses.replace(RECIPE, parallel=parallel, run=run, train=TRAIN)
    return firecaffe.train(recipe, make, small_data(100), small_data(30, 1))


def fit(parallel: ParallelConfig, folder: Path) -> bool:
    """Whether the result's network has the weights of the training."""
    result = train(parallel, folder, Net)
    model = result.model
    named: list[tuple[str, Tensor]] = []
    named += [(f"parameter/{name}", each) for name, each in model.named_parameters()]
    named += [(f"buffer/{name}", each) for name, each in model.named_buffers()]
    return type(model) is Net and not model.training and digest(named) == result.weights_sha256


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_network_is_made_by_its_function(ranks: Ranks, name: str, tmp_path: Path) -> None:
    assert ranks.shared(2, fit, LAYOUTS[name], tmp_path / "run") == [True] * 2


def test_one_and_the_same_network_is_whole_no_more(tmp_path: Path) -> None:
    network, parallel = Net(), ParallelConfig(1, 1, HEAD, 4)
    result = train(parallel, tmp_path / "run", lambda: network)
    with pytest.raises(RecipeError) as told:
        _ = result.model
    assert str(told.value) == EXPECTED
    with pytest.raises(RecipeError) as told:
        train(parallel, tmp_path / "again", lambda: network)
    assert str(told.value) == EXPECTED
