"""What sums in shared memory take: closed forms of the memory's rate and of what goes outside."""

from dataclasses import replace

import pytest

from firecaffe.models.config import ModelConfig
from firecaffe.plan.cluster import Cluster, Link, load_cluster
from firecaffe.plan.compute_time import micro_batch
from firecaffe.plan.forecast import forecast
from firecaffe.plan.network import Network
from firecaffe.plan.of_recipe import workload_of_model
from firecaffe.plan.price import Prices
from firecaffe.plan.step_cost import Bucket, buckets_of
from firecaffe.plan.workload import Workload

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
    size = sum(bucket.num_elements for bucket in _buckets(work, cluster))
    assert forecast(work, shared, 4, "tree").exchange_s == pytest.approx(2 * 4 * size / 1e12)


def _buckets(work: Workload, cluster: Cluster) -> list[Bucket]:
    return buckets_of(work, micro_batch(work, cluster.device, work.micro_batch_size))
