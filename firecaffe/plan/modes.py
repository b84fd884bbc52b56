"""What each mode of synchrony makes of a training's rate, if workers are not equally fast.

All modes are given the same workers: worker w takes the same time for its n-th micro-batch in each
of them, drawn from the recipe's speeds. The modes with a server are run by their own policies under
the simulated clock, with the cluster's prices: weights and gradients go through the server's port,
one after the other, or by parts through all workers' ports, and each update takes the server's
time. Gradients are encoded if the forecast's compressor can be had with a server. The synchronous
modes wait for the slowest worker of each step, or of each round of local steps.

A forecast of rates alone: what late gradients cost in accuracy is in no formula here.

A run's forecast in another mode of synchrony than every_step: by the functions of `plan.modes`.

The ends of its band are those of computing and of links together, as in a synchronous forecast.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any

from firecaffe.exchange.leaves import Shares, equal_shares, num_nodes
from firecaffe.gradients.compressors import ONE_BY_ONE
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.plan.cluster import Cluster
from firecaffe.plan.codec import half_coded_s, sent_share
from firecaffe.plan.compute import data_s, micro_batch, update_s
from firecaffe.plan.forecast import Forecast, errors_of
from firecaffe.plan.network import Network
from firecaffe.plan.server_costs import PlannedKeeper, planned_keeper
from firecaffe.plan.workload import Workload
from firecaffe.synchrony.clock import Seconds, SimulatedClock, seconds_of
from firecaffe.synchrony.config import (
    ASYNCHRONOUS,
    BACKUP,
    EVERY_STEP,
    LOCAL,
    MEASURED,
    STALE,
    SynchronyConfig,
)
from firecaffe.synchrony.events import Event, Pull, Push
from firecaffe.synchrony.leaves import Leaves
from firecaffe.synchrony.policies import make_policy
from firecaffe.synchrony.rounds import Rounds, cut_fragments
from firecaffe.synchrony.shares import balanced_shares
from firecaffe.synchrony.tally import Tally

STEPS = 200
"""Steps that are simulated, at most."""

MOST_WORKS = 50_000
"""Micro-batches that are simulated, at most."""

MOST_OWN_WORKS = 5_000
"""The same for a run that is to begin, whose ranks wait for it."""

SEED = 0


@dataclass(frozen=True)
class Mode:
    """One mode's row."""

    words: str
    """The mode, and its number."""
    step_s: float
    """Seconds in which as many samples are done as a step has."""
    images_per_s: float
    gain: float
    """Times the rate of every_step with equal shares."""
    staleness: float = 0.0
    """Updates that a gradient is late by, the mean."""
    dropped: float = 0.0
    """The share of samples that are given up."""
    idle: float = 0.0
    """The share of a worker's time in which it does not compute, the mean over workers."""
    bytes_per_step: float = 0.0
    """What goes to the server, or its parts, and from there; of the other modes the gradients of
    one worker. As they are encoded."""
    synchrony: Mapping[str, Any] = field(default_factory=dict)
    """The words of [synchrony] by which a recipe has it."""


def modes_of(
    workload: Workload, cluster: Cluster, row: Forecast, words: SynchronyConfig
) -> list[Mode]:
    """The modes on as many workers as a forecast of the synchronous step has, at the numbers that
    the recipe gives them. Raises: RecipeError if the file of its measured speeds cannot be read.
    """
    return list(_Workers(workload, cluster, row, words).modes())


def own_mode(
    workload: Workload,
    cluster: Cluster,
    row: Forecast,
    words: SynchronyConfig,
    compute: float = 1.0,
    exchange: float = 1.0,
) -> Mode:
    """The mode of the recipe alone, which is not every_step. Its gain is not told.

    compute, exchange: factors on what is taken for them.
    """
    works = MOST_OWN_WORKS
    return _Workers(workload, cluster, row, words, compute, exchange, most_works=works).own()


def alternatives(
    workload: Workload,
    cluster: Cluster,
    row: Forecast,
    words: SynchronyConfig,
    seconds: Sequence[float],
) -> list[Mode]:
    """The mode of the recipe, which is not every_step; then it with two micro-batches in flight, if
    it has one, and all other modes. Gains are over the recipe's.

    seconds: what each worker takes for a micro-batch.
    """
    workers = _Workers(workload, cluster, row, words, seconds=seconds)
    own = workers.own()
    others = [each for each in workers.modes() if each.words != own.words]
    if words.is_served and words.in_flight == 1:
        twice = replace(words, in_flight=2)
        found = _Workers(workload, cluster, row, twice, seconds=seconds).own()
        name = f"{own.words} with in_flight 2"
        others.insert(0, replace(found, words=name, synchrony={**found.synchrony, "in_flight": 2}))
    return [replace(each, gain=each.images_per_s / own.images_per_s) for each in (own, *others)]


def fragment_shares(workload: Workload, words: SynchronyConfig) -> list[float]:
    """The share of the parameters' bytes that is averaged with each fragment.

    Raises: RecipeError if there are fewer parameters than fragments.
    """
    sizes = workload.tensors_bytes
    cut = cut_fragments(sizes, words.fragments)
    return [sum(sizes[place] for place in places) / sum(sizes) for places in cut]


def hidden_s(workload: Workload, cluster: Cluster) -> float:
    """Seconds of the last micro-batch's backward, beside which gradients travel."""
    return sum(micro_batch(workload, cluster.device, workload.micro_batch_size).backward_s)


class _Workers:
    """The workers of a forecast, and what all modes take from it."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        row: Forecast,
        words: SynchronyConfig,
        compute: float = 1.0,
        exchange: float = 1.0,
        seconds: Sequence[float] | None = None,
        most_works: int = MOST_WORKS,
    ) -> None:
        """seconds: what each takes for a micro-batch, if that was measured. most_works: that are
        simulated.
        """
        self.workload, self.row, self.size = workload, row, row.workers
        self.leaves = workload.num_micro_batches
        device = cluster.device
        own_s = micro_batch(workload, device, workload.micro_batch_size).compute_s
        self.leaf_s = compute * (own_s + data_s(workload, device))
        self.update_s = compute * update_s(workload, device)
        self.exchange_s = exchange * row.exchange_s
        if words.speeds == "constant" and device.jitter > 0:
            words = replace(words, speeds="gamma", spread=device.jitter)
        self.words = replace(words, clock="real")
        self.took = self._scaled(seconds_of(self.words, SEED))
        if seconds is not None:
            self.took = lambda learner, _: seconds[learner % self.size]
        self.steps = max(1, min(STEPS, most_works // self.leaves))
        network = Network(cluster.links, self.size)
        outermost = network.links[network.level(0, self.size - 1)]
        self.codec = row.compressor if row.compressor in ONE_BY_ONE else ""
        self.pushed_bytes = float(workload.parameter_bytes)
        self.half_coded_s = 0.0
        if self.codec:
            self.pushed_bytes *= sent_share(self.codec, workload)
            rate = device.memory_bytes_per_s * device.efficiency
            self.half_coded_s = compute * half_coded_s(workload.parameter_bytes, rate)

        def sent_s(size_bytes: float) -> float:
            one_s = outermost.latency_s + size_bytes / outermost.bandwidth_bytes_per_s
            return exchange * one_s if self.size > 1 else 0.0

        self.pull_s, self.push_s = sent_s(workload.parameter_bytes), sent_s(self.pushed_bytes)

    def _scaled(self, seconds: Seconds) -> Seconds:
        """Times in seconds. A learner's are those of its worker."""
        unit = 1.0 if self.words.speeds == "measured" else self.leaf_s
        return lambda learner, count: unit * seconds(learner % self.size, count)

    def modes(self) -> Iterator[Mode]:
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

    def own(self) -> Mode:
        return self._served(self.words.mode) if self.words.is_served else self._local()

    def _words(self, name: str, keeper: PlannedKeeper) -> str:
        """A mode with a server, its number, who keeps the weights, and the codec."""
        words, found = self.words, name
        if name == BACKUP:
            backups = words.backup_workers
            again = ", again" if words.dropped == "again" else ""
            found = f"backup, {words.num_learners(self.size) - backups} + {backups}{again}"
        elif name == STALE:
            found = f"stale, s = {words.max_staleness}"
        return found + keeper.said(self.codec)

    def _mean_s(self, rank: int) -> float:
        count = self.steps * self.leaves // self.size
        return sum(self.took(rank, each) for each in range(count)) / count

    def _synchronous(self, words: str, shares: Shares, base: Mode | None = None) -> Mode:
        """Each step waits for its slowest worker."""
        slowest_s, computed_s = self._rounds(shares, 1)
        step_s = slowest_s + self.row.exposed_communication_s + self.row.update_s
        return self._mode(
            EVERY_STEP, words, base, step_s, computed_s, self._gradient_bytes(self.leaves)
        )

    def _local(self, base: Mode | None = None) -> Mode:
        """Each average waits for its slowest worker, and for what of its exchange, a part of that
        of all parameters, is not over when it is to be applied.
        """
        steps, beside = self.words.local_steps, self.words.overlap_steps
        fragments = self.words.fragments
        slowest_s, computed_s = self._rounds(self._hosted(), max(1, steps // fragments))
        own_s = slowest_s + self.update_s * ceil(self.words.replicas / self.size)
        shares = fragment_shares(self.workload, self.words)
        waits_s = sum(max(0.0, each * self.exchange_s - beside * own_s) for each in shares)
        words = f"local, H = {steps}" + f", {fragments} fragments" * (fragments > 1)
        words += f", {beside} steps beside" * bool(beside)
        sent = self._gradient_bytes(self.words.replicas) / steps
        return self._mode(LOCAL, words, base, own_s + waits_s / steps, computed_s, sent)

    def _gradient_bytes(self, leaves: int) -> float:
        """What a worker's gradients are on the wire, of a tree over so many leaves. Without a codec
        they are one sum; a codec encodes each node of its level.
        """
        workload = self.workload
        if self.row.compressor == NO_COMPRESSOR:
            return workload.parameter_bytes
        nodes = num_nodes(leaves, workload.compressor_level)
        share = sent_share(self.row.compressor, workload)
        return ceil(nodes / self.size) * share * workload.parameter_bytes

    def _hosted(self) -> Shares:
        """The micro-batches of each worker's replicas; equal ones if these do not fit, as in a
        recipe of another mode.
        """
        replicas = self.words.replicas
        if replicas < self.size or self.leaves % replicas:
            return equal_shares(self.leaves, self.size)
        each = self.leaves // replicas
        hosted = equal_shares(replicas, self.size)
        return tuple(range(share.start * each, share.stop * each) for share in hosted)

    def _rounds(self, shares: Shares, steps: int) -> tuple[float, float]:
        """Rounds of so many steps, at whose ends all wait for the slowest: seconds of a step, and
        what of them a worker computes, the mean.
        """
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

    def _served(self, name: str, base: Mode | None = None) -> Mode:
        """A policy, by its events."""
        config = replace(self.words, mode=name)
        plan = Leaves(0, self.steps, self.steps, self.leaves, self.leaves * self.steps)
        policy = make_policy(config, plan, config.num_learners(self.size))
        per_update = config.gradients_per_update if name == ASYNCHRONOUS else 1
        per_update = self.leaves - config.backup_workers if name == BACKUP else per_update
        keeper = planned_keeper(config, self.size)
        take_s = self.update_s / per_update + self.half_coded_s
        costs = keeper.costs(self.pull_s, self.push_s, take_s)
        beside_s = keeper.beside_s(self.half_coded_s, self.update_s)
        computed: list[float] = []

        def seconds(learner: int, count: int) -> float:
            computed.append(self.took(learner, count) + beside_s)
            return computed[-1]

        clock, tally, sent_bytes = SimulatedClock(policy, seconds, costs), Tally(), 0.0
        for event in _events(clock):
            tally.take(event)
            if isinstance(event, Pull | Push) and keeper.is_sent(event.work.learner):
                is_push = isinstance(event, Push)
                sent_bytes += self.pushed_bytes if is_push else self.workload.parameter_bytes
        computed_s = sum(computed) / self.size / self.steps
        moved = sent_bytes * keeper.part / self.steps
        step_s = tally.time_s / self.steps
        late = tally.mean_staleness
        dropped = tally.dropped / (self.steps * self.leaves)
        words = self._words(name, keeper)
        return self._mode(name, words, base, step_s, computed_s, moved, late, dropped)

    def _mode(
        self,
        mode: str,
        words: str,
        base: Mode | None,
        step_s: float,
        computed_s: float,
        moved: float,
        staleness: float = 0.0,
        dropped: float = 0.0,
    ) -> Mode:
        """computed_s: of a worker in the time of a step, the mean."""
        rate = (1 - dropped) * self.workload.global_batch_size / step_s
        gain = 1.0 if base is None else rate / base.images_per_s
        idle = max(0.0, 1 - computed_s / step_s)
        return Mode(words, step_s, rate, gain, staleness, dropped, idle, moved, {"mode": mode})


def _events(clock: SimulatedClock) -> Iterator[Event]:
    with suppress(IndexError):  # all leaves are done
        while True:
            yield clock.next()


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
