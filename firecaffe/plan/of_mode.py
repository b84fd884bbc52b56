"""A run's forecast in another mode of synchrony than every_step: by the functions of `plan.modes`.

The ends of its band are those of computing and of links together, as in a synchronous forecast.
"""

from dataclasses import asdict, replace
from typing import Any

from firecaffe.plan.cluster import Cluster
from firecaffe.plan.forecast import Forecast, errors_of
from firecaffe.plan.modes import Mode, fragment_shares, own_mode
from firecaffe.plan.workload import Workload
from firecaffe.synchrony.config import LOCAL, SynchronyConfig
from firecaffe.synchrony.rounds import Rounds


def forecast_mode(
    workload: Workload, cluster: Cluster, row: Forecast, words: SynchronyConfig, rounds: Rounds
) -> dict[str, Any]:
    """What is kept of it, with the steps before the mode's first one.

    row: of the synchronous step. rounds: when replicas are averaged, in mode local.
    """
    is_local = words.mode == LOCAL
    compute, link = errors_of(workload, cluster, row.workers, row.compressor)
    if is_local:
        words = replace(words, local_steps=rounds.mean_cycle)

    def at(sign: int) -> Mode:
        return own_mode(workload, cluster, row, words, 1 + sign * compute, 1 + sign * link)

    found, low, high = at(0), at(-1), at(1)
    most_bytes = workload.parameter_bytes * max(fragment_shares(workload, words))
    return {
        "mode": words.mode,
        "mode_in_words": found.words,
        "workers": row.workers,
        "after_step": rounds.synchronous if is_local else words.warm_steps,
        "step_s": found.step_s,
        "step_low_s": low.step_s,
        "step_high_s": high.step_s,
        **{name: each for name, each in asdict(found).items() if name in KEPT},
        # Of a fragment, the mean; and of the largest one.
        "average_s": row.exchange_s / words.fragments if is_local else None,
        "average_bytes": most_bytes if is_local else None,
    }


KEPT = ("images_per_s", "staleness", "dropped", "idle", "bytes_per_step")
"""Of a mode's row."""


def line_of(found: dict[str, Any]) -> str:
    """The forecast in words."""
    low, high = found["step_low_s"] * 1e3, found["step_high_s"] * 1e3
    said = (
        f"forecast: {found['step_s'] * 1e3:.3g} ms a step ({low:.3g} to {high:.3g}), "
        f"{found['images_per_s']:,.4g} samples/s on {found['cluster']} in mode "
        f"{found['mode_in_words']}"
    )
    if found["average_s"] is not None:
        return f"{said}; an average takes {found['average_s'] * 1e3:.3g} ms"
    megabytes = found["bytes_per_step"] / 1e6
    return f"{said}; staleness {found['staleness']:.2f}, {megabytes:,.3g} MB a step"
