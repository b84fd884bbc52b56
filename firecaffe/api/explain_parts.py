"""Parts of an explanation: runs with a server, stages, and what other modes would bring."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from firecaffe.errors import FirecaffeError, RunError
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.parallel.pipeline import idle_share
from firecaffe.planner.cluster import load_cluster
from firecaffe.recipe.refusals import is_refused
from firecaffe.runs.explain_served import ServedExplanation, ServedRank
from firecaffe.runs.explain_stages import StageTimes
from firecaffe.runs.rank_times import Slow
from firecaffe.runs.run_folder import FORECAST, read_run_file

SERVED_HEADERS = ("rank", "micro-batches", "one takes", "idle", "pulled", "pushed")


def served_table(explained: ServedExplanation) -> Table:
    """Return the table of ranks of a run with a server."""
    table = Table(box=SIMPLE_HEAD)
    for header in SERVED_HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    for rank in explained.ranks:
        table.add_row(*_served_cells(rank))
    return table


def served_lines(explained: ServedExplanation) -> list[str]:
    """Return the remarks below the table of ranks."""
    step = (
        f"{explained.steps:,} steps of {explained.step_s * 1e3:,.1f} ms; the server's updates take "
        f"{explained.update_s * 1e3:,.1f} ms of each"
    )
    slow = [sentence(rank, "a micro-batch takes") for rank in explained.slow]
    if not slow and not explained.not_tested:
        slow.append("no rank is shown to be slow: none beyond the noise")
    return [step, *explained.lines, *slow, *(f"not tested: {why}" for why in explained.not_tested)]


def _served_cells(rank: ServedRank) -> list[str]:
    return [
        str(rank.rank),
        f"{rank.micro_batches:,}",
        f"{rank.seconds * 1e3:,.1f} ms",
        "-" if rank.idle is None else f"{rank.idle:.0%}",
        _megabytes(rank.pulled_bytes),
        _megabytes(rank.pushed_bytes),
    ]


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f} MB"


def stage_lines(stages: Sequence[StageTimes]) -> list[str]:
    """Return which stage has the most work and how long each idles; empty without stages."""
    if not stages:
        return []
    most = max(stages, key=lambda stage: stage.own_s)
    own = ", ".join(ms(stage.own_s) for stage in stages)
    idle = ", ".join(f"{stage.idle:.0%}" for stage in stages)
    count, micro_batches = len(stages), stages[0].micro_batches
    expected = float(idle_share(count, micro_batches))
    return [
        f"stages: stage {most.stage} has the most work, and sets the pace: in a step they take "
        f"{own}, and idle for {idle}",
        f"stages: {count} of equal work, with {micro_batches} micro-batches a step and messages "
        f"that take no time, idle for {expected:.0%} each",
    ]


MOST_MODES = 3

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
        return [_other_modes(folder, seconds, trust_code)]
    except (FirecaffeError, ValueError) as error:
        return [f"what another mode would bring is not known: {error}"]


def _other_modes(folder: Path, seconds: Sequence[float], trust_code: bool) -> str:
    from firecaffe.planner.codec_cost import PRICED
    from firecaffe.planner.forecast import forecast
    from firecaffe.planner.modes import alternatives
    from firecaffe.planner.of_recipe import workload_of
    from firecaffe.planner.step_cost import own_exchange
    from firecaffe.recipe.recorded_recipe import recipe_of

    recipe = recipe_of(folder, trust_code=trust_code)
    kept = read_run_file(folder, FORECAST)
    if len(seconds) != kept.get("workers"):
        raise RunError(f"{len(seconds)} of {kept.get('workers')} ranks are in the timings")
    cluster = load_cluster(str(kept.get("cluster_file") or kept.get("cluster")))
    workload = workload_of(recipe)
    compressor = recipe.exchange.compressor
    compressor = compressor if compressor in PRICED else NO_COMPRESSOR
    exchange = own_exchange(workload, cluster, len(seconds))
    row = forecast(workload, cluster, len(seconds), exchange, compressor)
    own, *others = alternatives(workload, cluster, row, recipe.synchrony, seconds)
    possible = [
        mode
        for mode in others
        if not is_refused(replace(recipe, synchrony=replace(recipe.synchrony, **mode.synchrony)))
    ]
    better = [mode for mode in possible if mode.gain >= LEAST_GAIN]
    better.sort(key=lambda mode: mode.gain, reverse=True)
    start = f"planned with these ranks' own times on {cluster.name}"
    if not better:
        return f"{start}, no mode is 5 % faster than {own.words}"
    said = ", ".join(f"{mode.words} ({mode.gain:.2f} times)" for mode in better[:MOST_MODES])
    return f"{start}, faster than {own.words}: {said}; accuracy is not predicted"


def sentence(slow: Slow, own_part: str = "its own part of a step takes") -> str:
    """Describe a slow rank; `own_part` is the text for a rank that computes slowly."""
    what = (
        f"computes longer than the others: {own_part}"
        if slow.cause == "computes"
        else "has a slow link: round trips with it take"
    )
    return (
        f"rank {slow.rank} {what} {ms(slow.own_s)}, against {ms(slow.others_s)} "
        f"({slow.factor:.2f} times; p = {slow.p_value:.2g}, n = {slow.samples})"
    )


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
