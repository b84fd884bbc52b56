"""What a training gives back: its network, live or from its folder, and what it has recorded."""

import dataclasses
import json
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import firecaffe
from firecaffe import ModelConfig, Result
from firecaffe.api.evaluate_and_predict import Evaluated
from firecaffe.cluster.agree import digest
from firecaffe.errors import CheckpointError, FirecaffeError, RecipeError, RunError
from firecaffe.models.low_rank import low_rank_weights
from firecaffe.models.network import Frozen, freeze, frozen_of
from firecaffe.models.weights import load_weights
from firecaffe.tasks.known_tasks import RESERVED
from firecaffe.training.evaluation import Evaluation
from firecaffe.training.load import find_weights
from tests.kit.training import recipe_in, record_of
from tests.ranks.networks import Everything, small_data
from tests.unit.models.own_nets import Net, Tied
from tests.world import Ranks

NETWORK = f"{Path(__file__).parents[2] / 'ranks' / 'networks.py'}:Everything"


def fit(folder: Path, make: Any = None, model: Any = None, **words: Any) -> Result:
    """Trains a network with BatchNorm and dropout: by a reference, or by what is given."""
    length = {"steps": 3, "seed": 3, "eval_every": 2, "eval_batch_size": 7, **words}
    recipe = recipe_in(
        folder,
        model=model or ({} if make else {"name": NETWORK}),
        data={"hold_out": 0.2},
        train={"global_batch_size": 24, "micro_batch_size": 4, **length},
        solver={"base_lr": 0.1},
        checkpoint={"every": 2, "best": True},
    )
    return firecaffe.train(recipe, make, small_data(60, 0), small_data(20, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load")


@pytest.fixture(scope="module")
def result(folder: Path) -> Result:
    return fit(folder / "run")


def test_no_metric_has_the_name_of_another_entry(result: Result) -> None:
    """It would be lost: an entry of a record replaces a metric of its name."""
    rows = [record_of(result.folder), *result.history]
    names = {name for row in rows for name in row if not name.startswith("validation_")}
    measured = Evaluation(1, 0.0, {}, [], 0.5)
    answer = Evaluated(result.folder, 3, "weights", False, None, "", measured, ())
    assert {*names, *answer.to_dict()} - result.metrics.keys() <= {*RESERVED}


def test_a_result_is_json_with_what_is_no_number(result: Result) -> None:
    changed = dataclasses.replace(result, test_loss=math.nan, metrics={"top1": math.inf})
    row = json.loads(json.dumps(changed.to_dict(), allow_nan=False))
    assert (row["test_loss"], row["top1"]) == (None, None)


def test_a_run_whose_task_was_given_is_loaded_and_trained_again(tmp_path: Path) -> None:
    """Its recipe says that a script gave the task, which a network alone does not need."""
    data, task = (small_data(24), small_data(8, 1)), firecaffe.Task(nn.CrossEntropyLoss())
    sizes = {"global_batch_size": 8, "micro_batch_size": 4, "steps": 2}
    result = firecaffe.train(recipe_in(tmp_path / "run", train=sizes), Everything, *data, task=task)
    assert sha256(firecaffe.load(result.folder, Everything)) == result.weights_sha256
    named = {"model.name": NETWORK}
    assert Path(firecaffe.export(result.folder, "safetensors", replace=named).path).is_file()
    with pytest.raises(RecipeError, match=r"data, task.*task\.name"):
        firecaffe.evaluate(result.folder, replace=named)
    recorded = firecaffe.Recipe.read(result.folder / "recipe.toml")
    again = recorded.replace("run.folder", str(tmp_path / "again"))
    with pytest.raises(RecipeError, match=r"own task.*a script gives it"):
        firecaffe.train(again, Everything, *data)
    same = firecaffe.train(again, Everything, *data, task=task).weights_sha256
    assert same == result.weights_sha256


load = partial(firecaffe.load, trust_code=True)


def sha256(network: nn.Module) -> str:
    """As a run's weights_sha256 is made."""
    named = [(f"parameter/{name}", each.detach()) for name, each in network.named_parameters()]
    return digest([*named, *((f"buffer/{name}", each) for name, each in network.named_buffers())])


def test_a_result_has_the_network_the_folder_and_the_history(result: Result) -> None:
    assert sha256(result.model) == result.weights_sha256
    assert not any(module.training for module in result.model.modules())
    assert all(each.grad is None for each in result.model.parameters())
    assert (result.folder / "result.json").is_file()
    steps = [("train", 1), ("train", 2), ("validation", 2), ("train", 3), ("validation", 3)]
    assert [(row["kind"], row["step"]) for row in result.history] == [*steps, ("test", 3)]
    assert result.history[-1]["top1"] == result.metrics["top1"]
    assert result.history[3]["loss"] == result.loss
    assert {"folder", "model", "_live"}.isdisjoint(result.to_dict())


def test_what_a_result_does_not_have_is_told(result: Result, tmp_path: Path) -> None:
    """One of five classes or fewer, a regression, and on a host without its folder."""
    few = dataclasses.replace(result, metrics={"top1": 0.5})
    regression = dataclasses.replace(result, metrics={"mse": 2.0})
    assert few.top1 == 0.5
    with pytest.raises(AttributeError, match=r"no top5; its metrics are top1$"):
        _ = few.top5
    with pytest.raises(AttributeError, match=r"no top1; its metrics are mse$"):
        _ = regression.top1
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        _ = dataclasses.replace(result, folder=tmp_path / "none").history


def test_a_result_from_another_process_loads_its_network(result: Result) -> None:
    data = pickle.dumps(result)
    there: Result = pickle.loads(data)
    assert (there, there.folder) == (result, result.folder)
    assert b"_live" not in data
    assert there.model is not result.model
    assert (sha256(there.model), there.model.training) == (result.weights_sha256, False)


def test_every_rank_has_the_network(result: Result, ranks: Ranks, folder: Path) -> None:
    told = ranks.shared(2, weights_in_rank, str(folder / "two"))
    assert told == [result.weights_sha256] * 2


def weights_in_rank(folder: str) -> str:
    return sha256(fit(Path(folder)).model)


def test_a_run_and_its_checkpoints_are_loaded(result: Result) -> None:
    before = torch.random.get_rng_state()
    checkpoints = result.folder / "checkpoints"
    for where in (str(result.folder), checkpoints, checkpoints / "step-00000003"):
        loaded = load(where)
        assert sha256(loaded) == result.weights_sha256
        assert not any(module.training for module in loaded.modules())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert sha256(load(checkpoints / "step-00000002")) != result.weights_sha256
    assert result.best is not None
    best = sha256(load(result.best["checkpoint"]))
    assert sha256(load(result.folder, best=True)) == sha256(load(checkpoints / "best")) == best


def test_first_weights_are_said_as_what_is_loaded(result: Result, tmp_path: Path) -> None:
    """`model.weights` takes a run's folder, `best` and a checkpoint's folder."""
    checkpoints = result.folder / "checkpoints"
    best = checkpoints / (checkpoints / "best").read_text().strip()
    newest = checkpoints / "step-00000003"
    wheres = {result.folder: newest, checkpoints: newest, checkpoints / "best": best, best: best}
    for where, which in wheres.items():
        file = str(which / "state.safetensors")
        assert find_weights(str(where)) == find_weights(file) == (file, [])

    # A training takes them, and says which they are.
    model = {"name": NETWORK, "weights": str(checkpoints / "best"), "freeze": ["*weight"]}
    tuned = fit(tmp_path / "run", model=model, steps=1, seed=4)
    assert sha256(load(tuned.folder)) == tuned.weights_sha256
    loaded = dict(load(best).named_parameters())
    frozen = [(n, p) for n, p in tuned.model.named_parameters() if not p.requires_grad]
    assert frozen
    assert all(torch.equal(each, loaded[name]) for name, each in frozen)
    assert record_of(tuned.folder)["first_weights"]["file"] == str(best / "state.safetensors")

    for where, said in ((tmp_path / "none" / "best", "checkpoint.best"), (tmp_path, "SHA256SUMS")):
        with pytest.raises(RecipeError, match=r"^model\.weights .*") as caught:
            find_weights(str(where))
        assert all(part in str(caught.value) for part in (str(where), said))


def test_the_network_of_a_moving_average_is_the_average(folder: Path) -> None:
    result = fit(folder / "ema", ema_decay=0.5)
    assert result.evaluated == "ema"
    assert sha256(result.model) != result.weights_sha256
    loaded = load(result.folder)
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
        loaded = load(result.folder)
    file, damaged = find_weights(str(result.folder))
    assert ("step-00000002" in file, "step-00000003" in damaged[0]) == (True, True)
    assert sha256(loaded) == sha256(load(result.folder / "checkpoints" / "step-00000002"))


def test_a_file_of_weights_goes_into_a_network(result: Result, tmp_path: Path) -> None:
    weights = result.model.state_dict()
    save_file(weights, tmp_path / "net.safetensors")
    torch.save(weights, tmp_path / "net.pt")
    for name in ("net.safetensors", "net.pt"):
        for model in (Everything, Everything()):
            assert sha256(firecaffe.load(tmp_path / name, model)) == result.weights_sha256
    save_file({**weights, "extra": torch.ones(1)}, tmp_path / "extra.safetensors")
    with pytest.raises(CheckpointError, match="extra"):
        firecaffe.load(tmp_path / "extra.safetensors", Everything)
    own = result.folder / "checkpoints" / "step-00000003" / "state.safetensors"
    assert sha256(firecaffe.load(own, Everything)) == result.weights_sha256
    more = Everything()
    more.add_module("more", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"net\.pt.*more\.weight"):
        firecaffe.load(tmp_path / "net.pt", more)


def test_a_network_that_was_given_in_python_has_to_be_given_again(folder: Path) -> None:
    result = fit(folder / "given", Everything)
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
        ("run", {"model": nn.Linear}, RecipeError, r"lambda: Linear\(…\)"),
        ("file.pt", {}, RecipeError, "model="),
        ("file.pt", {"model": Everything}, CheckpointError, r"file\.pt"),
        ("empty", {}, RecipeError, r"recipe\.toml"),
        ("broken", {}, RunError, r"recipe\.toml"),
        ("later", {}, RunError, r"train\.word_of_tomorrow"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    result: Result, where: str, words: Any, error: type[FirecaffeError], said: str
) -> None:
    folder = result.folder.parent
    (folder / "file.pt").write_bytes(b"no weights")
    for name in ("empty", "broken", "later"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "broken" / "recipe.toml").write_text("[")
    (folder / "later" / "recipe.toml").write_text("[train]\nword_of_tomorrow=1")
    with pytest.raises(error, match=said) as raised:
        firecaffe.load(folder / where, **words)
    assert "\n" not in str(raised.value)


def low_rank() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 9), nn.Tanh(), nn.Linear(9, 4))


def test_layers_of_lower_rank_are_trained_and_loaded(tmp_path: Path) -> None:
    weights, ranks = tmp_path / "low.safetensors", {"1": 3}
    save_file(low_rank_weights(low_rank().state_dict(), ranks), weights)
    model = {"weights": str(weights), "low_rank": ranks}
    result = fit(tmp_path / "run", low_rank, model=model)
    state = firecaffe.load(result.folder, low_rank).state_dict()
    assert state["1.reduce.weight"].shape == (3, 36)
    assert all(torch.equal(each, state[name]) for name, each in result.model.state_dict().items())


# --- what is frozen -------------------------------------------------------------------------------

FREEZE = ["stem.*", "head.*"]


def frozen(
    network: nn.Module, config: ModelConfig, taken: Any = None, resumed: bool = False
) -> Frozen:
    names = list(network.named_parameters(remove_duplicate=False))
    return frozen_of(names, config, taken, resumed)


def test_what_is_frozen_and_fresh_is_told(tmp_path: Path) -> None:
    network, file = Net(3), str(tmp_path / "w.pt")
    assert frozen(network, ModelConfig()).notes(ModelConfig()) == []
    state = Net(5).state_dict()  # with another head
    del state["stem.bias"]
    torch.save(state, file)
    freeze(network, FREEZE)
    config = ModelConfig(freeze=FREEZE)
    fresh = frozen(network, config)
    assert (len(fresh.names), fresh.of, fresh.fresh) == (4, 6, fresh.names)
    said, warning = fresh.notes(config)
    assert "4 of 6 parameters" in said
    assert all(word in warning for word in ("4 of 4", "stem.weight", "model.weights", "empty"))
    # What a checkpoint or a library gives is not fresh.
    assert len(frozen(network, config, None, resumed=True).notes(config)) == 1
    for words in ({"pretrained": True}, {"weights": "X"}):
        given = ModelConfig(args=words, freeze=FREEZE)
        assert len(frozen(network, given).notes(given)) == 1
    config = ModelConfig(weights=file, freeze=FREEZE)
    partly = frozen(network, config, load_weights(network, file))
    assert partly.fresh == ["stem.bias", "head.weight", "head.bias"]
    assert all(word in partly.notes(config)[1] for word in ("3 of 4", "stem.bias"))


def test_a_tied_parameter_needs_one_of_its_names(tmp_path: Path) -> None:
    network, state = Tied(3), Tied(3).state_dict()
    del state["first.weight"]
    torch.save(state, tmp_path / "w.pt")
    freeze(network, ["first.weight"])
    taken = load_weights(network, str(tmp_path / "w.pt"))
    assert frozen(network, ModelConfig(freeze=["first.weight"]), taken).fresh == []
