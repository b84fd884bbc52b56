"""Bytes that ranks send, as they count them, against the schedules."""

import pytest
import torch

from firecaffe import DataConfig, ExchangeConfig, ModelConfig, ParallelConfig, Recipe, TrainConfig
from firecaffe.cluster.world import join
from firecaffe.exchange import ALGORITHMS
from firecaffe.transport.exchange import Exchange
from tests.kit.worlds import NAMED, Trained, Training, changed
from tests.ranks.matrix import FIRST, Net, full, recipe_of
from tests.world import Ranks

ELEMENTS = 1200


def sent_bytes(algorithms: list[str]) -> list[int | None]:
    """What this rank has sent after a sum by each of them, all together."""
    with join("cpu") as world:
        sent = []
        for algorithm in algorithms:
            Exchange.of_vectors(world, algorithm).all_reduce(torch.ones(ELEMENTS))
            sent.append(world.traffic.sent_bytes)
        return sent


def test_ranks_send_what_the_schedule_says(ranks: Ranks) -> None:
    names = ["parameter_server", "pipelined_tree", "ring", "halving_doubling"]
    total = [0] * 4
    by_rank = ranks.shared(4, sent_bytes, [*names, "native"])
    assert [sent.pop() for sent in by_rank] == [None] * 4  # of the backend's own nobody knows
    for index, name in enumerate(names):
        for transfer in ALGORITHMS[name](4, ELEMENTS).transfers():
            total[transfer.source] += 4 * transfer.num_elements
        assert [sent[index] for sent in by_rank] == total, name


WEIGHTS_BYTES = 4 * 431_080
"""LeNet's, as float32."""


LENET = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig("generated"),
    train=TrainConfig(global_batch_size=16, micro_batch_size=4, steps=2, eval_batch_size=500),
)


@pytest.mark.parametrize(
    ("exchange", "of_weights"),
    [
        # Rank 1 sends its sum up the tree, rank 0 the total down.
        (ExchangeConfig("tree", shared_memory=False), 1.0),
        (ExchangeConfig("tree"), 0.0),
        # Half of each of two nodes goes out, half of the total comes back, at half the bytes.
        (ExchangeConfig(compressor="bfloat16"), 3 / 4),
    ],
    ids=["plain", "shared memory", "bfloat16"],
)
def test_a_run_records_what_each_step_sent(
    trained: Trained, exchange: ExchangeConfig, of_weights: float
) -> None:
    recipe = changed(LENET, exchange=exchange)
    first, second = trained(2, recipe, NAMED).sent_bytes_per_step_by_rank
    assert first == second == pytest.approx(of_weights * WEIGHTS_BYTES, rel=0.01)


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(1, 2, {"classifier.0": "neurons"}, 2), ParallelConfig(stages=["classifier"])],
    ids=["split", "stages"],
)
def test_what_evaluations_send_is_no_steps(trained: Trained, parallel: ParallelConfig) -> None:
    split = changed(recipe_of(full({}), FIRST), parallel=parallel)
    evaluated = {"steps": 2, "eval_every": 1, "eval_batch_size": 2}
    few, many = (
        trained(2, changed(split, train=words), Training(Net, 70, 40))
        for words in ({"steps": 2, "eval_every": 0}, evaluated)
    )
    sent = few.sent_bytes_per_step_by_rank
    assert many.sent_bytes_per_step_by_rank == sent
    features = 4 * 32 * 32
    if parallel.stages:
        # Of 32 samples 32 features go to the second stage, and their gradients to the first, each
        # micro-batch with the generator's state.
        assert sent == [features + 8 * torch.get_rng_state().nbytes, features]
    else:
        # The gradients of 32 features are summed, and of 21 neurons, of which a rank has 11 at
        # most, gathered.
        assert sent == [features + 4 * 32 * 11] * 2
