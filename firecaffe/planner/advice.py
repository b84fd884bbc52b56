"""Explains what limits a plan and what to change first, and how much faster each change is.

Two forecasts of a training share errors: computing is off by the same factor, because the device is
the same, and so is the exchange over the same link. Two links may be off in opposite directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from firecaffe.errors import RecipeError
from firecaffe.exchange.route import FOLD
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.planner.cluster import Cluster
from firecaffe.planner.forecast import (
    MIN_GOODPUT,
    Forecast,
    errors_of,
    exchanges_on,
    fastest,
    forecast,
    is_own,
    most_useful,
)
from firecaffe.planner.memory import remedy
from firecaffe.planner.price import PRICED
from firecaffe.planner.simulate import Network
from firecaffe.planner.step_cost import Scales, StepCost, route_of
from firecaffe.planner.update_price import ALL, update_of
from firecaffe.planner.workload import Workload
from firecaffe.value_checks import digits_of

MIN_GAIN = 0.02
"""A change that gains a smaller share of images per second is not mentioned."""

LIMITS = {
    "compute_s": "computing",
    "exposed_communication_s": "waiting for the exchange",
    "data_s": "waiting for data",
    "update_s": "on the optimizer's update",
}


@dataclass(frozen=True)
class AdvisedChange:
    what: str
    step_s: float
    gain: float
    """Images per second over the present rate, minus 1."""


def changes(workload: Workload, cluster: Cluster, row: Forecast) -> list[AdvisedChange]:
    """List changes that help this row, best first, with only the best exchange and compressor."""
    outer, storage = cluster.links[-1], cluster.storage
    faster = replace(outer, bandwidth_bytes_per_s=10 * outer.bandwidth_bytes_per_s)
    worlds = [
        (
            f"a link of ten times the bandwidth of {outer.name}",
            workload,
            replace(cluster, links=(*cluster.links[:-1], faster)),
        ),
        (
            "micro-batches twice as large",
            replace(workload, micro_batch_size=2 * workload.micro_batch_size),
            cluster,
        ),
    ]
    law, batch = workload.law, 2 * workload.global_batch_size
    if law is None or batch <= law.b_crit:  # from there on a larger batch needs more epochs
        larger = replace(workload, global_batch_size=batch)
        worlds.append(("a global batch twice as large", larger, cluster))
    if storage is not None:
        twice = replace(storage, read_bytes_per_s=2 * storage.read_bytes_per_s)
        worlds.append(("storage of twice the rate", workload, replace(cluster, storage=twice)))
        twice = replace(storage, decoded_images_per_s=2 * storage.decoded_images_per_s)
        worlds.append(("twice the decoding threads", workload, replace(cluster, storage=twice)))
    worlds.append((f"exchange.update_at {ALL}", replace(workload, update_at=ALL), cluster))
    way = row.exchange, row.compressor
    changed = [_change(what, row, work, on, *way) for what, work, on in worlds]
    ways = [
        [(name, NO_COMPRESSOR) for name in _exchanges_that_keep_bits(workload, cluster, row)],
        [("tree", name) for name in PRICED],
    ]
    for names in ways if row.workers > 1 else ():
        made = [
            _change(_way(*other), row, workload, cluster, *other) for other in names if other != way
        ]
        changed.append(
            max((change for change in made if change), key=lambda change: change.gain, default=None)
        )
    kept = [change for change in changed if change is not None and change.gain >= MIN_GAIN]
    return sorted(kept, key=lambda change: change.gain, reverse=True)


def _exchanges_that_keep_bits(workload: Workload, cluster: Cluster, row: Forecast) -> list[str]:
    network = Network(cluster.links, row.workers)
    names = exchanges_on(cluster, row.workers)
    return [name for name in names if route_of(workload, name, network).is_invariant]


def _change(
    what: str, row: Forecast, workload: Workload, cluster: Cluster, exchange: str, compressor: str
) -> AdvisedChange | None:
    """Forecast a change; None if it is impossible, or would no longer fit in memory."""
    if workload.global_batch_size % workload.micro_batch_size:
        return None
    try:
        changed = forecast(workload, cluster, row.workers, exchange, compressor)
    except (RecipeError, ValueError):
        return None
    if row.fits and not changed.fits:
        return None
    return AdvisedChange(what, changed.step_s, changed.images_per_s / row.images_per_s - 1)


def paragraph(workload: Workload, cluster: Cluster, rows: Sequence[Forecast]) -> str:
    """Say how many workers to use, what limits more of them, and what to change first."""
    ending = [row for row in rows if row.goodput]
    if not ending:
        return _endless(cluster, rows)
    endless = [row for row in rows if not row.goodput]
    last, rows = fastest(ending)[-1], ending
    said = [_how_many(workload, cluster, rows, endless), _what_limits(last)]
    said += _other_ways(workload, cluster, last, rows)
    helpful = changes(workload, cluster, last)
    if helpful:
        first = "; ".join(f"{change.what} ({change.gain:+.0%} samples/s)" for change in helpful[:3])
        said.append(f"To change first: {first}.")
    else:
        said.append("No single change would gain 2 % or more.")
    if not last.fits:
        need = sum(last.memory_bytes.values())
        said.insert(
            0,
            f"It does not fit: a worker needs {need / 1e9:.3g} GB, and {cluster.device.name} has "
            f"{cluster.device.memory_bytes / 1e9:.3g} GB; {remedy(last.memory_bytes)}.",
        )
    return " ".join(said)


def _endless(cluster: Cluster, rows: Sequence[Forecast]) -> str:
    numbers = ", ".join(map(str, sorted({row.workers for row in rows})))
    return (
        f"With {numbers} workers on {cluster.name} the training does not end: "
        f"{cluster.failures_per_node_hour:g} failures of a node an hour, of {cluster.restart_s:g} "
        f"s each, leave less than {MIN_GOODPUT:.1%} of the time (failures_per_node_hour, "
        "restart_s); plan for fewer nodes, or correct the file."
    )


def _how_many(
    workload: Workload, cluster: Cluster, rows: Sequence[Forecast], endless: Sequence[Forecast]
) -> str:
    best = fastest(rows)
    useful, last = most_useful(rows), best[-1]
    speedup = next((row.speedup for row in best if row.workers == useful), 1.0)
    use = "Use one worker"
    if useful > 1:
        use = f"Use {useful} workers: {digits_of(speedup)} times as fast as one"
    beyond = [f"{row.workers}: {_times(row)}" for row in best if row.workers > useful]
    most = min(workload.num_micro_batches, cluster.most_devices or workload.num_micro_batches)
    if beyond:
        return f"{use}. Further ones bring less than half a worker each ({', '.join(beyond)})."
    if endless:
        return f"{use}. {_endless(cluster, endless)}"
    if last.workers < most:
        return f"{use}. More may still pay: plan for more."
    return f"{use}. No more than {most} workers can share this batch on this cluster."


def _what_limits(row: Forecast) -> str:
    parts = {label: getattr(row, name) / row.step_s for name, label in LIMITS.items()}
    limit = max(parts, key=parts.__getitem__)
    if row.workers == 1:
        return f"One worker spends {parts[limit]:.0%} of a step {limit}."
    return (
        f"With {row.workers}, a worker spends {parts[limit]:.0%} of a step {limit}, by the fastest "
        f"{_way(row.exchange, row.compressor)} ({row.efficiency:.0%} efficiency)."
    )


def _times(row: Forecast) -> str:
    return f"{digits_of(row.speedup)} times"


def _other_ways(
    workload: Workload, cluster: Cluster, best: Forecast, rows: Sequence[Forecast]
) -> list[str]:
    same = [row for row in rows if row.workers == best.workers > 1 and row is not best]
    faster = [row for row in same if row.step_s < best.step_s and _times(row) != _times(best)]
    said = [
        f"{row.exchange} would be faster ({_times(row)}), but it does not keep the bits of one "
        "worker, so it is not advised."
        for row in sorted(faster, key=lambda row: row.step_s)[:1]
    ]
    by_recipe = [row for row in same if is_own(row, workload, cluster)]
    said += [
        f"The recipe's own, {_way(row.exchange, row.compressor)}, "
        + ("is as fast." if _times(row) == _times(best) else f"gives {_times(row)}.")
        for row in by_recipe
    ]
    return said + folded(workload, cluster, rows)


def folded(workload: Workload, cluster: Cluster, rows: Sequence[Forecast]) -> list[str]:
    """Name the numbers of workers at which `fold` stands in for the exchange of a row."""
    numbers = sorted(
        {
            row.workers
            for row in rows
            if row.workers > 1
            and row.compressor == NO_COMPRESSOR
            and not update_of(workload, row.workers).to_owners
            and route_of(workload, row.exchange, Network(cluster.links, row.workers)).way == FOLD
        }
    )
    if not numbers:
        return []
    return [
        f"With {', '.join(map(str, numbers))} workers, shares of {workload.num_micro_batches} "
        f"micro-batches are no subtrees, so {FOLD} sums instead of an exchange in tree order."
    ]


ACCURACY_CAVEAT = "whose cost in accuracy is not forecast"


def _way(exchange: str, compressor: str) -> str:
    if compressor != NO_COMPRESSOR:
        return f"compressor {compressor}, {ACCURACY_CAVEAT},"
    return f"exchange {exchange}"


On = tuple[Cluster, Forecast]


@dataclass(frozen=True)
class Gain:
    """One forecast's samples/s over another's, minus 1, with its band."""

    middle: float
    low: float
    high: float


def gain_of(work: Workload, other: On, over: On) -> Gain:
    """Compare `other` with `over`, on clusters of the same device."""
    costs = [StepCost(work, on, row.exchange, row.compressor) for on, row in (other, over)]
    workers = [row.workers for _, row in (other, over)]
    errors = [errors_of(work, on, row.workers, row.compressor) for on, row in (other, over)]
    is_same_link = other[0].links == over[0].links and errors[0] == errors[1]
    device = over[0].device
    jitters, slowdowns = _sides(device.jitter_error), _sides(device.slowdown_error)
    gains = []
    for side, jitter, slowdown in product((-1, 1), jitters, slowdowns):
        of_other, of_over = (
            [
                cost.step(
                    count,
                    Scales(1 + side * compute, 1 + sign * exchange, 1.0, jitter, slowdown),
                ).step_s
                for sign in (-1, 1)
            ]
            for cost, count, (compute, exchange) in zip(costs, workers, errors, strict=True)
        )
        pairs = zip(of_other, of_over, strict=True) if is_same_link else product(of_other, of_over)
        gains += [over_s / step_s - 1 for step_s, over_s in pairs]
    return Gain(over[1].step_s / other[1].step_s - 1, min(gains), max(gains))


def _sides(error: float) -> tuple[float, ...]:
    """Return the factors of a figure that may be off by a factor of 1 + error."""
    return (1 / (1 + error), 1 + error) if error else (1.0,)
