"""The exchange that a plan marks as the recipe's own, if the recipe leaves it to `auto`."""

import dataclasses

import pytest

from firecaffe import ModelConfig
from firecaffe.exchange.choose import AUTO, choose
from firecaffe.exchange.route import adds_in_tree_order
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.forecast import forecasts, is_own
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.step_cost import own_exchange

WORK = dataclasses.replace(workload_of_model(ModelConfig("lenet"), None, 128, 8), exchange=AUTO)
SLOW = load_cluster("ethernet-1g")


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_it_is_what_a_training_would_choose_by_the_cluster_s_link(workers: int) -> None:
    link = SLOW.links[-1]
    # LeNet's 1.7 MB: the first bucket is a quarter of 4 MB at least, the second all the rest.
    found = own_exchange(WORK, SLOW, workers)
    assert adds_in_tree_order(found, workers)
    sizes = [WORK.parameter_bytes]
    expected = choose(workers, sizes, link.latency_s, link.bandwidth_bytes_per_s)
    assert found == expected.algorithm
    [own] = [row for row in forecasts(WORK, SLOW, [1, workers]) if is_own(row, WORK, SLOW)]
    assert (own.workers, own.exchange) == (workers, found)


def test_where_there_is_nothing_to_choose_it_is_tree() -> None:
    memory = dataclasses.replace(SLOW.links[0], memory_bytes_per_s=1e10, group=0)
    one_host = dataclasses.replace(SLOW, links=(memory,), devices_per_node=8)
    assert own_exchange(WORK, one_host, 4) == "tree"
    assert own_exchange(WORK, SLOW, 1) == "tree"
    assert own_exchange(WORK, SLOW, 3) == "tree"  # fold stands in
    assert own_exchange(dataclasses.replace(WORK, update_at="shards"), SLOW, 4) == "tree"


def test_a_word_is_taken_as_it_is() -> None:
    for name in ("", "ring", "hierarchical(tree,ring)"):
        assert own_exchange(dataclasses.replace(WORK, exchange=name), SLOW, 4) == name
