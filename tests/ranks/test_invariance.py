"""The promise: workers change no bit of weights, buffers, optimizer state and losses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import firecaffe
from firecaffe import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    TrainConfig,
)
from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.route import keeps_tree_order
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.checkpoint import load_newest
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

TREE_ORDER = [name for name in ALGORITHMS if keeps_tree_order(name)]

# 6 micro-batches of 4, over 100 samples: an epoch ends with a step of 4 samples, all in micro-batch
# 0, so that every other worker has none.
RECIPE = Recipe(
    train=TrainConfig(global_batch_size=24, micro_batch_size=4, steps=7, seed=3, eval_batch_size=7),
    solver=SolverConfig(
        type="adam", base_lr=0.01, momentum=0.9, weight_decay=0.01, clip_gradients=0.5
    ),
    exchange=ExchangeConfig(algorithm="tree", bucket_bytes=200, timeout_s=300),
)

ON_SUBTREES = dataclasses.replace(
    RECIPE, train=dataclasses.replace(RECIPE.train, global_batch_size=48)
)
"""With four micro-batches for each of three workers."""


def fit(recipe: Recipe, folder: str, resume: str | None = None) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    return firecaffe.train(recipe, Everything, small_data(100), small_data(30, 1), resume=resume)


def state(ranks: Ranks, world_size: int, recipe: Recipe, folder: Path) -> str:
    results = ranks.shared(world_size, fit, recipe, str(folder))
    assert len({result.state_sha256 for result in results}) == 1
    return str(results[0].state_sha256)


@pytest.fixture(scope="session")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state that one worker ends with."""
    return state(ranks, 1, RECIPE, tmp_path_factory.mktemp("alone") / "run")


@pytest.fixture(scope="module")
def alone_on_subtrees(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    return state(ranks, 1, ON_SUBTREES, tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize("world_size", [2, 5, 6])
def test_any_number_of_workers(ranks: Ranks, alone: str, world_size: int, tmp_path: Path) -> None:
    assert state(ranks, world_size, RECIPE, tmp_path / "run") == alone


@pytest.mark.parametrize("algorithm", TREE_ORDER)
def test_any_exchange_in_tree_order(
    ranks: Ranks, alone_on_subtrees: str, algorithm: str, tmp_path: Path
) -> None:
    """Over sockets. With four micro-batches each: subtrees, which the exchange goes on with."""
    exchange = ExchangeConfig(
        algorithm=algorithm, bucket_bytes=500, shared_memory=False, timeout_s=300
    )
    many = dataclasses.replace(ON_SUBTREES, exchange=exchange)
    assert state(ranks, 3, many, tmp_path / "many") == alone_on_subtrees


@pytest.mark.parametrize("bucket_bytes", [1, 10_000_000])
def test_any_bucket_size(ranks: Ranks, alone: str, bucket_bytes: int, tmp_path: Path) -> None:
    exchange = dataclasses.replace(RECIPE.exchange, bucket_bytes=bucket_bytes)
    recipe = dataclasses.replace(RECIPE, exchange=exchange)
    assert state(ranks, 2, recipe, tmp_path / "run") == alone


@pytest.mark.parametrize(
    "words",
    [{"channels_last": True}, {"autocast": "bfloat16"}, {"autocast": "float16"}],
    ids=["channels_last", "bfloat16", "float16"],
)
def test_layouts_and_autocast(
    ranks: Ranks, alone: str, words: dict[str, object], tmp_path: Path
) -> None:
    train = dataclasses.replace(RECIPE.train, **words)  # type: ignore[arg-type]
    recipe = dataclasses.replace(RECIPE, train=train)
    one = state(ranks, 1, recipe, tmp_path / "1")
    assert one == state(ranks, 2, recipe, tmp_path / "2") == state(ranks, 3, recipe, tmp_path / "3")


CYCLE: dict[str, Any] = {"lr_policy": "one_cycle", "base_momentum": 0.8}
SOLVERS: dict[str, dict[str, Any]] = {
    "sgd": {"decay_form": "decoupled", **CYCLE},
    **{name: {} for name in ("nesterov", "adagrad", "adadelta", "rmsprop")},
    "adamw": CYCLE,
}


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver(ranks: Ranks, solver: str, tmp_path: Path) -> None:
    words = {"type": solver, "weight_decay": 0.01, **SOLVERS[solver]}
    recipe = dataclasses.replace(RECIPE, solver=SolverConfig(**words))
    assert state(ranks, 1, recipe, tmp_path / "1") == state(ranks, 2, recipe, tmp_path / "2")


def test_all_that_a_training_can_be_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    """The moving average, mixed and erased samples, the best checkpoint and the early stop: on 1
    and on 3 workers, and on 3 that go on from 2.
    """
    whole = dataclasses.replace(
        RECIPE,
        train=dataclasses.replace(
            RECIPE.train, eval_every=2, stop_after=9, ema_decay=0.9, ema_warmup=True
        ),
        data=DataConfig(hold_out=0.2, mixup=0.4, cutmix=1.0, erasing=0.5),
        checkpoint=CheckpointConfig(best=True),
    )
    results = [
        ranks.shared(world_size, fit, whole, str(tmp_path / str(world_size)))
        for world_size in (1, 3)
    ]
    train = dataclasses.replace(whole.train, steps=4)
    ranks.shared(2, fit, dataclasses.replace(whole, train=train), str(tmp_path / "half"))
    results.append(ranks.shared(3, fit, whole, str(tmp_path / "rest"), str(tmp_path / "half")))
    assert len({each.state_sha256 for of_run in results for each in of_run}) == 1
    best = [{**(of_run[0].best or {}), "checkpoint": ""} for of_run in results]
    assert best[0] == best[1] == best[2]
    assert {each.evaluated for of_run in results for each in of_run} == {"ema"}
    metrics = [of_run[0].metrics for of_run in results]
    assert metrics[0] == metrics[1] == metrics[2]
    # The average is what was evaluated, and it is in the checkpoint.
    saved = load_newest(tmp_path / "3")[0].tensors
    assert not torch.equal(saved["ema/head.weight"], saved["parameter/head.weight"])
    plain = dataclasses.replace(whole, train=dataclasses.replace(whole.train, ema_decay=0.0))
    (other,) = ranks.shared(1, fit, plain, str(tmp_path / "plain"))
    assert other.weights_sha256 == results[0][0].weights_sha256
    assert other.test_loss != results[0][0].test_loss


@pytest.mark.slow  # for each of the six ranks the compiler runs
def test_compiled_code(ranks: Ranks, alone: str, tmp_path: Path) -> None:
    """Of full and short micro-batches, which not every worker meets."""
    train = dataclasses.replace(RECIPE.train, compile=True)
    recipe = dataclasses.replace(RECIPE, train=train)
    found = [state(ranks, n, recipe, tmp_path / str(n)) for n in (1, 2, 3)]
    assert len(set(found)) == 1
    assert found[0] != alone
    names = load_newest(tmp_path / "2")[0].tensors.keys()
    assert {f"parameter/{name}" for name, _ in Everything().named_parameters()} <= names


def test_a_run_that_changes_its_workers_by_resume(ranks: Ranks, alone: str, tmp_path: Path) -> None:
    """4 workers to step 2, then 2 to step 4, then 1 to step 5, then 3 to the end."""
    resume = None
    for world_size, steps in ((4, 2), (2, 4), (1, 5), (3, 7)):
        train = dataclasses.replace(RECIPE.train, steps=steps)
        recipe = dataclasses.replace(RECIPE, train=train, checkpoint=CheckpointConfig(every=2))
        folder = tmp_path / f"to-{steps}"
        results = ranks.shared(world_size, fit, recipe, str(folder), resume)
        resume = str(folder)
    assert results[0].state_sha256 == alone


def test_the_order_of_additions_matters_at_all(ranks: Ranks, alone: str, tmp_path: Path) -> None:
    """The control: an exchange in another order ends in other bits, and its record says so."""
    exchange = dataclasses.replace(RECIPE.exchange, algorithm="ring")
    recipe = dataclasses.replace(RECIPE, exchange=exchange)
    assert state(ranks, 4, recipe, tmp_path / "run") != alone
    doubts = read_run_file(tmp_path / "run", "result.json")["identity_doubts"]
    assert doubts == [
        "exchange.algorithm ring does not add in the order of the micro-batch tree "
        "at 4 workers and 6 micro-batches"
    ]


def test_the_record_names_the_route(ranks: Ranks, tmp_path: Path) -> None:
    state(ranks, 4, RECIPE, tmp_path / "run")
    record = read_run_file(tmp_path / "run", "result.json")
    assert (record["exchange"], record["route"]) == ("tree", "fold")
    assert record["identity_doubts"] == []
