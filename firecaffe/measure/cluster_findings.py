"""Cluster files made from measurements, and the findings of `firecaffe check`."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from firecaffe.exchange import MAX_LANES, NATIVE
from firecaffe.exchange.route import find_route
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.measure.ranks_and_links import PairLink, RankFacts
from firecaffe.measure.step_times import StepTimes
from firecaffe.planner.calibrate import fit, jitter_of, relative_spread
from firecaffe.planner.cluster import Cluster, Device, Link, Storage
from firecaffe.planner.compute_time import copies_s, micro_batch
from firecaffe.planner.price import MEASURED, Prices, coded_s, fixed_share, ranks_per_node
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.planner.simulate import Network
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.runs.rank_times import ALPHA, holm

SIZES_TO_FIT = 3


def calibrated(cluster: Cluster, recipe: CheckedRecipe, rows: Sequence[StepTimes]) -> Cluster:
    """Add measured steps to the cluster, and fit its device to them if there are enough sizes."""
    key, inputs = (recipe.model.label, recipe.train.autocast), {"", *(row.inputs for row in rows)}
    kept = tuple(
        row
        for row in cluster.device.measured
        if (row.model, row.autocast) != key or row.inputs not in inputs
    )
    device = dataclasses.replace(cluster.device, measured=())
    if len(rows) >= SIZES_TO_FIT:
        device = _fitted(device, recipe, rows)
    device = dataclasses.replace(device, measured=(*kept, *(row.measured(recipe) for row in rows)))
    source = f"measured: steps of {recipe.model.label}"
    sources = tuple(dict.fromkeys([*cluster.sources, source]))
    return dataclasses.replace(cluster, device=device, sources=sources)


def _fitted(device: Device, recipe: CheckedRecipe, rows: Sequence[StepTimes]) -> Device:
    workload = workload_of(recipe)

    def with_values(values: Any) -> Device:
        changes = {"efficiency": values["efficiency"], "overhead_s": values["overhead_s"]}
        return dataclasses.replace(device, **changes)

    def compute_s(values: Any, size: int) -> float:
        device = with_values(values)
        return micro_batch(workload, device, size).compute_s + copies_s(workload, device)

    fitted = fit(
        compute_s,
        {"efficiency": device.efficiency, "overhead_s": max(1e-7, device.overhead_s)},
        [(row.micro_batch_size, median(row.compute_s)) for row in rows],
    )
    # `error` stays, because a fit to one network is less certain for another.
    return within_peak(with_values(fitted.values))


def within_peak(device: Device) -> Device:
    """Cap efficiency at 1 and raise the peak, if steps were faster than the measured peak."""
    more = max(1.0, device.efficiency)
    return dataclasses.replace(
        device,
        efficiency=device.efficiency / more,
        peak_flops={dtype: more * rate for dtype, rate in device.peak_flops.items()},
        memory_bytes_per_s=more * device.memory_bytes_per_s,
    )


MIN_RATIO = 0.9
"""A slow rank or link is only named if its rate is below this share of the others' median."""

MAX_CLOCK_DIFFERENCE_S = 1.0
MIN_FREE_SHARE = 0.1

MAX_LOOKUP_S = 2.0
"""A lookup waits 5 s by default for a name server that does not answer."""

MAX_LATENCY_RATIO = 2.0

USUAL_OVERHEAD_S = 2e-5


@dataclass(frozen=True)
class MeasuredCluster:
    ranks: list[RankFacts]
    links: list[PairLink]
    local_world_size: int
    steps: list[list[StepTimes]]
    """Timed steps of the recipe by rank; empty lists without a recipe."""
    exchanges: dict[str, dict[int, float]]
    """Seconds by exchange and bytes."""
    slowdown: float
    """The slowdown of computing during an exchange; see `planner.cluster.Device`."""
    shares_memory: bool = False


def findings(found: MeasuredCluster) -> list[str]:
    lines = []
    versions = defaultdict(list)
    for rank in found.ranks:
        versions[rank.versions].append(rank.rank)
        if abs(rank.clock_s) > MAX_CLOCK_DIFFERENCE_S + rank.clock_error_s:
            lines.append(f"clock: rank {rank.rank} on {rank.host} is {rank.clock_s:+.1f} s off")
        if rank.free_memory_bytes < MIN_FREE_SHARE * rank.memory_bytes:
            lines.append(
                f"memory: rank {rank.rank} on {rank.host} has {rank.free_memory_bytes / 1e9:.2f} "
                f"of {rank.memory_bytes / 1e9:.3g} GB free"
            )
        if rank.name_lookup_s > MAX_LOOKUP_S:
            lines.append(
                f"name lookups: rank {rank.rank} on {rank.host} waits {rank.name_lookup_s:.1f} s "
                "for the name of an address, and so does each connection of torch's store; let a "
                "name server answer, or set RES_OPTIONS='timeout:1 attempts:1'"
            )
    if len(versions) > 1:
        shown = "; ".join(f"ranks {ranks}: {version}" for version, ranks in versions.items())
        lines.append(f"versions differ: {shown}")
    hosts = {rank.rank: rank.host for rank in found.ranks}
    slow = slower({rank.rank: rank.matrix_flops for rank in found.ranks})
    for index, (own, others) in slow.items():
        lines.append(
            f"slow rank: {index} on {hosts[index]} computes {own / 1e9:.4g} GFLOP/s, the others "
            f"{others / 1e9:.4g}"
        )
    between = {
        (link.first, link.second): link.bandwidth_samples_bytes_per_s
        for link in found.links
        if not link.in_host
    }
    lines += [
        f"latency varied: link {link.first} - {link.second} has {link.latency_s * 1e6:.3g} µs, its "
        f"median round trip {link.latency_ratio:.2g} times that; other work was on the processors"
        for link in found.links
        if link.latency_ratio > MAX_LATENCY_RATIO
    ]
    return [*lines, *_slow_links(between, hosts)]


def _slow_links(
    between: Mapping[tuple[int, int], Sequence[float]], hosts: Mapping[int, str]
) -> list[str]:
    ends = sorted({rank for pair in between for rank in pair})
    of_ranks = {
        rank: (
            [rates for pair, rates in between.items() if rank in pair],
            [rates for pair, rates in between.items() if rank not in pair],
        )
        for rank in ends
    }
    slow = _slower({rank: groups for rank, groups in of_ranks.items() if all(groups)})
    if slow:
        rank = min(slow, key=lambda end: slow[end][0])
        own, others = slow[rank]
        return [
            f"slow link: that of rank {rank} on {hosts[rank]} has {own / 1e6:.4g} MB/s, those "
            f"between the others {others / 1e6:.4g}"
        ]
    pairs = list(between)
    return [
        f"slow link: {pairs[index][0]} - {pairs[index][1]} ({hosts[pairs[index][0]]} - "
        f"{hosts[pairs[index][1]]}) has {own / 1e6:.4g} MB/s, the others {others / 1e6:.4g}"
        for index, (own, others) in slower(dict(enumerate(between.values()))).items()
    ]


Samples = Sequence[Sequence[float]]


def slower(samples: Mapping[int, Sequence[float]]) -> dict[int, tuple[float, float]]:
    """Return the keys whose rates are significantly below all others', with both medians."""
    return _slower(
        {
            name: ([own], [rates for other, rates in samples.items() if other != name])
            for name, own in samples.items()
            if len(samples) > 1
        }
    )


def _slower(groups: Mapping[int, tuple[Samples, Samples]]) -> dict[int, tuple[float, float]]:
    """Run one-sided rank-sum tests of (own, others), at ALPHA over all tests (Holm)."""
    from scipy.stats import mannwhitneyu  # takes a second, and most importers do not test

    p_values, middles = {}, {}
    for name, (own, others) in groups.items():
        own_rates = [rate for rates in own for rate in rates]
        other_rates = [rate for rates in others for rate in rates]
        p_values[name] = float(mannwhitneyu(own_rates, other_rates, alternative="less").pvalue)
        middles[name] = tuple(median(map(median, side)) for side in (own, others))
    return {
        name: (middles[name][0], middles[name][1])
        for name, p_value in holm(p_values).items()
        if p_value < ALPHA and middles[name][0] < MIN_RATIO * middles[name][1]
    }


def cluster_of(found: MeasuredCluster, recipe: CheckedRecipe | None, name: str) -> Cluster:
    ranks, size = found.ranks, found.local_world_size
    flops = [median(rank.matrix_flops) for rank in ranks]
    copies = [median(rank.copy_bytes_per_s) for rank in ranks]
    is_gpu = ranks[0].device.startswith("NVIDIA")
    per_host = 1 if is_gpu else size
    reads = [rank.file_read_bytes_per_s for rank in ranks]
    device = Device(
        name=ranks[0].device,
        memory_bytes=float(min(rank.memory_bytes for rank in ranks)) / per_host,
        memory_bytes_per_s=median(copies),
        peak_flops={"float32": median(flops)},
        efficiency=0.5,
        overhead_s=USUAL_OVERHEAD_S,
        jitter=_jitter(found.steps),
        exchange_slowdown=found.slowdown,
        error=0.5,
    )
    hosts = len({(rank.host, rank.group) for rank in ranks})
    cluster = Cluster(
        name=name,
        about=f"{len(ranks)} ranks on {hosts} hosts, as `firecaffe check` found them",
        device=device,
        devices_per_node=size,
        links=_links(found, size),
        # Links within one host say nothing about links between hosts.
        most_devices=len(ranks) if hosts == 1 else 0,
        measured_devices=len(ranks),
        lanes=MAX_LANES if hosts > 1 and not is_gpu else 1,
        storage=Storage("the folder that was checked", median(reads) * size),
        sources=("firecaffe check",),
    )
    if recipe is not None and found.steps[0]:
        # All ranks computed at once, as in training; take the median rank for each size.
        rows = [
            sorted(of_size, key=lambda row: median(row.compute_s))[len(of_size) // 2]
            for of_size in zip(*found.steps, strict=True)
        ]
        cluster = calibrated(cluster, recipe, rows)
    return _with_exchanges(cluster, found)


def _jitter(steps: Sequence[Sequence[StepTimes]]) -> float:
    """The standard deviation of a micro-batch's time over its mean, for the median rank."""
    jitters = [
        jitter_of(relative_spread(row.compute_s), row.micro_batches)
        for of_rank in steps
        for row in of_rank
    ]
    return median(jitters) if jitters else 0.0


def _links(measured: MeasuredCluster, size: int) -> tuple[Link, ...]:
    inside = [link for link in measured.links if link.in_host]
    between = [link for link in measured.links if not link.in_host]
    links = []
    if inside:
        within = _link("within a host", inside, size if between else 0)
        rates = [median(rank.copy_bytes_per_s) for rank in measured.ranks]
        shared = median(rates) if measured.shares_memory else 0.0
        links.append(dataclasses.replace(within, memory_bytes_per_s=shared))
    if between:
        links.append(_link("between hosts", between, 0))
    return tuple(links) or (Link("none was measured", 1e-5, 1e9, error=0.9),)


def _link(name: str, pairs: Sequence[PairLink], group: int) -> Link:
    rates = [pair.bandwidth_bytes_per_s for pair in pairs]
    samples = [sample for pair in pairs for sample in pair.bandwidth_samples_bytes_per_s]
    return Link(
        name,
        latency_s=median([pair.latency_s for pair in pairs]),
        bandwidth_bytes_per_s=median(rates),
        group=group,
        error=max(0.05, relative_spread(samples) if len(samples) > 1 else 0.05),
    )


def _with_exchanges(cluster: Cluster, measured: MeasuredCluster) -> Cluster:
    """Add what exchanges show about the outermost link: its latency, and efficiencies by exchange.

    The smallest exchange has hardly any bytes. So its time shows a message's latency including all
    work of the software, which a round trip between two idle ranks leaves out. An efficiency is the
    predicted time over the measured time of the largest exchange.
    """
    if not measured.exchanges:
        return cluster
    level = Network(cluster.links, len(measured.ranks)).level(0, len(measured.ranks) - 1)
    link, with_link = cluster.links[level], partial(cluster.with_link, level)

    twice = with_link(latency_s=2 * link.latency_s)
    latencies_s = []
    for name, times in measured.exchanges.items():
        size = min(times)
        priced_s, more_s = (_priced_s(measured, on, name, size) for on in (cluster, twice))
        if name not in (NATIVE, *MEASURED) and more_s > priced_s:
            of_messages = (times[size] - priced_s) / (more_s - priced_s)
            latencies_s.append((1 + of_messages) * link.latency_s)
    latency_s = max(link.latency_s, median(latencies_s) if latencies_s else 0.0)
    efficiency: dict[str, float] = {}
    # Codecs come last: they use other exchanges, whose efficiency is already in their price.
    for name in sorted(measured.exchanges, key=MEASURED.__contains__):
        plain = {other: share for other, share in efficiency.items() if other not in MEASURED}
        on = with_link(latency_s=latency_s, efficiency=plain if name in MEASURED else {})
        times = measured.exchanges[name]
        efficiency[name] = _priced_s(measured, on, name, max(times)) / times[max(times)]
    return with_link(latency_s=latency_s, efficiency=efficiency)


def _priced_s(measured: MeasuredCluster, cluster: Cluster, name: str, size: int) -> float:
    ranks, elements = len(measured.ranks), [size // BYTES_PER_ELEMENT]
    network = Network(cluster.links, ranks)
    if name in MEASURED:  # a node of each rank
        rate = cluster.device.memory_rate
        return coded_s(name, fixed_share(name), ranks, network, rate, elements)[0]
    per_node = ranks_per_node(network)
    route = find_route(name, None, ranks, per_node, shared_memory=measured.shares_memory)
    return Prices(name, network, across=route.across).seconds(elements)[0]
