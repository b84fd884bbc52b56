"""A cluster that finished runs, or a file of rates, correct before a plan."""

from collections.abc import Sequence
from pathlib import Path

from firecaffe.api.argument_checks import refuse_beside
from firecaffe.api.plan_clusters import USUAL_CLUSTER
from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import Cluster
from firecaffe.resume_advice import option


def learn_from(
    clusters: Sequence[Cluster], paths: Sequence[Path], trust_code: bool
) -> tuple[Cluster, list[str]]:
    """Correct the cluster by runs or a file of rates, and say what was learned.

    Raises: RecipeError for several clusters, or nothing to learn from.
    """
    if len(clusters) > 1 or not paths:
        runs, write = option("runs"), option("write")
        what = f"{len(clusters)} clusters" if paths else f"{write} without {runs}"
        raise RecipeError(f"{runs} corrects one cluster and {write} keeps it; found {what}")
    if paths[0].suffix == ".toml":
        cluster, said = _learn_rates(paths, clusters)
    else:
        from firecaffe.planner.calibrate import learn

        cluster, said = learn(clusters[0], paths, trust_code=trust_code)
    return cluster, [f"learned from {', '.join(map(str, paths))}:", *said]


def _learn_rates(paths: Sequence[Path], clusters: Sequence[Cluster]) -> tuple[Cluster, list[str]]:
    from firecaffe.planner.learn_rates import learn_rates
    from firecaffe.planner.rates_file import load_rates

    if len(paths) > 1:
        raise RecipeError(
            f"{option('runs')} takes one file of rates, or folders of runs; found {len(paths)} "
            f"paths, of which {paths[0]} is a file"
        )
    is_given = clusters[0].name != USUAL_CLUSTER
    refuse_beside(f"{paths[0]}, which names its cluster", cluster=is_given)
    rates, cluster = load_rates(paths[0])
    learned = learn_rates(cluster, rates.trainings)
    return learned.whole(), learned.lines()
