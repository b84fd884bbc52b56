"""Advice of `firecaffe explain` on other synchrony modes, planned with a run's step times."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from firecaffe.errors import FirecaffeError, RunError
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.codec_cost import PRICED
from firecaffe.plan.forecast import forecast
from firecaffe.plan.modes import alternatives
from firecaffe.plan.of_recipe import workload_of
from firecaffe.plan.step_cost import own_exchange
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.recipe.refusals import is_refused
from firecaffe.runs.run_folder import FORECAST, read_run_file

MOST_TOLD = 3

LEAST_GAIN = 1.05
"""Least factor of the rate that is reported as a gain."""


def advice(folder: Path, seconds: Sequence[float], trust_code: bool) -> list[str]:
    """Return a line on the rate in other modes. `seconds` are each rank's for a micro-batch.

    The result is empty for a run without a forecast, whose cluster is unknown, and for a split
    network, which has no other mode. `trust_code` lets code that the run names run.
    """
    if not (folder / FORECAST).is_file() or "parallel" in read_run_file(folder, FORECAST):
        return []
    try:
        return [_line(folder, seconds, trust_code)]
    except (FirecaffeError, ValueError) as error:
        return [f"what another mode would bring is not known: {error}"]


def _line(folder: Path, seconds: Sequence[float], trust_code: bool) -> str:
    recipe = recipe_of(folder, trust_code=trust_code)
    kept = read_run_file(folder, FORECAST)
    if len(seconds) != kept.get("workers"):
        raise RunError(f"{len(seconds)} of {kept.get('workers')} ranks are in the timings")
    cluster = load_cluster(str(kept.get("cluster_file") or kept.get("cluster")))
    workload, words = workload_of(recipe), recipe.exchange
    compressor = words.compressor if words.compressor in PRICED else NO_COMPRESSOR
    exchange = own_exchange(workload, cluster, len(seconds))
    row = forecast(workload, cluster, len(seconds), exchange, compressor)
    own, *others = alternatives(workload, cluster, row, recipe.synchrony, seconds)
    possible = [
        other
        for other in others
        if not is_refused(replace(recipe, synchrony=replace(recipe.synchrony, **other.synchrony)))
    ]
    better = [each for each in possible if each.gain >= LEAST_GAIN]
    better.sort(key=lambda each: each.gain, reverse=True)
    start = f"planned with these ranks' own times on {cluster.name}"
    if not better:
        return f"{start}, no mode is 5 % faster than {own.words}"
    said = ", ".join(f"{each.words} ({each.gain:.2f} times)" for each in better[:MOST_TOLD])
    return f"{start}, faster than {own.words}: {said}; accuracy is not predicted"
