"""A cluster that finished runs, or a file of rates, correct before a plan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from firecaffe.api.cluster_file import write_cluster
from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import Cluster
from firecaffe.resume_advice import option


def learn_from(
    clusters: Sequence[Cluster],
    folders: Sequence[str | Path],
    written: str | Path,
    trust_code: bool,
) -> tuple[Cluster, list[str]]:
    """Correct the cluster, write it if a file is given, and say what was learned.

    Raises: RecipeError for several clusters, or a file without runs.
    """
    if len(clusters) > 1 or not folders:
        runs, write = option("runs"), option("write")
        what = f"{len(clusters)} clusters" if folders else f"{write} without {runs}"
        raise RecipeError(f"{runs} corrects one cluster and {write} keeps it; found {what}")
    paths = [*map(Path, folders)]
    if paths[0].suffix == ".toml":
        cluster, said = _learn_rates(paths)
    else:
        from firecaffe.planner.calibrate import learn

        cluster, said = learn(clusters[0], paths, trust_code=trust_code)
    said = [f"learned from {', '.join(map(str, paths))}:", *said]
    if written:
        write_cluster(Path(written), replace(cluster, name=Path(written).stem))
        said.append(f"wrote {written}")
    return cluster, said


def _learn_rates(paths: Sequence[Path]) -> tuple[Cluster, list[str]]:
    from firecaffe.planner.learn_rates import learn_rates
    from firecaffe.planner.rates_file import load_rates

    if len(paths) > 1:
        raise RecipeError(
            f"{option('runs')} takes one file of rates, or folders of runs; found {len(paths)} "
            f"paths, of which {paths[0]} is a file"
        )
    rates, cluster = load_rates(paths[0])
    learned = learn_rates(cluster, rates.trainings)
    return learned.whole(), learned.lines()
