"""First weights of a file beside a split or stages: what fits is the file's, what does not is
rank 0's, whichever object the network is.
"""

import dataclasses
from pathlib import Path

import pytest
import torch

import firecaffe
from firecaffe import ModelConfig, ParallelConfig, RunConfig
from tests.ranks.networks import small_data
from tests.ranks.test_layouts import HEAD, RECIPE, Net
from tests.world import Ranks

LAYOUTS = {
    "split": ParallelConfig(1, 2, HEAD, 4),
    "one weird trick": ParallelConfig(1, 2, HEAD, 4, "one_weird_trick"),
    "stages": ParallelConfig(1, stages=["features.4"]),
}


def fit(parallel: ParallelConfig, file: str, folder: str, is_one: bool) -> str:
    """is_one: whether the function that is given returns one and the same network each time."""
    torch.manual_seed(3)
    network = Net()
    first = {name: each.clone() for name, each in network.state_dict().items()}

    def fresh() -> Net:
        made = network if is_one else Net()
        made.load_state_dict(first)
        return made

    train = dataclasses.replace(RECIPE.train, steps=3)
    run, model = RunConfig(folder=folder, tensorboard=False), ModelConfig(weights=file)
    recipe = dataclasses.replace(RECIPE, model=model, parallel=parallel, train=train, run=run)
    return firecaffe.train(recipe, fresh, small_data(100), small_data(30, 1)).state_sha256


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_and_the_same_network_takes_them(ranks: Ranks, name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = Net().state_dict()
    del state["classifier.0.weight"], state["features.1.running_mean"]  # these stay fresh
    torch.save(state, file := tmp_path / "w.pt")
    layout = LAYOUTS[name]
    alone = ParallelConfig() if layout.stages else layout.over(1, 1)
    [expected] = ranks.shared(1, fit, alone, str(file), str(tmp_path / "alone"), False)
    found = ranks.shared(2, fit, layout, str(file), str(tmp_path / "run"), True)
    assert found == [expected] * 2
