"""An update in shards, planned: its memory, what it sends, and its time."""

from dataclasses import replace

import pytest
import torch

from firecaffe import DataConfig, ExchangeConfig, Recipe, SolverConfig, TrainConfig
from firecaffe.exchange.schedule import ALL_GATHER, REDUCE_SCATTER
from firecaffe.gradients.shards import make_shards
from firecaffe.models import build_model
from firecaffe.models.config import ModelConfig
from firecaffe.planner.advice import changes
from firecaffe.planner.cluster import Link, load_cluster
from firecaffe.planner.compute_time import update_s
from firecaffe.planner.forecast import forecast, forecasts
from firecaffe.planner.memory import memory_bytes
from firecaffe.planner.of_recipe import workload_of, workload_of_model
from firecaffe.planner.simulate import Network
from firecaffe.planner.update_price import shards_of, shards_s
from firecaffe.recipe.checked_recipe import check_recipe

ALL = replace(workload_of_model(ModelConfig("alexnet"), None, 256, 16), optimizer_vectors=2)
ROWS = replace(ALL, update_at="shards")
WHOLE = replace(ROWS, has_whole_shards=True)


def test_a_recipe_is_priced_as_it_says() -> None:
    recipe = Recipe(
        ModelConfig("lenet"), DataConfig("generated"), TrainConfig(64, 16, steps=3),
        SolverConfig("adam"), ExchangeConfig(update_at="shards"),
    )  # fmt: skip
    found = workload_of(check_recipe(recipe))
    assert (found.update_at, found.has_whole_shards, found.optimizer_vectors) == (
        "shards",
        False,
        2,
    )
    clipped = replace(recipe, solver=SolverConfig("adam", clip_gradients=1.0))
    assert workload_of(check_recipe(clipped)).has_whole_shards


@pytest.mark.parametrize("work", [ROWS, WHOLE])
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_shards_are_those_of_a_training(work: object, workers: int) -> None:
    workload = WHOLE if work is WHOLE else ROWS
    with torch.device("meta"):
        named = dict(build_model("alexnet").named_parameters())
    order = list(range(len(named)))[::-1]
    words = named, order, workload.bucket_bytes, workers
    own = [make_shards(*words, r, workload.has_whole_shards).own.values() for r in range(workers)]
    planned = shards_of(workload, workers)
    held = [sum(each) for each in zip(*planned.elements, strict=True)]
    assert held == [sum(each.numel() for each in of_rank) for of_rank in own]
    assert planned.held_bytes == 4 * max(held)


def test_memory_of_the_optimizer_is_a_share() -> None:
    weights = ALL.parameter_bytes
    for workers in (2, 4, 8):
        found = memory_bytes(ROWS, workers)
        assert found["optimizer"] == pytest.approx(2 * weights / workers, rel=0.005)
        assert memory_bytes(WHOLE, workers)["optimizer"] == 2 * 4 * 9216 * 4096  # fc6
        before = memory_bytes(ALL, workers)
        assert before["optimizer"] == 2 * weights
        for part in ("parameters", "gradients", "activations"):
            assert found[part] == before[part]
        # The others' shards arrive for the owner's: of the largest bucket, or the whole of it.
        assert found["buckets"] == pytest.approx((workers - 1) / workers * 4 * 37_752_832, rel=1e-3)
    assert memory_bytes(ROWS, 1) == memory_bytes(ALL, 1)


def test_both_ways_take_what_the_formula_says() -> None:
    """(P - 1)(α + B / P β) each, and (P - 1) / P · n additions on the way there; what goes early,
    as of 16 micro-batches over 3, is not waited for. Of whole parameters the owner's port takes all
    of a bucket that is one.
    """
    rate, latency_s, add_s = 1e9, 1e-5, 1e-10
    link = Link("net", latency_s, rate, addition_s_per_byte=add_s)
    work = replace(ROWS, bucket_bytes=10**9)  # one bucket
    bytes_ = work.parameter_bytes
    for workers in (2, 3, 4, 32):
        network = Network((link,), workers)
        shard = bytes_ / workers
        way_s = (workers - 1) * (latency_s + shard / rate)
        adds_s = (workers - 1) * shard * add_s
        [there_s], [back_s] = (shards_s(work, network, k) for k in (REDUCE_SCATTER, ALL_GATHER))
        assert there_s + back_s == pytest.approx(2 * way_s + adds_s, rel=0.02)
        if workers <= 16:
            assert back_s == pytest.approx(way_s, rel=0.02)
    [of_one] = shards_s(replace(WHOLE, bucket_bytes=10**9), Network((link,), 4), ALL_GATHER)
    share = shards_of(replace(WHOLE, bucket_bytes=10**9), 4).held_bytes / bytes_
    assert of_one == pytest.approx(4 * share * 3 * bytes_ / 4 / rate, rel=0.02)


def test_a_step_has_the_gather_after_a_shorter_update() -> None:
    cluster = load_cluster("ethernet-1g")
    rows = forecasts(ROWS, cluster, [1, 4])
    assert [(row.workers, row.exchange) for row in rows] == [(1, "tree"), (4, "tree")]
    network = Network(cluster.links, 4)
    latency_s = cluster.links[-1].latency_s
    # Before the update all four agree on it, by messages round a ring.
    gather_s = 3 * latency_s + sum(shards_s(ROWS, network, ALL_GATHER))
    found = rows[1]
    assert found.exposed_communication_s > gather_s
    assert found.exchange_s == pytest.approx(
        gather_s + sum(shards_s(ROWS, network, REDUCE_SCATTER))
    )
    share = shards_of(ROWS, 4).held_bytes / ROWS.parameter_bytes
    assert found.update_s == pytest.approx(update_s(ROWS, cluster.device, share))
    assert found.memory_bytes.items() >= memory_bytes(ROWS, 4).items()
    alone = forecast(ALL, cluster, 1, "tree")
    assert (rows[0].step_s, rows[0].memory_bytes) == (alone.step_s, alone.memory_bytes)
    # A compressor cannot stand beside it, and is forecast without.
    assert forecast(ROWS, cluster, 4, "tree", "int8") == forecast(ALL, cluster, 4, "tree", "int8")


def test_the_advice_knows_what_the_other_update_brings() -> None:
    """Whole parameters on a slow link: the owner of the largest is waited for."""
    cluster = load_cluster("ethernet-1g")
    for work, is_slower in ((WHOLE, True), (ROWS, False)):
        [row] = forecasts(work, cluster, [4])
        found = [each.what for each in changes(work, cluster, row)]
        assert ("exchange.update_at all" in found) == is_slower
