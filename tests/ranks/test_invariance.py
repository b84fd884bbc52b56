"""The promise: workers change no bit of weights, buffers, optimizer state and losses.

Modes, layouts, arithmetic and codecs are in the matrix (`test_matrix.py`), solvers in
`test_update_at.py`.
"""

import pytest
import torch

from firecaffe import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    Recipe,
    SolverConfig,
    TrainConfig,
)
from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.route import keeps_tree_order
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.checkpoint import load_newest
from tests.kit.worlds import Trained, changed, end
from tests.ranks.networks import Everything

TREE_ORDER = [name for name in ALGORITHMS if keeps_tree_order(name)]
IN_MATRIX = "halving_doubling", "pipelined_tree"

# 6 micro-batches of 4, over 100 samples: an epoch ends with a step of 4 samples, all in micro-batch
# 0, so that every other worker has none.
RECIPE = Recipe(
    train=TrainConfig(global_batch_size=24, micro_batch_size=4, steps=7, seed=3, eval_batch_size=7),
    solver=SolverConfig(
        type="adam", base_lr=0.01, momentum=0.9, weight_decay=0.01, clip_gradients=0.5
    ),
    exchange=ExchangeConfig(algorithm="tree", bucket_bytes=200, timeout_s=300),
)

ON_SUBTREES = changed(RECIPE, train={"global_batch_size": 48})
"""With four micro-batches for each of three workers."""


def test_workers_and_buckets_that_change_by_resume(trained: Trained) -> None:
    resume = None
    for workers, steps, bucket_bytes in ((6, 2, 200), (2, 4, 1), (1, 5, 500), (3, 7, 10_000_000)):
        exchange, train = {"bucket_bytes": bucket_bytes}, {"steps": steps}
        recipe = changed(RECIPE, train=train, exchange=exchange, checkpoint={"every": 2})
        result = trained(workers, recipe, resume=resume)
        resume = result.folder
    assert end(result) == end(trained(1, RECIPE)) == end(trained(5, RECIPE))


@pytest.mark.parametrize("algorithm", [name for name in TREE_ORDER if name not in IN_MATRIX])
def test_any_exchange_in_tree_order(trained: Trained, algorithm: str) -> None:
    """Over sockets. With four micro-batches each: subtrees, which the exchange goes on with."""
    exchange = {"algorithm": algorithm, "bucket_bytes": 500, "shared_memory": False}
    assert end(trained(3, changed(ON_SUBTREES, exchange=exchange))) == end(trained(1, ON_SUBTREES))


def test_the_order_of_additions_matters_at_all(trained: Trained) -> None:
    """The control: an exchange in another order ends in other bits, and its record says so."""
    ring, tree = trained(4, changed(RECIPE, exchange={"algorithm": "ring"})), trained(4, RECIPE)
    assert end(tree) == end(trained(1, RECIPE))
    assert ring.state_sha256 != tree.state_sha256
    assert read_run_file(ring.folder, "result.json")["identity_doubts"] == [
        "exchange.algorithm ring does not add in the order of the micro-batch tree "
        "at 4 workers and 6 micro-batches"
    ]
    record = read_run_file(tree.folder, "result.json")
    assert (record["exchange"], record["route"], record["identity_doubts"]) == ("tree", "fold", [])


def test_all_that_a_training_can_be_asked_for(trained: Trained) -> None:
    """The moving average, mixed and erased samples, the best checkpoint and the early stop: on 1
    and on 3 workers, and on 3 that go on from 2.
    """
    average = {"ema_decay": 0.9, "ema_warmup": True}
    whole = changed(
        RECIPE,
        train={"eval_every": 2, "stop_after": 9, **average},
        data=DataConfig(hold_out=0.2, mixup=0.4, cutmix=1.0, erasing=0.5),
        checkpoint=CheckpointConfig(best=True),
    )
    alone, three = trained(1, whole), trained(3, whole)
    half = trained(2, changed(whole, train={"steps": 4}))
    on = trained(3, whole, resume=half.folder)
    for found in (three, on):
        assert end(found) == end(alone)
        assert {**(found.best or {}), "checkpoint": ""} == {**(alone.best or {}), "checkpoint": ""}
        assert found.evaluated == "ema"
    # The average is what was evaluated, and it is in the checkpoint.
    saved = load_newest(three.folder)[0].tensors
    assert not torch.equal(saved["ema/head.weight"], saved["parameter/head.weight"])
    plain = trained(1, changed(whole, train={"ema_decay": 0.0}))
    assert plain.weights_sha256 == alone.weights_sha256
    assert plain.test_loss != alone.test_loss


@pytest.mark.slow  # for each of the six ranks the compiler runs
def test_compiled_code(trained: Trained) -> None:
    """Of full and short micro-batches, which not every worker meets."""
    recipe = changed(RECIPE, train={"compile": True})
    alone, two, three = (trained(workers, recipe) for workers in (1, 2, 3))
    assert end(two) == end(three) == end(alone)
    assert alone.state_sha256 != trained(1, RECIPE).state_sha256
    names = load_newest(two.folder)[0].tensors.keys()
    assert {f"parameter/{name}" for name, _ in Everything().named_parameters()} <= names
