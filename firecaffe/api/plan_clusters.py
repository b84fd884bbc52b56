"""Which clusters are planned: by name or file, or nodes of one device on several Ethernets."""

from collections.abc import Sequence
from pathlib import Path

from firecaffe.api.argument_checks import check_count, commas, refuse_beside
from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import Cluster, load_cluster
from firecaffe.planner.offers import MOST_PER_NODE, USUAL_GBIT_PER_S, offers, rates_of
from firecaffe.resume_advice import option

USUAL_CLUSTER = "cpu-host"
"""The cluster if nothing is given."""


def clusters_of(
    cluster: str | Path | Sequence[str | Path],
    device: str,
    links: str | float | Sequence[float],
    per_node: int,
) -> list[Cluster]:
    """Return the clusters, the slowest link of a device first. Raises: RecipeError."""
    check_count("per_node", per_node, 1)
    if per_node > MOST_PER_NODE:
        raise RecipeError(f"{option('per_node')} is {per_node}; it must be at most {MOST_PER_NODE}")
    if not device:
        refuse_beside("a cluster", links=links, per_node=per_node > 1)
        return [load_cluster(name) for name in commas("cluster", cluster).split(",")]
    refuse_beside(option("device"), cluster=cluster != USUAL_CLUSTER)
    rates = commas("links", links)
    return offers(device, rates_of(rates) if rates else USUAL_GBIT_PER_S, per_node)
