"""A step's parts: computing, exposed exchange, stragglers, memory, sums in shared memory, and what
an update makes; against closed formulas, and what the sources of optimizers say.
"""

from dataclasses import replace

import numpy as np
import pytest

from firecaffe.models.config import ModelConfig
from firecaffe.planner.advice import changes, paragraph
from firecaffe.planner.chain import chain_of
from firecaffe.planner.cluster import Cluster, Device, Link, MeasuredStep, Storage, load_cluster
from firecaffe.planner.compute_time import MicroBatch, correction, micro_batch, update_s
from firecaffe.planner.forecast import forecast, forecasts
from firecaffe.planner.layouts import LayerLayout
from firecaffe.planner.memory import memory_bytes, on_device
from firecaffe.planner.of_recipe import workload_of_model
from firecaffe.planner.price import Prices
from firecaffe.planner.simulate import Network
from firecaffe.planner.step_cost import ReadyBucket, buckets_of, overlap, slowest_of
from firecaffe.planner.worker_part import memory_of
from firecaffe.planner.workload import PROFILED_IMAGES, LayerWork, layers_of, vectors_of
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import SOLVERS

DEVICE = Device("d", 1e12, 1e15, {"float32": 1e12}, efficiency=1.0, overhead_s=0.0)
WORK = workload_of_model(ModelConfig("googlenet"), None, 256, 8)


def test_without_overhead_the_work_decides() -> None:
    """3 x 2 MAC on a device whose memory is no limit: the published 1.591 G MAC an image. Nobody
    wants the gradient of the images, so the first layer, 118 M MAC, has two of the three.
    """
    step = micro_batch(WORK, DEVICE, 8)
    macs = 3 * 1.591e9 - 112 * 112 * 64 * 147
    assert step.compute_s == pytest.approx(8 * 2 * macs / 1e12, rel=0.002)
    starved = replace(DEVICE, memory_bytes_per_s=1e6)  # whose memory is the limit
    assert micro_batch(WORK, starved, 8).compute_s > 100 * step.compute_s


def test_small_batches_use_less_of_the_device() -> None:
    """Hockney: with an overhead, half of the rate is reached where the work takes as long."""
    slow = replace(DEVICE, overhead_s=1e-4)
    per_image = [micro_batch(WORK, slow, n).compute_s / n for n in (1, 4, 16, 64, 256)]
    assert per_image == sorted(per_image, reverse=True)
    bare = micro_batch(WORK, DEVICE, 1).compute_s
    overhead_s = micro_batch(WORK, slow, 1).compute_s - bare
    assert per_image[-1] == pytest.approx(bare + overhead_s / 256, rel=0.01)


def test_what_stands_in_for_an_exchange_is_priced_in_its_place() -> None:
    """Three workers' shares of 32 micro-batches are no subtrees: fold sums, whatever was named."""
    titan = load_cluster("titan")
    kept, named = ("tree", "halving_doubling", "parameter_server"), {}
    for workers in (3, 4):
        named[workers] = {forecast(WORK, titan, workers, name).exchange_s for name in kept}
    assert (len(named[3]), len(named[4])) == (1, 3)
    assert forecast(WORK, titan, 3, "ring").exchange_s not in named[3]


def test_what_was_measured_replaces_what_is_computed() -> None:
    rows = tuple(MeasuredStep("googlenet", n, 0.1 * n, 0.01 * n, 0.5, error=0.02) for n in (4, 16))
    device = replace(DEVICE, measured=rows)
    for size in (4, 16):
        assert micro_batch(WORK, device, size).compute_s == pytest.approx(0.1 * size)
    between = micro_batch(WORK, device, 8).compute_s
    assert 0.4 < between < 1.6
    assert update_s(WORK, device) == 0.5
    other = replace(WORK, autocast="bfloat16")
    assert correction(other, device, 8) == 1.0  # measured in other arithmetic


def test_layers_hold_every_parameter_and_every_flop() -> None:
    found = layers_of(ModelConfig("googlenet"), None, None)
    counted = sum(sum(layer.parameters_bytes) for layer in found.works)
    assert counted == found.profile.weight_bytes
    flops = sum(layer.flops for layer in found.works)
    assert flops * 3 == found.profile.forward_backward_flops / PROFILED_IMAGES


def test_a_bucket_is_ready_with_its_last_gradient() -> None:
    """Three layers of 400 bytes, from the last to the first; a bucket is full at 800, the first at
    a fourth of it.
    """
    layers = tuple(LayerWork("linear", 0.0, 0.0, 400.0, ((10, 10),)) for _ in range(3))
    work = replace(WORK, layers=layers, bucket_bytes=800)
    found = buckets_of(work, MicroBatch(1.0, (0.1, 0.2, 0.4)))
    assert [each.num_elements for each in found] == [100, 200]
    assert [each.ready_s for each in found] == pytest.approx([0.1, 0.1 + 0.2 + 0.4])


def test_what_backward_does_not_hide_is_exposed() -> None:
    early, late = ReadyBucket(0.0, 1), ReadyBucket(1.0, 1)
    assert overlap([early, late], [0.4, 0.4], backward_s=1.0) == pytest.approx((1.0, 0.4))
    assert overlap([early, late], [2.0, 0.4], backward_s=1.0) == pytest.approx((1.0, 1.4))
    assert overlap([early], [0.4], backward_s=1.0) == (1.0, 0.0)
    assert overlap([], [], backward_s=1.0) == (1.0, 0.0)


def test_an_exchange_beside_it_slows_backward_down() -> None:
    """By a half, as long as it is under way; what becomes ready then becomes ready later."""
    early, middle, late = ReadyBucket(0.0, 1), ReadyBucket(0.5, 1), ReadyBucket(1.0, 1)

    def both_s(buckets: list[ReadyBucket], taken_s: list[float]) -> tuple[float, float]:
        return overlap(buckets, taken_s, backward_s=1.0, slowdown=0.5)

    # 0.3 s of the exchange are 0.2 s of backward.
    assert both_s([early], [0.3]) == pytest.approx((0.3 + 0.8, 0.0))
    assert both_s([early], [9.0]) == pytest.approx((1.5, 7.5))
    assert both_s([early, late], [0.3, 2.0]) == pytest.approx((1.1, 2.0))
    # The second is ready at 0.3 + 0.3, and from then on slows it down again.
    assert both_s([early, middle], [0.3, 2.0]) == pytest.approx((0.6 + 0.75, 2.0 - 0.75))


def test_two_buckets_are_under_way_at_once() -> None:
    """Together they take 0.75 of what they take one after the other, which is as long alone."""
    early, late = ReadyBucket(0.0, 1), ReadyBucket(1.0, 1)

    def left_s(buckets: list[ReadyBucket], taken_s: list[float], share: float = 0.75) -> float:
        return overlap(buckets, taken_s, backward_s=1.0, lanes=2, share=share)[1]

    assert left_s([early, early], [2.0, 2.0]) == pytest.approx(0.75 * 4.0 - 1.0)
    assert left_s([early] * 4, [2.0] * 4) == pytest.approx(0.75 * 8.0 - 1.0)
    # The shorter one is through after 0.75 of 2 x 0.4; what is left of the longer one goes alone.
    assert left_s([early, early], [2.0, 0.4]) == pytest.approx(0.75 * 0.8 + 1.6 - 1.0)
    # A third one waits until there is a lane for it, and no two go where there is one.
    assert left_s([early] * 3, [4.0, 1.0, 1.0]) == pytest.approx(1.5 + 1.5 + 2.0 - 1.0)
    alone = overlap([early] * 3, [4.0, 1.0, 1.0], backward_s=1.0, lanes=1, share=0.75)
    assert alone == pytest.approx((1.0, 5.0))
    # The first is alone until the second is ready.
    assert left_s([early, late], [2.0, 2.0]) == pytest.approx(1.0 + 0.75 * 2.0 + 1.0 - 1.0)
    # Nothing is gained: as if one went after the other.
    assert left_s([early, late], [2.0, 0.4], share=1.0) == pytest.approx(2.4 - 1.0)


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_buckets_of_any_length_come_to_an_end(lanes: int) -> None:
    """None is lost: together they take their share of what they take one after the other."""
    draws = np.random.default_rng(lanes)
    lengths = [0.0, 5e-324, 1e-300, 0.1, 0.1, 0.7]
    for _ in range(500):
        taken_s = [*draws.choice(lengths, 3), *draws.uniform(0.0, 1.0, 5)]
        share, slowdown = draws.uniform(0.3, 1.0), draws.choice([0.0, 0.5])
        buckets = [ReadyBucket(ready_s, 1) for ready_s in sorted(draws.uniform(0.0, 1.1, 8))]
        taken_s = [float(each) for each in taken_s]
        backward_s, exposed_s = overlap(buckets, taken_s, 1.0, lanes, share, slowdown)
        assert 1.0 - 1e-9 <= backward_s <= 1.0 + slowdown + 1e-9
        assert (share if lanes > 1 else 1.0) * sum(taken_s) <= backward_s + exposed_s + 1e-9
        assert exposed_s <= sum(taken_s) + 1e-9


@pytest.mark.parametrize("world_size", [2, 8, 100, 5000])
def test_the_slowest_of_many(world_size: int) -> None:
    """Blom's formula against the mean of the largest of so many sums of normal numbers."""
    draws = np.random.default_rng(0).standard_normal((2000, world_size, 4))
    alone = draws[:, :, 0].max(axis=1).mean()
    assert slowest_of(world_size, 0.1, 1) == pytest.approx(1 + 0.1 * alone, abs=0.005)
    together = (1 + 0.1 * draws).mean(axis=2).max(axis=1).mean()
    assert slowest_of(world_size, 0.1, 4) == pytest.approx(together, abs=0.005)
    assert slowest_of(1, 0.1, 1) == 1.0


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


def cluster(bandwidth: float, storage: Storage | None = None) -> Cluster:
    return Cluster("c", "", DEVICE, 1, (Link("net", 1e-5, bandwidth),), storage)


def test_an_infinite_network_scales_and_a_slow_one_does_not() -> None:
    fast = forecast(WORK, cluster(1e18), 8, "tree")
    assert fast.speedup == pytest.approx(8, rel=0.02)
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
    alone, beside = (forecast(work, each, 4, "ring") for each in (plain, slow))
    last_s = sum(micro_batch(work, DEVICE, work.micro_batch_size).backward_s)
    first_s = micro_batch(work, DEVICE, work.micro_batch_size).backward_s[0]
    assert beside.compute_s - alone.compute_s == pytest.approx(0.5 * (last_s - first_s))
    # What backward takes longer, the exchange need not be waited for.
    assert beside.step_s == pytest.approx(alone.step_s)


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


def test_unequal_shares_wait_for_the_largest() -> None:
    """Of 32 micro-batches of images as their authors took them, some of seven have five."""
    assert (WORK.layout.inputs.shape, WORK.num_micro_batches) == ((3, 224, 224), 32)
    seven = forecast(WORK, cluster(1e18), 7, "tree")
    assert seven.micro_batches == 5
    assert seven.speedup == pytest.approx(32 / 5, rel=0.02)


MEMORY = Link("within a host", 1e-5, 1e9, group=4, memory_bytes_per_s=8e9)


def test_a_sum_in_the_memory_of_one_host_reads_and_writes_each_vector_once() -> None:
    network, size = Network((replace(MEMORY, group=0),), 4), 2**20
    [found_s] = Prices("tree", network, across="tree").seconds([size])
    assert found_s == pytest.approx(2 * 4 * size / 8e9)


@pytest.mark.parametrize("outer", ["tree", "ring"])
def test_several_hosts_add_in_memory_and_send_between_their_first_ranks(outer: str) -> None:
    """A rank reads its shard of 4 vectors and writes it once; it reads and writes the total."""
    between, size = Link("net", 1e-4, 1e8), 2**20
    [found_s] = Prices(outer, Network((MEMORY, between), 12), across=outer).seconds([size])
    [outer_s] = Prices(outer, Network((between,), 3)).seconds([size])
    in_memory_s = 4 * size * (4 + 1 + 2 * 4) / 4 / 8e9
    assert found_s == pytest.approx(in_memory_s + outer_s)


def test_only_a_file_with_the_rate_of_memory_prices_sums_there() -> None:
    cluster = load_cluster("cpu-host")
    [link] = cluster.links
    shared = replace(cluster, links=(replace(link, memory_bytes_per_s=1e12),))
    work = workload_of_model(ModelConfig("googlenet"), None, 256, 8)
    by_messages = replace(work, shared_memory=False)
    before = forecast(work, cluster, 4, "tree").exchange_s
    assert forecast(by_messages, shared, 4, "tree").exchange_s == before
    buckets = buckets_of(work, micro_batch(work, cluster.device, work.micro_batch_size))
    size = sum(bucket.num_elements for bucket in buckets)
    assert forecast(work, shared, 4, "tree").exchange_s == pytest.approx(2 * 4 * size / 1e12)


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


def test_what_an_update_makes() -> None:
    assert set(MADE) == set(SOLVERS)
    for name, expected in MADE.items():
        solvers = (SolverConfig(type=name, weight_decay=decay) for decay in (0.0, 0.1))
        assert tuple(vectors_of(each).made for each in solvers) == expected, name
    caffe = SolverConfig(momentum_form="caffe")
    assert vectors_of(caffe).made == 1
    # Of Nesterov's in Caffe's words: what moves, the history before, and how far it goes ahead.
    assert vectors_of(replace(caffe, type="nesterov")).made == 3
    assert vectors_of(SolverConfig("adam", momentum_form="caffe")) == (2, 1)  # the root
    signs = SolverConfig("rmsprop", weight_decay=0.1, decay_form="l1")
    assert vectors_of(signs).made == 1  # the signs are let go before the root is made
    kept = {name: vectors_of(SolverConfig(type=name)).kept for name in MADE}
    twice = {"adam", "adamw", "lamb", "adadelta"}
    assert kept == {name: 1 + (name in twice) for name in MADE}


def test_kept_is_what_autograd_saves_by_hand() -> None:
    """LeNet's: images, both pools' inputs and 8-byte indices, and each dense layer's input."""
    work = workload_of_model(ModelConfig("lenet"), None, 8, 8)
    images, first, second = 28 * 28, 20 * 24 * 24, 50 * 8 * 8
    pools = 3 * first / 4 + 3 * second / 4  # outputs, with indices of twice their bytes
    # The ReLU's output, the next layer's input, and the loss, which is not in the network.
    assert work.activation_bytes == 4 * (images + first + second + pools + 500)


def test_one_worker_receives_nothing_and_a_gpu_has_no_slack() -> None:
    parts = memory_bytes(WORK, 1)
    assert parts["buckets"] == 0
    assert on_device(parts, load_cluster("dgx-a100").device)["allocator"] == 0
    assert on_device(parts, load_cluster("cpu-host").device)["allocator"] > 0


def test_advice_says_where_fold_sums_and_never_names_native() -> None:
    rows = forecasts(WORK, cluster(1e9), [4, 5])
    said = paragraph(WORK, cluster(1e9), rows)
    assert "With 5 workers" in said
    assert "fold" in said
    for row in rows:
        if row.workers > 1:
            assert not any("native" in each.what for each in changes(WORK, cluster(1e9), row))


def test_an_update_is_the_peak_if_it_makes_more_than_a_micro_batch() -> None:
    """The running micro-batch's gradients are as long as the weights, so one vector is no more."""
    work = replace(workload_of_model(ModelConfig("alexnet"), None, 8, 8), activation_bytes=1e5)
    weights = work.parameter_bytes
    base = memory_bytes(work, 1, is_whole=False)
    assert base["running"] == weights
    assert base["updating"] == 0
    under_way = sum(base[part] for part in ("running", "sums", "activations", "backward"))
    for vectors in (1, 4):
        found = memory_bytes(replace(work, update_vectors=vectors), 1, is_whole=False)
        assert found["updating"] == max(0, vectors * weights - under_way)
    # A checkpoint is another time: of both the one that takes more counts.
    whole = memory_bytes(replace(work, update_vectors=4), 1)
    assert whole["saving"] > 0 or base["sums"] >= weights
    assert whole["saving"] + whole["updating"] == 4 * weights - under_way


@pytest.mark.parametrize("vectors", [0, 4])
def test_an_update_is_of_own_parts(vectors: int) -> None:
    config = ModelConfig("alexnet")
    work = replace(
        workload_of_model(config, None, 8, 8), activation_bytes=0.0, update_vectors=vectors
    )
    chain = chain_of(config, work)
    layouts = [LayerLayout(outputs=2) if unit.is_dense else LayerLayout(copies=2) for unit in chain]
    found = memory_of(work, chain, layouts)
    under_way = sum(found[part] for part in ("running", "sums", "activations", "backward"))
    assert found["updating"] == max(0, vectors * found["parameters"] - under_way)
    assert found["parameters"] < 0.6 * work.parameter_bytes
