"""Clusters as their data sheets say, without what is usual in trainings beside it."""

from dataclasses import replace

from firecaffe.planner.cluster import Cluster, load_cluster


def data_sheet(name: str) -> Cluster:
    """A shipped cluster whose workers do not scatter, and whose exchanges slow nothing down."""
    cluster = load_cluster(name)
    device = replace(cluster.device, jitter=0.0, exchange_slowdown=0.0)
    links = tuple(replace(link, exchange_scale=1.0) for link in cluster.links)
    return replace(cluster, device=device, links=links)
