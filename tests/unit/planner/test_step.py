"""A step's parts, and an update in shards, against closed formulas and the optimizers' sources."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from firecaffe import DataConfig, ExchangeConfig, Recipe, SolverConfig, TrainConfig
from firecaffe.exchange.schedule import ALL_GATHER, REDUCE_SCATTER
from firecaffe.gradients.shards import make_shards
from firecaffe.models import ModelConfig, build_model
from firecaffe.planner.advice import changes
from firecaffe.planner.chain import chain_of
from firecaffe.planner.cluster import Cluster, Device, Link, MeasuredStep, Storage, load_cluster
from firecaffe.planner.compute_time import MicroBatch, correction, micro_batch, update_s
from firecaffe.planner.forecast import forecast, forecasts
from firecaffe.planner.layouts import LayerLayout
from firecaffe.planner.memory import memory_bytes, on_device
from firecaffe.planner.price import Prices
from firecaffe.planner.recipe_workload import workload_of, workload_of_model
from firecaffe.planner.simulate import Network
from firecaffe.planner.step_cost import ReadyBucket, buckets_of, overlap, slowest_over_mean
from firecaffe.planner.update_price import shards_of, shards_s
from firecaffe.planner.worker_part import memory_of
from firecaffe.planner.workload import PROFILED_IMAGES, LayerWork, Workload, layers_of, vectors_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.solvers.optimizer import SOLVERS

DEVICE = Device("d", 1e12, 1e15, {"float32": 1e12}, efficiency=1.0, overhead_s=0.0)
WORK = workload_of_model(ModelConfig("googlenet"), None, 256, 8)


def test_a_micro_batch_is_its_work_and_the_overhead_of_its_calls() -> None:
    """3 x 2 MAC on a device whose memory is no limit: the published 1.591 G MAC an image. Nobody
    wants the gradient of the images, so the first layer, 118 M MAC, has two of the three.
    """
    compute_s = micro_batch(WORK, DEVICE, 8).compute_s
    macs = 3 * 1.591e9 - 112 * 112 * 64 * 147
    assert compute_s == pytest.approx(8 * 2 * macs / 1e12, rel=0.002)
    starved = replace(DEVICE, memory_bytes_per_s=1e6)  # whose memory is the limit
    assert micro_batch(WORK, starved, 8).compute_s > 100 * compute_s
    # Hockney: with an overhead, half of the rate is reached where the work takes as long.
    slow = replace(DEVICE, overhead_s=1e-4)
    per_image = [micro_batch(WORK, slow, n).compute_s / n for n in (1, 4, 16, 64, 256)]
    assert per_image == sorted(per_image, reverse=True)
    bare = micro_batch(WORK, DEVICE, 1).compute_s
    overhead_s = micro_batch(WORK, slow, 1).compute_s - bare
    assert per_image[-1] == pytest.approx(bare + overhead_s / 256, rel=0.01)


def test_what_stands_in_for_an_exchange_is_priced_in_its_place() -> None:
    """Three workers' shares of 32 micro-batches are no subtrees: fold sums, whatever was named."""
    kept = ("tree", "halving_doubling", "parameter_server")

    def exchange_s(workers: int, name: str) -> float:
        return forecast(WORK, load_cluster("titan"), workers, name).exchange_s

    three, four = ({exchange_s(workers, name) for name in kept} for workers in (3, 4))
    assert (len(three), len(four)) == (1, 3)
    assert exchange_s(3, "ring") not in three


def test_what_was_measured_replaces_what_is_computed() -> None:
    rows = tuple(MeasuredStep("googlenet", n, 0.1 * n, 0.01 * n, 0.5, error=0.02) for n in (4, 16))
    device = replace(DEVICE, measured=rows)
    for size in (4, 16):
        assert micro_batch(WORK, device, size).compute_s == pytest.approx(0.1 * size)
    assert 0.4 < micro_batch(WORK, device, 8).compute_s < 1.6
    assert update_s(WORK, device) == 0.5
    other = replace(WORK, autocast="bfloat16")
    assert correction(other, device, 8) == 1.0  # measured in other arithmetic


def test_layers_hold_every_parameter_and_every_flop() -> None:
    layers = layers_of(ModelConfig("googlenet"), None, None)
    counted = sum(sum(layer.parameters_bytes) for layer in layers.works)
    assert counted == layers.profile.weight_bytes
    flops = sum(layer.flops for layer in layers.works)
    assert flops * 3 == layers.profile.forward_backward_flops / PROFILED_IMAGES


def test_a_bucket_is_ready_with_its_last_gradient() -> None:
    """Three layers of 400 bytes, from the last to the first; a bucket is full at 800, the first at
    a fourth of it.
    """
    layers = tuple(LayerWork("linear", 0.0, 0.0, 400.0, ((10, 10),)) for _ in range(3))
    work = replace(WORK, layers=layers, bucket_bytes=800)
    buckets = buckets_of(work, MicroBatch(1.0, (0.1, 0.2, 0.4)))
    assert [bucket.num_elements for bucket in buckets] == [100, 200]
    assert [bucket.ready_s for bucket in buckets] == pytest.approx([0.1, 0.1 + 0.2 + 0.4])


EARLY, LATE = 0.0, 1.0
TWO = {"lanes": 2, "share": 0.75}  # together two take 0.75 of what they take in turns
OVERLAPS: list[tuple[list[float], list[float], Any, tuple[float, float]]] = [
    ([EARLY, LATE], [0.4, 0.4], {}, (1.0, 0.4)),
    ([EARLY, LATE], [2.0, 0.4], {}, (1.0, 1.4)),
    ([EARLY], [0.4], {}, (1.0, 0.0)),
    ([], [], {}, (1.0, 0.0)),
    # Backward is slowed down by a half, as long as an exchange is under way: 0.3 s of the exchange
    # are 0.2 s of backward. What becomes ready then becomes ready later: at 0.3 + 0.3.
    ([EARLY], [0.3], {"slowdown": 0.5}, (0.3 + 0.8, 0.0)),
    ([EARLY], [9.0], {"slowdown": 0.5}, (1.5, 7.5)),
    ([EARLY, LATE], [0.3, 2.0], {"slowdown": 0.5}, (1.1, 2.0)),
    ([EARLY, 0.5], [0.3, 2.0], {"slowdown": 0.5}, (0.6 + 0.75, 2.0 - 0.75)),
    ([EARLY] * 4, [2.0] * 4, TWO, (1.0, 0.75 * 8.0 - 1.0)),
    # The shorter one is through after 0.75 of 2 x 0.4; what is left of the longer one goes alone.
    ([EARLY] * 2, [2.0, 0.4], TWO, (1.0, 0.75 * 0.8 + 1.6 - 1.0)),
    # A third one waits until there is a lane for it, and no two go where there is one.
    ([EARLY] * 3, [4.0, 1.0, 1.0], TWO, (1.0, 1.5 + 1.5 + 2.0 - 1.0)),
    ([EARLY] * 3, [4.0, 1.0, 1.0], {"lanes": 1, "share": 0.75}, (1.0, 5.0)),
    # The first is alone until the second is ready.
    ([EARLY, LATE], [2.0, 2.0], TWO, (1.0, 1.0 + 0.75 * 2.0 + 1.0 - 1.0)),
    # Nothing is gained: as if one went after the other.
    ([EARLY, LATE], [2.0, 0.4], {"lanes": 2, "share": 1.0}, (1.0, 2.4 - 1.0)),
]
"""When buckets are ready, how long they take, and seconds of backward and of what it does not hide,
of a backward of 1 s."""


@pytest.mark.parametrize(("ready_s", "taken_s", "words", "expected"), OVERLAPS)
def test_what_backward_does_not_hide_is_exposed(
    ready_s: list[float], taken_s: list[float], words: Any, expected: tuple[float, float]
) -> None:
    buckets = [ReadyBucket(s, 1) for s in ready_s]
    assert overlap(buckets, taken_s, backward_s=1.0, **words) == pytest.approx(expected)


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_buckets_of_any_length_come_to_an_end(lanes: int) -> None:
    """None is lost: together they take their share of what they take one after the other."""
    draws = np.random.default_rng(lanes)
    lengths = [0.0, 5e-324, 1e-300, 0.1, 0.1, 0.7]
    for _ in range(500):
        taken_s = [float(s) for s in (*draws.choice(lengths, 3), *draws.uniform(0.0, 1.0, 5))]
        share, slowdown = draws.uniform(0.3, 1.0), draws.choice([0.0, 0.5])
        buckets = [ReadyBucket(ready_s, 1) for ready_s in sorted(draws.uniform(0.0, 1.1, 8))]
        backward_s, exposed_s = overlap(buckets, taken_s, 1.0, lanes, share, slowdown)
        assert 1.0 - 1e-9 <= backward_s <= 1.0 + slowdown + 1e-9
        assert (share if lanes > 1 else 1.0) * sum(taken_s) <= backward_s + exposed_s + 1e-9
        assert exposed_s <= sum(taken_s) + 1e-9


@pytest.mark.parametrize("world_size", [2, 8, 100, 1000])
def test_the_slowest_of_many(world_size: int) -> None:
    """Blom's formula against the mean of the largest of so many sums of normal numbers."""
    draws = np.random.default_rng(0).standard_normal((2000, world_size, 4))
    alone = draws[:, :, 0].max(axis=1).mean()
    assert slowest_over_mean(world_size, 0.1, 1) == pytest.approx(1 + 0.1 * alone, abs=0.005)
    together = (1 + 0.1 * draws).mean(axis=2).max(axis=1).mean()
    assert slowest_over_mean(world_size, 0.1, 4) == pytest.approx(together, abs=0.005)
    assert slowest_over_mean(1, 0.1, 1) == 1.0


def test_memory_is_counted_by_volume() -> None:
    held = memory_bytes(WORK, 4)
    weights = WORK.parameter_bytes
    assert weights == pytest.approx(53.5e6, rel=0.001)  # FireCaffe's |W|
    assert held["parameters"] == held["gradients"] == held["optimizer"] == weights
    assert held["running"] == weights  # what a backward makes is kept until its end
    in_memory = memory_bytes(WORK, 4, in_memory=4)
    assert in_memory["buckets"] == 3 / 4 * weights  # of the three others' buckets a quarter each
    assert in_memory | {"buckets": held["buckets"]} == held
    # One micro-batch each: while a checkpoint is copied, there are weights and momentum twice.
    few = memory_bytes(WORK, WORK.num_micro_batches)
    assert few["sums"] == 0
    copied = few["parameters"] + few["optimizer"]
    assert few["saving"] == max(0.0, copied - few["running"] - few["activations"] - few["backward"])
    assert memory_bytes(WORK, WORK.num_micro_batches, is_whole=False)["saving"] == 0
    more = memory_bytes(replace(WORK, optimizer_vectors=2, micro_batch_size=16), 4)
    assert more["optimizer"] == 2 * weights
    # With more activations beside the same gradients, the worst moment is nearer to the loss.
    assert 2 * held["activations"] <= more["activations"] <= 16 * WORK.activation_bytes
    alone = memory_bytes(WORK, 1)
    assert alone["buckets"] == 0
    assert on_device(alone, load_cluster("dgx-a100").device)["allocator"] == 0  # a GPU
    assert on_device(alone, load_cluster("cpu-host").device)["allocator"] > 0
    # LeNet keeps images, both pools' inputs and 8-byte indices, and each dense layer's input.
    work = workload_of_model(ModelConfig("lenet"), None, 8, 8)
    images, first, second = 28 * 28, 20 * 24 * 24, 50 * 8 * 8
    pools = 3 * first / 4 + 3 * second / 4  # outputs, with indices of twice their bytes
    # The ReLU's output, the next layer's input, and the loss, which is not in the network.
    assert work.activation_bytes == 4 * (images + first + second + pools + 500)


def cluster(bandwidth: float, storage: Storage | None = None) -> Cluster:
    return Cluster("c", "", DEVICE, 1, (Link("net", 1e-5, bandwidth),), storage)


def test_an_infinite_network_scales_and_a_slow_one_does_not() -> None:
    """Of 32 micro-batches of images as their authors took them, some of seven workers have five."""
    assert (WORK.layout.inputs.shape, WORK.num_micro_batches) == ((3, 224, 224), 32)
    for workers, largest in ((8, 4), (7, 5)):
        fast = forecast(WORK, cluster(1e18), workers, "tree")
        assert fast.micro_batches == largest
        assert fast.speedup == pytest.approx(32 / largest, rel=0.02)
    slow = forecast(WORK, cluster(1e7), 8, "tree")
    assert slow.speedup < 0.5
    assert slow.exposed_communication_s == pytest.approx(slow.step_s, rel=0.05)
    parts = slow.compute_s + slow.exposed_communication_s + slow.data_s + slow.update_s
    assert parts == pytest.approx(slow.step_s)
    assert slow.step_low_s < slow.step_s < slow.step_high_s


def test_computing_beside_an_exchange_takes_as_much_longer_as_was_measured() -> None:
    plain = cluster(1e7)
    slow = replace(plain, device=replace(DEVICE, exchange_slowdown=0.5, jitter=0.0))
    work = replace(WORK, bucket_bytes=4)  # the first is on its way from the start
    alone, slowed = (forecast(work, on, 4, "ring") for on in (plain, slow))
    _, *rest_s = micro_batch(work, DEVICE, work.micro_batch_size).backward_s
    assert slowed.compute_s - alone.compute_s == pytest.approx(0.5 * sum(rest_s))
    # What backward takes longer, the exchange need not be waited for.
    assert slowed.step_s == pytest.approx(alone.step_s)


def test_storage_and_decoding_that_are_too_slow_are_waited_for_and_threads_advised() -> None:
    per_node = WORK.global_batch_size / 8
    row = forecast(WORK, cluster(1e18, Storage("s", 1e6)), 8, "tree")
    assert row.data_s > 0
    assert row.step_s == pytest.approx(per_node * WORK.stored_bytes / 1e6, rel=1e-6)
    starved = cluster(1e18, Storage("s", 1e12, decoded_images_per_s=10))
    row = forecast(WORK, starved, 8, "tree")
    assert row.step_s == pytest.approx(per_node / 10, rel=1e-6)
    best = changes(WORK, starved, row)[0]
    assert best.what == "twice the decoding threads"
    assert best.gain == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("outer", ["tree", "ring"])
def test_hosts_add_in_memory_and_send_between_their_first_ranks(outer: str) -> None:
    """A rank reads its shard of 4 vectors and writes it once; it reads and writes the total. In one
    host each vector is read and written once.
    """
    memory = Link("within a host", 1e-5, 1e9, group=4, memory_bytes_per_s=8e9)
    between, size = Link("net", 1e-4, 1e8), 2**20
    [together_s] = Prices(outer, Network((memory, between), 12), across=outer).seconds([size])
    [outer_s] = Prices(outer, Network((between,), 3)).seconds([size])
    in_memory_s = 4 * size * (4 + 1 + 2 * 4) / 4 / 8e9
    assert together_s == pytest.approx(in_memory_s + outer_s)
    one_host = Network((replace(memory, group=0),), 4)
    assert Prices(outer, one_host, across=outer).seconds([size]) == pytest.approx([8 * size / 8e9])


def test_only_a_file_with_the_rate_of_memory_prices_sums_there() -> None:
    plain = load_cluster("cpu-host")
    shared = replace(plain, links=(replace(plain.links[0], memory_bytes_per_s=1e12),))
    before = forecast(WORK, plain, 4, "tree").exchange_s
    by_messages = replace(WORK, shared_memory=False)
    assert forecast(by_messages, shared, 4, "tree").exchange_s == before
    taken_s = 2 * WORK.parameter_bytes / 1e12
    assert forecast(WORK, shared, 4, "tree").exchange_s == pytest.approx(taken_s)


MADE = {
    "sgd": (0, 1),  # gradients with the decay
    "nesterov": (0, 1),
    "adagrad": (2, 2),  # the root, and the gradient times the rate; the decay in the latter's place
    "adadelta": (2, 3),  # two roots
    "rmsprop": (1, 2),  # the root
    "adam": (1, 1),  # gradients with the decay are let go before the root is made
    "adamw": (1, 1),
    "lars": (1, 1),  # gradients with the decay, in any case
    "lamb": (2, 2),  # the root, and the direction
}
"""What torch 2.13's `foreach` forms make, and ours; without a decay, and with one."""


def test_what_an_update_makes_and_keeps() -> None:
    assert set(MADE) == set(SOLVERS)
    for name, expected in MADE.items():
        solvers = [SolverConfig(type=name, weight_decay=decay) for decay in (0.0, 0.1)]
        assert tuple(vectors_of(solver).made for solver in solvers) == expected, name
        keeps_two = name in ("adam", "adamw", "lamb", "adadelta")
        assert vectors_of(solvers[0]).kept == 1 + keeps_two, name
    caffe = SolverConfig(momentum_form="caffe")
    assert vectors_of(caffe).made == 1
    # Of Nesterov's in Caffe's words: what moves, the history before, and how far it goes ahead.
    assert vectors_of(replace(caffe, type="nesterov")).made == 3
    assert vectors_of(SolverConfig("adam", momentum_form="caffe")) == (2, 1)  # the root
    signs = SolverConfig("rmsprop", weight_decay=0.1, decay_form="l1")
    assert vectors_of(signs).made == 1  # the signs are let go before the root is made


@pytest.mark.parametrize("vectors", [0, 1, 4])
def test_an_update_is_the_peak_if_it_makes_more_than_a_micro_batch(vectors: int) -> None:
    """The running micro-batch's gradients are as long as the weights, so one vector is no more. In
    a split network it is of a worker's parts.
    """
    config = ModelConfig("alexnet")
    work = replace(workload_of_model(config, None, 8, 8), update_vectors=vectors)
    chain = chain_of(config, work)
    layouts = [LayerLayout(outputs=2) if unit.is_dense else LayerLayout(copies=2) for unit in chain]
    work = replace(work, activation_bytes=0.0)
    held, split = memory_bytes(work, 1, is_whole=False), memory_of(work, chain, layouts)
    assert held["running"] == held["parameters"] == work.parameter_bytes
    assert split["parameters"] < 0.6 * work.parameter_bytes
    for parts in (held, split):
        under_way = sum(parts[part] for part in ("running", "sums", "activations", "backward"))
        assert parts["updating"] == max(0, vectors * parts["parameters"] - under_way)
    # A checkpoint is another time: of both the one that takes more counts.
    whole = memory_bytes(work, 1)
    assert whole["saving"] > 0 or held["sums"] >= work.parameter_bytes
    if vectors == 4:
        under_way = sum(held[part] for part in ("running", "sums", "activations", "backward"))
        assert whole["saving"] + whole["updating"] == 4 * work.parameter_bytes - under_way


ALL = replace(workload_of_model(ModelConfig("alexnet"), None, 256, 16), optimizer_vectors=2)
ROWS = replace(ALL, update_at="shards")
WHOLE = replace(ROWS, has_whole_shards=True)


def test_a_recipe_of_shards_is_priced_as_it_says() -> None:
    exchange = ExchangeConfig(update_at="shards")
    data, train = DataConfig("generated"), TrainConfig(64, 16, steps=3)
    for clip, has_whole in ((0.0, False), (1.0, True)):
        solver = SolverConfig("adam", clip_gradients=clip)
        recipe = Recipe(ModelConfig("lenet"), data, train, solver, exchange)
        work = workload_of(check_recipe(recipe))
        assert (work.update_at, work.optimizer_vectors) == ("shards", 2)
        assert work.has_whole_shards == has_whole


@pytest.mark.parametrize("work", [ROWS, WHOLE], ids=["rows", "whole"])
def test_shards_are_those_of_a_training(work: Workload) -> None:
    with torch.device("meta"):
        named = dict(build_model("alexnet").named_parameters())
    order = list(range(len(named)))[::-1]
    for workers in (2, 3, 8):
        words = named, order, work.bucket_bytes, workers
        shards = [
            make_shards(*words, r, work.has_whole_shards).own.values() for r in range(workers)
        ]
        planned = shards_of(work, workers)
        held = [sum(elements) for elements in zip(*planned.elements, strict=True)]
        assert held == [sum(part.numel() for part in of_rank) for of_rank in shards]
        assert planned.held_bytes == 4 * max(held)


def test_memory_of_the_optimizer_is_a_share() -> None:
    weights = ALL.parameter_bytes
    for workers in (2, 4, 8):
        held, before = memory_bytes(ROWS, workers), memory_bytes(ALL, workers)
        assert before["optimizer"] == 2 * weights
        assert held["optimizer"] == pytest.approx(2 * weights / workers, rel=0.005)
        assert memory_bytes(WHOLE, workers)["optimizer"] == 2 * 4 * 9216 * 4096  # fc6
        for part in ("parameters", "gradients", "activations"):
            assert held[part] == before[part]
        # The others' shards arrive for the owner's: of the largest bucket, or the whole of it.
        assert held["buckets"] == pytest.approx((workers - 1) / workers * 4 * 37_752_832, rel=1e-3)
    assert memory_bytes(ROWS, 1) == memory_bytes(ALL, 1)


def test_both_ways_take_what_the_formula_says() -> None:
    """(P - 1)(α + B / P β) each, and (P - 1) / P · n additions on the way there; what goes early,
    as of 16 micro-batches over 3, is not waited for. Of whole parameters the owner's port takes all
    of a bucket that is one.
    """
    rate, latency_s, add_s = 1e9, 1e-5, 1e-10
    link = Link("net", latency_s, rate, addition_s_per_byte=add_s)
    work = replace(ROWS, bucket_bytes=10**9)  # one bucket
    for workers in (2, 3, 4, 32):
        network = Network((link,), workers)
        shard = work.parameter_bytes / workers
        way_s = (workers - 1) * (latency_s + shard / rate)
        adds_s = (workers - 1) * shard * add_s
        [there_s], [back_s] = (shards_s(work, network, k) for k in (REDUCE_SCATTER, ALL_GATHER))
        assert there_s + back_s == pytest.approx(2 * way_s + adds_s, rel=0.02)
        if workers <= 16:
            assert back_s == pytest.approx(way_s, rel=0.02)
    whole = replace(WHOLE, bucket_bytes=10**9)
    [of_one] = shards_s(whole, Network((link,), 4), ALL_GATHER)
    assert of_one == pytest.approx(3 * shards_of(whole, 4).held_bytes / rate, rel=0.02)


def test_a_step_has_the_gather_after_a_shorter_update() -> None:
    """Before the update all four agree on it, by messages round a ring."""
    slow = load_cluster("ethernet-1g")
    one, four = forecasts(ROWS, slow, [1, 4])
    assert (one.workers, four.workers, four.exchange) == (1, 4, "tree")
    network = Network(slow.links, 4)
    gather_s = 3 * slow.links[-1].latency_s + sum(shards_s(ROWS, network, ALL_GATHER))
    sums_s = sum(shards_s(ROWS, network, REDUCE_SCATTER))
    assert four.exposed_communication_s > gather_s
    assert four.exchange_s == pytest.approx(gather_s + sums_s)
    share = shards_of(ROWS, 4).held_bytes / ROWS.parameter_bytes
    assert four.update_s == pytest.approx(update_s(ROWS, slow.device, share))
    assert four.memory_bytes.items() >= memory_bytes(ROWS, 4).items()
    alone = forecast(ALL, slow, 1, "tree")
    assert (one.step_s, one.memory_bytes) == (alone.step_s, alone.memory_bytes)
    # A compressor cannot stand with it, and is forecast without.
    assert forecast(ROWS, slow, 4, "tree", "int8") == forecast(ALL, slow, 4, "tree", "int8")
    # Whole parameters on a slow link: the owner of the largest is waited for.
    for work, is_slower in ((WHOLE, True), (ROWS, False)):
        [row] = forecasts(work, slow, [4])
        advised = [change.what for change in changes(work, slow, row)]
        assert ("exchange.update_at all" in advised) == is_slower
