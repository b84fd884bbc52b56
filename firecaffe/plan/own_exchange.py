"""Finds the exchange that a training will use on a described cluster."""

from firecaffe.exchange.choose import AUTO, choose
from firecaffe.exchange.route import SCHEDULE
from firecaffe.gradients.buckets import cut
from firecaffe.plan.cluster import Cluster
from firecaffe.plan.network import Network
from firecaffe.plan.step_cost import route_of
from firecaffe.plan.workload import Workload


def own_exchange(workload: Workload, cluster: Cluster, world_size: int) -> str:
    """Return the recipe's exchange, what `auto` would choose, or "" if there is no recipe."""
    if workload.exchange != AUTO:
        return workload.exchange
    network = Network(cluster.links, world_size)
    tree = route_of(workload, "tree", network)
    if tree.way != SCHEDULE or tree.senders == 1:  # there is no choice
        return "tree"
    sizes = workload.tensors_bytes
    buckets = [sum(sizes[start:stop]) for start, stop in cut(sizes, workload.bucket_bytes)]
    outer = network.link(0, world_size - 1)
    link = outer.latency_s, outer.bandwidth_bytes_per_s
    return choose(world_size, buckets, *link, tree.senders).algorithm
