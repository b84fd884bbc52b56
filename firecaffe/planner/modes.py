"""Forecasts the rate of each mode of synchrony, if workers are not equally fast.

Worker w takes the same time for its n-th micro-batch in all modes, drawn from the recipe's speeds.
Synchronous modes wait for the slowest worker of each step, or round of local steps. Modes with a
server run their own policies under the simulated clock: weights and gradients share the server's
port (with a sharded server, all workers' ports), and each update takes the server's time. Gradients
are encoded if the forecast's compressor works with a server. The accuracy that late gradients cost
is not forecast. The band of a run's mode combines the errors of computing and links.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any

from firecaffe.exchange.leaves import Shares, equal_shares, num_nodes
from firecaffe.gradients.compressors import FIXED_LENGTH
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.planner.cluster import Cluster, on_cores
from firecaffe.planner.compute_time import data_s, micro_batch, update_s
from firecaffe.planner.forecast import Forecast, errors_of
from firecaffe.planner.price import encoding_s, sent_share
from firecaffe.planner.server_costs import QUEUED_BYTES, PlannedKeeper, ServedClock, planned_keeper
from firecaffe.planner.simulate import Network
from firecaffe.planner.step_cost import StepCost
from firecaffe.planner.workload import Workload
from firecaffe.synchrony.clock import Seconds, seconds_of
from firecaffe.synchrony.config import (
    ASYNCHRONOUS,
    BACKUP,
    EVERY_STEP,
    LOCAL,
    MEASURED,
    SERVED,
    STALE,
    SynchronyConfig,
)
from firecaffe.synchrony.events import Event, Tally
from firecaffe.synchrony.rounds import Rounds, cut_fragments
from firecaffe.synchrony.server_policies import Leaves, make_policy
from firecaffe.synchrony.shares import balanced_shares

STEPS = 200

MAX_WORKS = 50_000

MAX_OWN_WORKS = 5_000
"""The most micro-batches simulated before a run, whose ranks wait for the result."""

SEED = 0


@dataclass(frozen=True)
class PlannedMode:
    words: str
    step_s: float
    """Seconds for as many samples as a step has."""
    images_per_s: float
    gain: float
    """The rate over that of every_step with equal shares."""
    staleness: float = 0.0
    """The mean number of updates by which a gradient is late."""
    dropped: float = 0.0
    """The share of samples whose gradients are dropped."""
    idle: float = 0.0
    """The mean share of a worker's time in which it does not compute."""
    bytes_per_step: float = 0.0
    """Encoded bytes to and from the server or its shards; without one, of a worker's gradients."""
    synchrony: Mapping[str, Any] = field(default_factory=dict)
    """The settings of [synchrony] that select the mode in a recipe."""


def modes_of(
    workload: Workload, cluster: Cluster, row: Forecast, words: SynchronyConfig
) -> list[PlannedMode]:
    """Price all modes on a forecast's workers. Raises: RecipeError if speeds cannot be read."""
    return list(_Workers(workload, cluster, row, words).modes())


def alternatives(
    workload: Workload,
    cluster: Cluster,
    row: Forecast,
    words: SynchronyConfig,
    seconds: Sequence[float],
) -> list[PlannedMode]:
    """Price the recipe's mode, which is not every_step, and then all others.

    If it has one micro-batch in flight, the mode with two comes second. Gains are over the recipe's
    mode. seconds: each worker's time for a micro-batch.
    """
    workers = _Workers(workload, cluster, row, words, seconds=seconds)
    recipe_mode = workers.own()
    others = [mode for mode in workers.modes() if mode.words != recipe_mode.words]
    if words.is_served and words.in_flight == 1:
        twice = replace(words, in_flight=2)
        doubled = _Workers(workload, cluster, row, twice, seconds=seconds).own()
        name = f"{recipe_mode.words} with in_flight 2"
        others.insert(
            0, replace(doubled, words=name, synchrony={**doubled.synchrony, "in_flight": 2})
        )
    return [
        replace(mode, gain=mode.images_per_s / recipe_mode.images_per_s)
        for mode in (recipe_mode, *others)
    ]


def fragment_shares(workload: Workload, words: SynchronyConfig) -> list[float]:
    """The share of parameter bytes by fragment. Raises: RecipeError if fragments are too many."""
    sizes = workload.tensors_bytes
    cut = cut_fragments(sizes, words.fragments)
    return [sum(sizes[place] for place in places) / sum(sizes) for places in cut]


def gradients_per_update(words: SynchronyConfig, micro_batches: int) -> int:
    """The number of gradients that a server waits for before an update. micro_batches: per step."""
    by_mode = {
        ASYNCHRONOUS: words.gradients_per_update,
        BACKUP: micro_batches - words.backup_workers,
    }
    return by_mode.get(words.mode, 1)


def hidden_s(workload: Workload, cluster: Cluster) -> float:
    """Seconds of the last micro-batch's backward, during which gradients travel."""
    return sum(micro_batch(workload, cluster.device, workload.micro_batch_size).backward_s)


def slowed_s(workload: Workload, cluster: Cluster, row: Forecast) -> float:
    """Seconds by which the exchange slows down a step's backward. row: a synchronous step's."""
    return StepCost(workload, cluster, row.exchange, row.compressor).step(row.workers).slowed_s


class _Workers:
    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        row: Forecast,
        config: SynchronyConfig,
        compute: float = 1.0,
        exchange: float = 1.0,
        seconds: Sequence[float] | None = None,
        most_works: int = MAX_WORKS,
    ) -> None:
        cluster = on_cores(cluster, row.workers, workload.threads)
        self.workload, self.row, self.size = workload, row, row.workers
        self.leaves = workload.num_micro_batches
        self.device = device = cluster.device
        own_s = micro_batch(workload, device, workload.micro_batch_size).compute_s
        self.leaf_s = compute * (own_s + data_s(workload, device))
        self.update_s = compute * update_s(workload, device)
        self.exchange_s = exchange * row.exchange_s
        self.slowed_s = slowed_s(workload, cluster, row)
        if config.speeds == "constant" and device.jitter > 0:
            config = replace(config, speeds="gamma", spread=device.jitter)
        self.words = replace(config, clock="real")
        self.took = self._scaled(seconds_of(self.words, SEED))
        if seconds is not None:
            self.took = lambda learner, _: seconds[learner % self.size]
        self.most_works = most_works
        self.steps = max(1, min(STEPS, most_works // self.leaves))
        outermost = Network(cluster.links, self.size).outermost
        self.codec = row.compressor if row.compressor in FIXED_LENGTH else ""
        self.pushed_bytes = float(workload.parameter_bytes)
        self.encoding_s = 0.0
        if self.codec:
            self.pushed_bytes *= sent_share(self.codec, workload)
            encoded_s = encoding_s(workload.parameter_bytes, device.memory_rate)
            self.encoding_s = compute * encoded_s

        def sent_s(size_bytes: float) -> float:
            one_s = outermost.latency_s + size_bytes / outermost.bandwidth_bytes_per_s
            return exchange * one_s if self.size > 1 else 0.0

        self.pull_s, self.push_s = sent_s(workload.parameter_bytes), sent_s(self.pushed_bytes)
        self.queued_s = exchange * QUEUED_BYTES / outermost.bandwidth_bytes_per_s

    def _scaled(self, seconds: Seconds) -> Seconds:
        unit = 1.0 if self.words.speeds == "measured" else self.leaf_s
        return lambda learner, count: unit * seconds(learner % self.size, count)

    def modes(self) -> Iterator[PlannedMode]:
        base = self._synchronous("every_step", equal_shares(self.leaves, self.size))
        yield base
        if self.size > 1 and self.row.compressor == NO_COMPRESSOR:  # no recipe has both
            means_s = [self._mean_s(rank) for rank in range(self.size)]
            shares = balanced_shares(self.leaves, means_s)
            measured = self._synchronous("every_step, measured shares", shares, base)
            yield replace(measured, synchrony={**measured.synchrony, "shares": MEASURED})
        if self.words.backup_workers < min(self.words.num_learners(self.size), self.leaves):
            yield self._served(BACKUP, base)
        yield self._served(STALE, base)
        yield self._served(ASYNCHRONOUS, base)
        if self.size > 1:
            yield self._local(base)

    def own(self) -> PlannedMode:
        mode = self.words.mode
        prices: dict[str, Callable[[], PlannedMode]] = {
            LOCAL: self._local,
            **dict.fromkeys(SERVED, partial(self._served, mode)),
        }
        return prices[mode]()

    def _words(self, name: str, keeper: PlannedKeeper) -> str:
        config, described = self.words, name
        if name == BACKUP:
            backups = config.backup_workers
            again = ", again" if config.dropped == "again" else ""
            described = f"backup, {config.num_learners(self.size) - backups} + {backups}{again}"
        elif name == STALE:
            described = f"stale, s = {config.max_staleness}"
        return described + keeper.said(self.codec)

    def _mean_s(self, rank: int) -> float:
        count = self.steps * self.leaves // self.size
        return sum(self.took(rank, number) for number in range(count)) / count

    def _synchronous(
        self, described: str, shares: Shares, base: PlannedMode | None = None
    ) -> PlannedMode:
        slowest_s, computed_s = self._rounds(shares, 1)
        slowest_s, computed_s = slowest_s + self.slowed_s, computed_s + self.slowed_s
        step_s = slowest_s + self.row.exposed_communication_s + self.row.update_s
        return self._mode(
            EVERY_STEP, described, base, step_s, computed_s, self._gradient_bytes(self.leaves)
        )

    def _local(self, base: PlannedMode | None = None) -> PlannedMode:
        """Price local SGD: an average waits for the slowest worker and what overlap_steps leave.

        Steps that overlap an average take longer, by the device's slow-down.
        """
        steps, overlap = self.words.local_steps, self.words.overlap_steps
        fragments = self.words.fragments
        slowest_s, computed_s = self._rounds(self._hosted(), max(1, steps // fragments))
        own_s = slowest_s + self.update_s * ceil(self.words.replicas / self.size)
        shares = fragment_shares(self.workload, self.words)
        slowdown = self.device.exchange_slowdown
        beside_s = [min(s * self.exchange_s, overlap * own_s * (1 + slowdown)) for s in shares]
        waits_s = self.exchange_s - sum(beside_s)
        slowed_s = sum(beside_s) * slowdown / (1 + slowdown) / steps
        computed_s += slowed_s
        own_s += slowed_s
        described = f"local, H = {steps}" + f", {fragments} fragments" * (fragments > 1)
        described += f", {overlap} steps beside" * bool(overlap)
        sent = self._gradient_bytes(self.words.replicas) / steps
        return self._mode(LOCAL, described, base, own_s + waits_s / steps, computed_s, sent)

    def _gradient_bytes(self, leaves: int) -> float:
        """Bytes on the wire of a worker's gradients, for a tree of `leaves` leaves."""
        workload = self.workload
        if self.row.compressor == NO_COMPRESSOR:
            return workload.parameter_bytes
        nodes = num_nodes(leaves, workload.compressor_level)
        share = sent_share(self.row.compressor, workload)
        return ceil(nodes / self.size) * share * workload.parameter_bytes

    def _hosted(self) -> Shares:
        """The micro-batches of each worker's replicas; equal shares if replicas do not fit."""
        replicas = self.words.replicas
        if replicas < self.size or self.leaves % replicas:
            return equal_shares(self.leaves, self.size)
        per_replica = self.leaves // replicas
        hosted = equal_shares(replicas, self.size)
        return tuple(range(share.start * per_replica, share.stop * per_replica) for share in hosted)

    def _rounds(self, shares: Shares, steps: int) -> tuple[float, float]:
        counts = [0] * self.size
        slowest_s, computed_s = 0.0, 0.0
        rounds = max(1, self.steps // steps)
        for _ in range(rounds):
            own_s = []
            for rank, share in enumerate(shares):
                works = len(share) * steps
                own_s.append(sum(self.took(rank, counts[rank] + n) for n in range(works)))
                counts[rank] += works
            slowest_s += max(own_s) / rounds / steps
            computed_s += sum(own_s) / self.size / rounds / steps
        return slowest_s, computed_s

    def _served(self, name: str, base: PlannedMode | None = None) -> PlannedMode:
        config = replace(self.words, mode=name)
        keeper = planned_keeper(config, self.size)
        steps = max(1, min(self.steps, self.most_works // (self.leaves * keeper.messages)))
        plan = Leaves(0, steps, steps, self.leaves, self.leaves * steps)
        policy = make_policy(config, plan, config.num_learners(self.size))
        take_s = self.update_s / gradients_per_update(config, self.leaves) + self.encoding_s
        costs = keeper.costs(self.pull_s, self.push_s, take_s, self.queued_s)
        beside_s = keeper.beside_s(self.encoding_s, self.update_s)
        computed: list[float] = []

        def seconds(learner: int, count: int) -> float:
            computed.append(self.took(learner, count) + beside_s)
            return computed[-1]

        clock, tally = ServedClock(policy, seconds, costs), Tally()
        for event in _events(clock):
            tally.take(event)
        sent_bytes = clock.pulls * self.workload.parameter_bytes + clock.pushes * self.pushed_bytes
        return self._mode(
            name,
            self._words(name, keeper),
            base,
            step_s=tally.time_s / steps,
            computed_s=sum(computed) / self.size / steps,
            moved=sent_bytes * keeper.part / steps,
            staleness=tally.mean_staleness,
            dropped=tally.dropped / (steps * self.leaves),
        )

    def _mode(
        self,
        mode: str,
        described: str,
        base: PlannedMode | None,
        step_s: float,
        computed_s: float,
        moved: float,
        staleness: float = 0.0,
        dropped: float = 0.0,
    ) -> PlannedMode:
        rate = (1 - dropped) * self.workload.global_batch_size / step_s
        gain = 1.0 if base is None else rate / base.images_per_s
        idle = max(0.0, 1 - computed_s / step_s)
        return PlannedMode(
            described, step_s, rate, gain, staleness, dropped, idle, moved, {"mode": mode}
        )


def _events(clock: ServedClock) -> Iterator[Event]:
    with suppress(IndexError):  # all leaves are done
        while True:
            yield clock.next()


def forecast_mode(
    workload: Workload, cluster: Cluster, row: Forecast, words: SynchronyConfig, rounds: Rounds
) -> dict[str, Any]:
    """Forecast a run's mode. row: a synchronous step's. rounds: when replicas are averaged."""
    is_local = words.mode == LOCAL
    compute, link = errors_of(workload, cluster, row.workers, row.compressor)
    if is_local:
        words = replace(words, local_steps=rounds.mean_cycle)

    def at(sign: int) -> PlannedMode:
        factors = 1 + sign * compute, 1 + sign * link
        return _Workers(workload, cluster, row, words, *factors, most_works=MAX_OWN_WORKS).own()

    mode, low, high = at(0), at(-1), at(1)
    most_bytes = workload.parameter_bytes * max(fragment_shares(workload, words))
    return {
        "mode": words.mode,
        "mode_in_words": mode.words,
        "workers": row.workers,
        "after_step": rounds.synchronous if is_local else words.warm_steps,
        "step_s": mode.step_s,
        "step_low_s": low.step_s,
        "step_high_s": high.step_s,
        **{name: value for name, value in asdict(mode).items() if name in KEPT},
        # The time is a fragment's mean; the bytes are the largest fragment's.
        "average_s": row.exchange_s / words.fragments if is_local else None,
        "average_bytes": most_bytes if is_local else None,
    }


KEPT = ("images_per_s", "staleness", "dropped", "idle", "bytes_per_step")
