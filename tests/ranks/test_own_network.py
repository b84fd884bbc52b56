"""A user's network by name, with first weights of a file and frozen layers: the same bits on any
number of workers, and all of it in the run's records.
"""

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch

import firecaffe
from firecaffe import DataConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.cli.typed_recipe import read_recipe
from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.models.weights import load_weights
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.run_folder import read_run_file
from firecaffe.runs.run_table import other_work, read_run
from firecaffe.training.checks import preflight
from tests.unit.models import own_nets
from tests.world import Ranks

RECIPE = Recipe(
    model=ModelConfig(f"{own_nets.PLACE}:Net", args={"width": 5}, freeze=["stem.*", "norm.*"]),
    data=DataConfig(name="generated"),
    train=TrainConfig(global_batch_size=24, micro_batch_size=4, steps=3, device="cpu"),
    solver=SolverConfig(base_lr=0.1),
)


def fit(recipe: Recipe, folder: str, resume: str | None = None) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    return firecaffe.train(recipe, resume=resume)


def test_an_own_network_ends_in_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    torch.save(own_nets.Net(1000, width=5).state_dict(), file)
    model = dataclasses.replace(RECIPE.model, weights=str(file))
    recipe = dataclasses.replace(RECIPE, model=model)
    preflight(check_recipe(recipe), 3)
    folders = {workers: tmp_path / str(workers) for workers in (1, 2, 3)}
    found = {w: ranks.shared(w, fit, recipe, str(folder)) for w, folder in folders.items()}
    assert len({each.state_sha256 for results in found.values() for each in results}) == 1

    result = read_run_file(folders[2], "result.json")
    assert result["first_weights"]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sorted(result["first_weights"]["reshaped"]) == ["head.bias", "head.weight"]
    assert result["frozen_parameters"] == result["inventory"]["frozen"] == 4
    assert result["inventory"]["loss"] == "the mean of the samples"
    code = hashlib.sha256(Path(own_nets.__file__).read_bytes()).hexdigest()
    assert read_run_file(folders[2], "environment.json")["own_code"] == {"model": code}
    assert read_run_file(folders[2], "forecast.json")["workers"] == 2
    first, *others = map(read_run, folders.values())
    assert not any(other_work(first, other) for other in others)

    # The frozen layers are the file's to the last bit, statistics included; the head has moved.
    state = torch.load(file, weights_only=True)
    newest = next((folders[1] / "checkpoints").glob("step-*")) / "state.safetensors"
    network = own_nets.Net(10, width=5)
    load_weights(network, str(newest))
    for name, each in network.state_dict().items():
        if not name.startswith("head"):
            assert torch.equal(each, state[name]), name

    # A run's own recipe goes on with it, and needs the file no more.
    file.unlink()
    own = read_recipe(folders[1] / "recipe.toml")
    train = dataclasses.replace(own.train, steps=4)
    longer = dataclasses.replace(own, train=train, run=RunConfig())
    preflight(longer, 2, folders[1])
    [more, _] = ranks.shared(2, fit, longer, str(tmp_path / "more"), str(folders[1]))
    assert more.steps == 4
    assert not more.identity_doubts
    with pytest.raises(RecipeError, match=r"model\.weights.*not there"):
        preflight(longer, 2)
