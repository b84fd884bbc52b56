"""What a training gives back: its network, live or from its folder, and what it has recorded."""

import dataclasses
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import firecaffe
from firecaffe import DataConfig, ModelConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.cluster.agree import digest
from firecaffe.errors import CheckpointError, FirecaffeError, RecipeError, RunError
from firecaffe.training.first_weights import find_weights
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

NETWORK = f"{Path(__file__).parents[2] / 'ranks' / 'networks.py'}:Everything"


def fit(folder: Path, ema: Mapping[str, Any] = {}, **words: Any) -> firecaffe.Result:
    """Trains a network with BatchNorm and dropout: by a reference, or by what `words` give."""
    recipe = Recipe(
        model=ModelConfig() if "model" in words else ModelConfig(NETWORK),
        data=DataConfig(hold_out=0.2),
        train=TrainConfig(24, 4, steps=3, seed=3, eval_every=2, eval_batch_size=7, **ema),
        solver=SolverConfig(base_lr=0.1),
        run=RunConfig(str(folder), tensorboard=False),
        checkpoint=firecaffe.CheckpointConfig(every=2, best=True),
    )
    return firecaffe.train(recipe, train_set=small_data(60, 0), test_set=small_data(20, 1), **words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load")


@pytest.fixture(scope="module")
def result(folder: Path) -> firecaffe.Result:
    return fit(folder / "run")


def sha256(network: nn.Module) -> str:
    """As a run's weights_sha256 is made."""
    named = [(f"parameter/{name}", each.detach()) for name, each in network.named_parameters()]
    return digest([*named, *((f"buffer/{name}", each) for name, each in network.named_buffers())])


def test_a_result_has_the_network_the_folder_and_the_history(result: firecaffe.Result) -> None:
    assert sha256(result.model) == result.weights_sha256
    assert not any(module.training for module in result.model.modules())
    assert all(each.grad is None for each in result.model.parameters())
    assert (result.folder / "result.json").is_file()
    found = [(row["kind"], row["step"]) for row in result.history]
    steps = [("train", 1), ("train", 2), ("validation", 2), ("train", 3), ("validation", 3)]
    assert found == [*steps, ("test", 3)]
    assert result.history[-1]["top1"] == result.metrics["top1"]
    assert result.history[3]["loss"] == result.loss
    assert {"folder", "model", "_live"}.isdisjoint(result.as_row())


def test_a_metric_that_a_run_does_not_have_is_told_in_a_line(result: firecaffe.Result) -> None:
    """One of five classes or fewer, and a regression."""
    few = dataclasses.replace(result, metrics={"top1": 0.5})
    regression = dataclasses.replace(result, metrics={"mse": 2.0})
    assert few.top1 == 0.5
    with pytest.raises(AttributeError, match=r"no top5; its metrics are top1$"):
        print(few.top5)
    with pytest.raises(AttributeError, match=r"no top1; its metrics are mse$"):
        print(regression.top1)


def test_a_result_from_another_process_loads_its_network(result: firecaffe.Result) -> None:
    data = pickle.dumps(result)
    there: firecaffe.Result = pickle.loads(data)
    assert there == result
    assert there.folder == result.folder
    assert b"_live" not in data
    assert there.model is not result.model
    assert sha256(there.model) == result.weights_sha256
    assert there.model.training is False


def test_every_rank_has_the_network(result: firecaffe.Result, ranks: Ranks, folder: Path) -> None:
    told = ranks.shared(2, weights_in_rank, str(folder / "two"))
    assert told == [result.weights_sha256] * 2


def weights_in_rank(folder: str) -> str:
    return sha256(fit(Path(folder)).model)


def test_a_run_and_its_checkpoints_are_loaded(result: firecaffe.Result) -> None:
    before = torch.random.get_rng_state()
    checkpoints = result.folder / "checkpoints"
    for where in (str(result.folder), checkpoints, checkpoints / "step-00000003"):
        loaded = firecaffe.load(where, trust_code=True)
        assert sha256(loaded) == result.weights_sha256
        assert not any(module.training for module in loaded.modules())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (
        sha256(firecaffe.load(checkpoints / "step-00000002", trust_code=True))
        != result.weights_sha256
    )


def test_the_best_checkpoint_is_loaded_if_asked(result: firecaffe.Result) -> None:
    assert result.best is not None
    best = firecaffe.load(result.best["checkpoint"], trust_code=True)
    assert sha256(firecaffe.load(result.folder, best=True, trust_code=True)) == sha256(best)
    assert sha256(
        firecaffe.load(result.folder / "checkpoints" / "best", trust_code=True)
    ) == sha256(best)


def test_first_weights_may_be_said_as_what_is_loaded(
    result: firecaffe.Result, tmp_path: Path
) -> None:
    """`model.weights` takes a run's folder, `best` and a checkpoint's folder."""
    checkpoints = result.folder / "checkpoints"
    best = checkpoints / (checkpoints / "best").read_text().strip()
    newest = checkpoints / "step-00000003"
    wheres = {result.folder: newest, checkpoints: newest, checkpoints / "best": best, best: best}
    for where, which in wheres.items():
        file = str(which / "state.safetensors")
        assert find_weights(str(where)) == find_weights(file) == (file, [])

    # A training takes them, and says which they are.
    recipe = Recipe(
        model=ModelConfig(NETWORK, weights=str(checkpoints / "best"), freeze=["*weight"]),
        train=TrainConfig(24, 4, steps=1, seed=4),
        run=RunConfig(str(tmp_path / "run"), tensorboard=False),
    )
    tuned = firecaffe.train(recipe, train_set=small_data(60, 0), test_set=small_data(20, 1))
    assert sha256(firecaffe.load(tuned.folder, trust_code=True)) == tuned.weights_sha256
    loaded = dict(firecaffe.load(best, trust_code=True).named_parameters())
    frozen = [(n, p) for n, p in tuned.model.named_parameters() if not p.requires_grad]
    assert frozen
    assert all(torch.equal(each, loaded[name]) for name, each in frozen)
    taken = json.loads((tuned.folder / "result.json").read_text())["first_weights"]
    assert taken["file"] == str(best / "state.safetensors")

    for where, said in ((tmp_path / "none" / "best", "checkpoint.best"), (tmp_path, "SHA256SUMS")):
        with pytest.raises(RecipeError, match=r"^model\.weights .*") as caught:
            find_weights(str(where))
        assert str(where) in str(caught.value)
        assert said in str(caught.value)


def test_the_network_of_a_moving_average_is_the_average(folder: Path) -> None:
    result = fit(folder / "ema", ema={"ema_decay": 0.5})
    assert result.evaluated == "ema"
    assert sha256(result.model) != result.weights_sha256
    loaded = firecaffe.load(result.folder, trust_code=True)
    assert sha256(loaded) == sha256(result.model)
    images, labels = small_data(20, 1).batch(torch.arange(20))
    with torch.no_grad():
        top1 = float((loaded(images).argmax(1) == labels).double().mean())
    assert top1 == result.top1


def test_of_a_damaged_checkpoint_the_one_before_is_taken(folder: Path) -> None:
    result = fit(folder / "damaged")
    state = result.folder / "checkpoints" / "step-00000003" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step-00000003"):
        loaded = firecaffe.load(result.folder, trust_code=True)
    file, damaged = find_weights(str(result.folder))
    assert ("step-00000002" in file, "step-00000003" in damaged[0]) == (True, True)
    older = firecaffe.load(result.folder / "checkpoints" / "step-00000002", trust_code=True)
    assert sha256(loaded) == sha256(older)


def test_a_file_of_weights_goes_into_a_network_that_is_given(
    result: firecaffe.Result, tmp_path: Path
) -> None:
    weights = result.model.state_dict()
    save_file(weights, tmp_path / "net.safetensors")
    torch.save(weights, tmp_path / "net.pt")
    for name in ("net.safetensors", "net.pt"):
        for model in (Everything, Everything()):
            assert sha256(firecaffe.load(tmp_path / name, model)) == result.weights_sha256
    own = result.folder / "checkpoints" / "step-00000003" / "state.safetensors"
    assert sha256(firecaffe.load(own, Everything)) == result.weights_sha256
    more = Everything()
    more.add_module("more", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"net\.pt.*more\.weight"):
        firecaffe.load(tmp_path / "net.pt", more)


def test_a_network_that_was_given_in_python_has_to_be_given_again(folder: Path) -> None:
    result = fit(folder / "given", model=Everything)
    with pytest.raises(RecipeError, match=r"Everything.*model="):
        firecaffe.load(result.folder)
    assert sha256(firecaffe.load(result.folder, Everything)) == result.weights_sha256
    assert sha256(result.model) == result.weights_sha256


@pytest.mark.parametrize(
    ("where", "words", "error", "said"),
    [
        ("nowhere", {}, CheckpointError, "nowhere"),
        ("run/checkpoints/step-00000003", {"best": True}, RecipeError, "best"),
        ("run", {"model": 3}, RecipeError, "model is 3"),
        ("run", {"model": lambda: nn.Linear(2, 2)}, CheckpointError, r"again\.bias"),
        ("file.pt", {}, RecipeError, "model="),
        ("file.pt", {"model": Everything}, CheckpointError, r"file\.pt"),
        ("empty", {}, RecipeError, r"recipe\.toml"),
        ("broken", {}, RunError, r"recipe\.toml"),
        ("later", {}, RunError, r"train\.word_of_tomorrow"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    result: firecaffe.Result, where: str, words: Any, error: type[FirecaffeError], said: str
) -> None:
    folder = result.folder.parent
    (folder / "file.pt").write_bytes(b"no weights")
    for name, recipe in (
        ("empty", None),
        ("broken", "["),
        ("later", "[train]\nword_of_tomorrow=1"),
    ):
        (folder / name).mkdir(exist_ok=True)
        if recipe is not None:
            (folder / name / "recipe.toml").write_text(recipe)
    with pytest.raises(error, match=said) as raised:
        firecaffe.load(folder / where, **words)
    assert "\n" not in str(raised.value)


def test_a_result_on_a_host_without_its_folder_says_so(
    result: firecaffe.Result, tmp_path: Path
) -> None:
    elsewhere = dataclasses.replace(result, folder=tmp_path / "none")
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        _ = elsewhere.history
