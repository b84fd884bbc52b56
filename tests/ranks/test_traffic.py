"""Bytes that ranks send, as they count them, against the schedules."""

import dataclasses
from pathlib import Path

import pytest
import torch

import firecaffe
from firecaffe import ExchangeConfig, Recipe, RunConfig, TrainConfig
from firecaffe.comm.exchange import Exchange
from firecaffe.comm.world import join
from firecaffe.exchange import ALGORITHMS
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

ELEMENTS = 1200


def sent_bytes(algorithm: str) -> int | None:
    with join("cpu") as world:
        Exchange(world, algorithm).all_reduce(torch.ones(ELEMENTS))
        return world.traffic.sent_bytes


@pytest.mark.parametrize("name", ["parameter_server", "pipelined_tree", "ring", "halving_doubling"])
def test_ranks_send_what_the_schedule_says(ranks: Ranks, name: str) -> None:
    expected = dict.fromkeys(range(4), 0)
    for transfer in ALGORITHMS[name](4, ELEMENTS).transfers():
        expected[transfer.source] += 4 * transfer.num_elements
    assert ranks.run(4, sent_bytes, name) == list(expected.values())


def test_of_the_backends_own_nobody_knows(ranks: Ranks) -> None:
    assert ranks.run(2, sent_bytes, "native") == [None, None]


def fit(folder: str, exchange: ExchangeConfig) -> list[float | None]:
    recipe = Recipe(
        train=TrainConfig(global_batch_size=16, micro_batch_size=4, steps=3, eval_batch_size=7),
        run=RunConfig(folder=folder, tensorboard=False),
        exchange=dataclasses.replace(exchange, timeout_s=60),
    )
    result = firecaffe.train(recipe, Everything, small_data(100), small_data(30, 1))
    return result.sent_bytes_per_step_by_rank


def test_a_run_records_what_each_step_sent(ranks: Ranks, tmp_path: Path) -> None:
    """A tree over two ranks: rank 1 sends its sum up, rank 0 the total down. Shared memory sends
    nothing, and bfloat16 about half: the tail and the counts stay float32.
    """
    found = {
        name: ranks.run(2, fit, str(tmp_path / name), exchange)[0]
        for name, exchange in {
            "plain": ExchangeConfig("tree", shared_memory=False),
            "shared": ExchangeConfig("tree"),
            "bfloat16": ExchangeConfig(compressor="bfloat16"),
        }.items()
    }
    weights = sum(p.nbytes for p in Everything().parameters() if p.requires_grad)
    first, second = found["plain"]
    assert first is not None
    assert first == second
    assert weights < first < 1.5 * weights + 2000
    assert found["shared"] == [0, 0]
    # Half of each of two nodes goes out and half of the total comes back, at half the bytes.
    coded = found["bfloat16"][0]
    assert coded is not None
    assert 3 / 4 * weights < coded < first
