"""The network of a result of which each rank has held a part: whole, from the run's folder."""

import dataclasses
from pathlib import Path

import pytest
from torch import nn

import firecaffe
from firecaffe import ParallelConfig, RunConfig
from firecaffe.cluster.digest import digest
from firecaffe.errors import RecipeError
from tests.ranks.networks import small_data
from tests.ranks.test_layouts import HEAD, RECIPE, Net
from tests.world import Ranks

LAYOUTS = {
    "split": ParallelConfig(1, 2, HEAD, 4),
    "stages": ParallelConfig(1, stages=["features.4"]),
}
TRAIN = dataclasses.replace(RECIPE.train, steps=2, ema_decay=0.0)


def fit(parallel: ParallelConfig, folder: str) -> tuple[bool, str]:
    """Whether the result's network has the weights of the training, and what a second training
    says of one and the same network.
    """
    run = RunConfig(folder=folder, tensorboard=False)
    recipe = dataclasses.replace(RECIPE, parallel=parallel, run=run, train=TRAIN)
    data = small_data(100), small_data(30, 1)
    result = firecaffe.train(recipe, Net, *data)
    model = result.model
    named = [(f"parameter/{name}", each) for name, each in model.named_parameters()]
    named += [(f"buffer/{name}", each) for name, each in model.named_buffers()]
    is_it = type(model) is Net and not model.training and digest(named) == result.weights_sha256

    network: nn.Module = Net()
    again = dataclasses.replace(recipe, run=dataclasses.replace(run, folder=f"{folder} again"))
    same = firecaffe.train(again, lambda: network, *data)
    with pytest.raises(RecipeError) as told:
        _ = same.model
    with pytest.raises(RecipeError, match="cut up before"):
        firecaffe.train(again, lambda: network, *data)
    return is_it, str(told.value)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_network_is_made_by_its_function(ranks: Ranks, name: str, tmp_path: Path) -> None:
    expected = (
        "model() returned a network that a training has cut up before, by parallel.split or "
        "parallel.stages; expected a new one each time: Net, or lambda: Net(…)"
    )
    found = ranks.shared(2, fit, LAYOUTS[name], str(tmp_path / "run"))
    assert found == [(True, expected)] * 2
