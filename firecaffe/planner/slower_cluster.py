"""Clusters whose devices or links are slower than their file says."""

from dataclasses import replace

from firecaffe.planner.cluster import Cluster


def slower(cluster: Cluster, compute: float, link: float) -> Cluster:
    """Return the cluster with devices and links that take so many times as long."""
    device = cluster.device
    measured = tuple(
        replace(
            row,
            compute_s=row.compute_s * compute,
            data_s=row.data_s * compute,
            update_s=row.update_s * compute,
        )
        for row in device.measured
    )
    device = replace(
        device,
        efficiency=device.efficiency / compute,
        overhead_s=device.overhead_s * compute,
        measured=measured,
    )
    links = tuple(
        replace(
            cluster_link,
            latency_s=cluster_link.latency_s * link,
            bandwidth_bytes_per_s=cluster_link.bandwidth_bytes_per_s / link,
            memory_bytes_per_s=cluster_link.memory_bytes_per_s / link,
            addition_s_per_byte=cluster_link.addition_s_per_byte * link,
        )
        for cluster_link in cluster.links
    )
    return replace(cluster, device=device, links=links)


def crowding(cluster: Cluster, workers: int, threads: int = 1) -> float:
    """Return threads over cores on a full node, and 1 if there are cores enough or unknown."""
    busy = min(workers, cluster.devices_per_node) * threads
    return max(1.0, busy / cluster.cores_per_node) if cluster.cores_per_node else 1.0


def on_cores(cluster: Cluster, workers: int, threads: int = 1) -> Cluster:
    """Return the cluster as so many workers have it, who share cores if a node has too few.

    The returned cluster does not know its cores, so a second call changes nothing.
    """
    factor = crowding(cluster, workers, threads)
    return cluster if factor == 1 else replace(slower(cluster, factor, 1.0), cores_per_node=0)
