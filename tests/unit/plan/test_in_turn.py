"""One weird trick in turn: what is not hidden, against micro-batches that come one by one; and the
updates of the head, by hand.
"""

from dataclasses import replace
from itertools import accumulate

import pytest

from firecaffe.models.config import ModelConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.plan.cluster import Cluster, load_cluster
from firecaffe.plan.of_parallel import OwnCost, OwnLayout
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.split_plans import SplitPlan
from firecaffe.plan.split_step import SplitCost

ALEXNET = ModelConfig("alexnet")
WORK = workload_of_model(ALEXNET, None, 256, 8)
CLUSTER = load_cluster("ethernet-10g")
HEAD = {"classifier.0": "inputs", "classifier.3": "neurons", "classifier.6": "inputs"}
TRICK = ParallelConfig(1, 4, HEAD, 4, "one_weird_trick")
IN_TURN = replace(TRICK, exchange="in_turn")


def planned(words: ParallelConfig, on: Cluster = CLUSTER, workers: int = 4) -> SplitPlan:
    (plan,) = OwnCost.of(ALEXNET, WORK, OwnLayout(words, HEAD)).plans(on, workers, "ring")
    return plan


def quick(cluster: Cluster, times: float) -> Cluster:
    """The same with devices that compute so many times as fast."""
    device = replace(
        cluster.device,
        efficiency=cluster.device.efficiency * times,
        overhead_s=cluster.device.overhead_s / times,
    )
    return replace(cluster, device=device)


def coming(workers: int, message_s: float, computes_s: float) -> float:
    """When all are computed with, of which the own one is there and the others come one by one."""
    now_s = computes_s
    for arrives_s in accumulate([message_s] * (workers - 1)):
        now_s = max(now_s, arrives_s) + computes_s
    return now_s


def going(workers: int, message_s: float, computes_s: float) -> float:
    """When all are made and those of others sent, each when it is made; the own one is the last."""
    now_s = sent_s = 0.0
    for _ in range(workers - 1):
        now_s += computes_s
        sent_s = max(sent_s, now_s) + message_s
    return max(now_s + computes_s, sent_s)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("message_s", [0.1, 0.9, 1.0, 1.2, 5.0])
def test_what_is_waited_for(workers: int, message_s: float) -> None:
    """Of computing that takes a second each."""
    cost = SplitCost(WORK, CLUSTER, (), 4, "ring")
    cost.cluster = replace(CLUSTER, device=replace(CLUSTER.device, exchange_slowdown=0.0))
    others = workers - 1
    waited_s = cost._waited_s(others * message_s, others * 1.0)
    assert coming(workers, message_s, 1.0) == pytest.approx(workers + waited_s)
    assert going(workers, message_s, 1.0) == pytest.approx(workers + waited_s)


def test_between_slow_and_quick_devices() -> None:
    """Quick ones hide nothing; slow ones all but the slices of fc6's input and what they give
    back, and fc8's outputs are a sum.
    """
    at_once, in_turn = planned(TRICK), planned(IN_TURN)
    assert in_turn.step.activations_s < at_once.step.activations_s
    assert in_turn.step.activations_bytes == at_once.step.activations_bytes
    assert in_turn.step.compute_s == at_once.step.compute_s
    assert in_turn.memory == at_once.memory
    most, least = (planned(IN_TURN, quick(CLUSTER, by)) for by in (1e9, 1e-6))
    assert most.step.activations_s == pytest.approx(at_once.step.activations_s, rel=1e-3)
    # Masks of fc6 and fc7 and the slices of fc6's input: 4 bytes a number, 1 of a mask.
    slices = 3 / 4 * 256 * 2 * 9216
    own = CLUSTER.links[-1]
    sliced_s = 4 * slices / 4 / own.bandwidth_bytes_per_s
    assert least.step.activations_s > sliced_s
    assert least.step.activations_s < 1.5 * sliced_s + 32 * 6 * own.latency_s


def test_where_memory_is_shared_nothing_is_in_turn() -> None:
    host = replace(load_cluster("cpu-host"), most_devices=0)
    assert planned(IN_TURN, host).step == planned(TRICK, host).step
    messages = replace(WORK, shared_memory=False)
    found = [
        OwnCost.of(ALEXNET, messages, OwnLayout(words, HEAD)).plans(host, 4, "ring")[0].step
        for words in (IN_TURN, TRICK)
    ]
    assert found[0].activations_s < found[1].activations_s


def test_updates_of_the_head_by_hand() -> None:
    """Two models of two workers: four updates have four sums and four updates of the head."""
    once = planned(replace(TRICK, data=2, model=2))
    often = planned(replace(TRICK, data=2, model=2, head_updates=4))
    head = sum(
        unit.weights
        for unit in OwnCost.of(ALEXNET, WORK, OwnLayout(TRICK, HEAD)).chain
        if unit.name in HEAD
    )
    # Of two workers' micro-batches a worker has two nodes, half of each of which goes to the other
    # model, and half of the total comes from there.
    share = (head - 4096 - 1000) / 2 + 4096 + 1000  # biases by inputs are whole
    conv = WORK.parameter_bytes / 4 - head
    assert often.step.gradients_bytes - once.step.gradients_bytes == 3 * 4 * share * 3 / 2
    more_s = often.step.update_s - once.step.update_s
    device = CLUSTER.device
    overhead_s = device.overhead_s
    # Three passes over the weights, and three over the momentum.
    per_number_s = 3 * 2 * 4 / (device.memory_bytes_per_s * device.efficiency)
    assert once.step.update_s == pytest.approx((conv + share) * per_number_s + overhead_s)
    assert more_s == pytest.approx(3 * (share * per_number_s + overhead_s))
    assert often.step.exposed_communication_s > 3 * once.step.exposed_communication_s
    # Of as many leaves there are fewer additions, and more divisions.
    assert often.step.compute_s == pytest.approx(once.step.compute_s)
    # Two of four micro-batches of each worker wait in the tree of an update, not of eight.
    assert once.memory["sums"] - often.memory["sums"] == 2 * 2 * 4 * share


def test_updates_by_data_are_summed_apart() -> None:
    words = replace(TRICK, data=4, model=1)
    once, often = planned(words), planned(replace(words, head_updates=2))
    assert often.step.gradients_bytes > 1.9 * once.step.gradients_bytes
    assert often.step.exposed_communication_s > once.step.exposed_communication_s
