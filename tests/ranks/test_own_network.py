"""A user's network by name, with first weights of a file and frozen layers, and a user's optimizer:
the same bits on any number of workers, and all of it in the run's records.
"""

import hashlib
from pathlib import Path

import pytest
import torch

from firecaffe import CheckpointConfig, DataConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.cli.typed_recipe import read_recipe
from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.models.weights import load_weights
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.run_folder import read_run_file
from firecaffe.runs.run_table import other_work, read_run
from firecaffe.training.checks import preflight
from tests.kit.worlds import NAMED, Trained, changed, checkpoint_of, end
from tests.unit.models import own_nets
from tests.unit.solvers import own_optimizers

RECIPE = Recipe(
    model=ModelConfig(f"{own_nets.PLACE}:Net", args={"width": 5}, freeze=["stem.*", "norm.*"]),
    data=DataConfig(name="generated"),
    train=TrainConfig(global_batch_size=24, micro_batch_size=4, steps=3, device="cpu"),
    solver=SolverConfig(base_lr=0.1),
)


def test_an_own_network_ends_in_the_same_bits(trained: Trained, tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    torch.save(own_nets.Net(1000, width=5).state_dict(), file)
    recipe = changed(RECIPE, model={"weights": str(file)})
    preflight(check_recipe(recipe), 3)
    alone, two = (trained(workers, recipe, NAMED) for workers in (1, 2))
    assert end(alone) == end(two)
    assert not other_work(read_run(alone.folder), read_run(two.folder))

    result = read_run_file(two.folder, "result.json")
    assert result["first_weights"]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sorted(result["first_weights"]["reshaped"]) == ["head.bias", "head.weight"]
    assert result["frozen_parameters"] == result["inventory"]["frozen"] == 4
    assert result["inventory"]["loss"] == "the mean of the samples"
    code = hashlib.sha256(Path(own_nets.__file__).read_bytes()).hexdigest()
    assert read_run_file(two.folder, "environment.json")["own_code"] == {"model": code}
    assert read_run_file(two.folder, "forecast.json")["workers"] == 2

    # The frozen layers are the file's to the last bit, statistics included; the head has moved.
    state = torch.load(file, weights_only=True)
    newest = next((alone.folder / "checkpoints").glob("step-*")) / "state.safetensors"
    network = own_nets.Net(10, width=5)
    load_weights(network, str(newest))
    for name, each in network.state_dict().items():
        if not name.startswith("head"):
            assert torch.equal(each, state[name]), name

    # A run's own recipe goes on with it, and needs the file no more.
    file.unlink()
    own = read_recipe(alone.folder / "recipe.toml")
    longer = changed(own, train={"steps": 4}, run=RunConfig())
    preflight(longer, 2, alone.folder)
    more = trained(2, longer, NAMED, alone.folder)
    assert (more.steps, more.identity_doubts) == (4, [])
    with pytest.raises(RecipeError, match=r"model\.weights.*not there"):
        preflight(longer, 2)


OPTIMIZER = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig(name="generated"),
    train=TrainConfig(global_batch_size=12, micro_batch_size=4, steps=3, device="cpu"),
    solver=SolverConfig(
        type=f"{own_optimizers.PLACE}:Signs",
        args={"beta": 0.9},
        base_lr=0.01,
        lr_policy="step",
        gamma=0.5,
        stepsize=2,
    ),
    checkpoint=CheckpointConfig(every=2),
)


@pytest.mark.parametrize("name", ["Signs", "Noisy"])
def test_an_own_optimizer_ends_in_the_same_bits_and_is_resumed(trained: Trained, name: str) -> None:
    recipe = changed(OPTIMIZER, solver={"type": f"{own_optimizers.PLACE}:{name}"})
    preflight(check_recipe(recipe), 3)
    alone, three = (trained(workers, recipe, NAMED) for workers in (1, 3))
    on = trained(2, recipe, NAMED, checkpoint_of(three, 2))
    assert end(three) == end(on) == end(alone)
    assert alone.drifted_ranks == []
    assert set(read_run_file(three.folder, "environment.json")["own_code"]) == {"solver"}
