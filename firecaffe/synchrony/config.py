"""The recipe's [synchrony] section: when workers exchange, and who computes what."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from firecaffe.errors import RecipeError
from firecaffe.value_checks import MAX_STEPS, check_choice, check_limits

EVERY_STEP, BACKUP, STALE, ASYNCHRONOUS = "every_step", "backup", "stale", "asynchronous"
LOCAL = "local"

EQUAL: Literal["equal"] = "equal"
MEASURED: Literal["measured"] = "measured"

FIRST: Literal["first"] = "first"
SHARDED: Literal["sharded"] = "sharded"

BY_SERVER: Literal["server"] = "server"
NO_LOCK: Literal["none"] = "none"

MODES = {
    EVERY_STEP: "all micro-batches of a step are added, then comes one update",
    BACKUP: "the first micro-batches of a step count, those of the slowest learners are dropped",
    STALE: "a server updates as gradients arrive; no learner gets many steps ahead of another",
    ASYNCHRONOUS: "a server updates as gradients arrive",
    LOCAL: "replicas train by themselves, and are averaged every so many steps",
}

SERVED = (BACKUP, STALE, ASYNCHRONOUS)
"""The modes with a server, in which the order of arrival decides bits."""

LIMITS: dict[str, tuple[float, float]] = {
    "shares_every": (1, MAX_STEPS),
    "in_flight": (1, 4),
    "learners": (1, 4096),  # each may hold a version of the weights of its own
    "backup_workers": (0, 4095),
    "max_staleness": (0, MAX_STEPS),
    "gradients_per_update": (1, 4096),
    "warm_steps": (0, MAX_STEPS),
    "spread": (0.01, 10),  # below this, use constant; above, nearly all times are 0
    "replicas": (1, 4096),
    "local_steps": (1, MAX_STEPS),
    "growth_coefficient": (0, inf),
    "overlap_steps": (0, MAX_STEPS),
    "fragments": (1, 4096),
    "outer_lr": (-1, inf),
    "outer_momentum": (-1, 1),
    "warm_epochs": (0, MAX_STEPS),
    "slow_factor": (1, 1000),  # a slower learner delivers nothing in most trainings
}


@dataclass(frozen=True)
class SynchronyConfig:
    """When workers exchange, and who computes what.

    Args:
        mode: every_step, backup, stale, asynchronous or local (docs/explanation/synchrony.md).
        shares: How many micro-batches of a step each worker computes: equal, or measured, as many
            as it computes in the same time as the others. The result is the same.
        shares_every: Steps between two decisions about measured shares.
        in_flight: Micro-batches that a worker of the real clock has at once: with 2, one is
            computed while another's weights or gradient travel, and gradients are later.
        server: Who holds the weights under the real clock: first (rank 0) or sharded (each rank a
            part, so that no rank's port carries all). A replay gives the bits of both.
        lock: What keeps updates apart (asynchronous): server (it makes one after the other) or none
            (Hogwild: the workers of one host write to the same weights, and nothing is replayed).
        learners: Workers of the simulated clock. Each takes one micro-batch at a time from a queue.
        backup_workers: Micro-batches of a step that are dropped: the last ones (backup).
        dropped: What happens to dropped micro-batches: forget, or again (others compute them for a
            later update).
        max_staleness: Steps by which a micro-batch may be ahead of the oldest unfinished (stale).
        gradients_per_update: Gradients of micro-batches whose mean makes an update (asynchronous).
        staleness_rate: Factor for gradients of staleness τ: none (1) or inverse (1 / τ, 1 for τ =
            0).
        compensate: Correction of a late gradient: none, delay (DC-ASGD-a) or gap (gap-aware).
        server_momentum: each (momentum in each update) or delayed_nesterov (once in as many updates
            as use a gradient of each learner).
        warm_steps: Steps at the beginning in which all micro-batches are added, as in every_step.
        clock: real, or simulated: one process, in which learners take the time that `speeds` says
            (in modes with a server).
        speeds: Time of a learner's micro-batch: constant, gamma (random), one_slow (learner 0 is
            slower) or measured (drawn from the times of a run).
        speeds_from: File of a run's timings, RUN/timings/rank-R.jsonl (measured).
        spread: Standard deviation of the time, as a share of its mean (gamma).
        slow_factor: How many times as long the slow learner takes (one_slow).
        replicas: Copies of the network that train by themselves (local), each on its share of the
            micro-batches of every step. Workers divide the replicas among themselves.
        local_steps: Steps of a replica between two averages (local).
        growth_coefficient: By the quadratic synchronization rule, max(local_steps,
            floor((growth_coefficient / rate)^2)) steps between two averages; 0: local_steps.
        warm_epochs: Epochs at the beginning that are computed as in every_step (local).
        warm_until_drop: Compute as in every_step until the first drop of the rate (local).
        outer: What an average does to the weights (local): average (they become it), slowmo or
            nesterov (a step towards it, with momentum).
        outer_lr: The outer rate (-1: the default, 1 with slowmo, 0.7 with nesterov).
        outer_momentum: The outer momentum (-1: the default, 0.5 with slowmo, 0.9 with nesterov).
        inner_momentum: What happens to the replicas' optimizer state at an average: keep (each
            keeps its own), zero (it is reset) or average (local).
        overlap_steps: Steps that replicas compute while their average is under way; 0: they wait.
        fragments: Parts of the parameters that are averaged one after the other, each every
            local_steps steps, so that an average has as many times fewer bytes (local).
    """

    mode: str = EVERY_STEP
    shares: Literal["equal", "measured"] = EQUAL
    shares_every: int = 10
    in_flight: int = 1
    server: Literal["first", "sharded"] = FIRST
    lock: Literal["server", "none"] = BY_SERVER
    learners: int = 4
    backup_workers: int = 1
    dropped: Literal["forget", "again"] = "forget"
    max_staleness: int = 4
    gradients_per_update: int = 1
    staleness_rate: Literal["none", "inverse"] = "none"
    compensate: Literal["none", "delay", "gap"] = "none"
    server_momentum: Literal["each", "delayed_nesterov"] = "each"
    warm_steps: int = 0
    clock: Literal["real", "simulated"] = "real"
    speeds: Literal["constant", "gamma", "one_slow", "measured"] = "constant"
    speeds_from: str = ""
    spread: float = 0.1
    slow_factor: float = 2.0
    replicas: int = 4
    local_steps: int = 8
    growth_coefficient: float = 0.0
    warm_epochs: int = 0
    warm_until_drop: bool = False
    outer: Literal["average", "slowmo", "nesterov"] = "average"
    outer_lr: float = -1.0
    outer_momentum: float = -1.0
    inner_momentum: Literal["keep", "zero", "average"] = "keep"
    overlap_steps: int = 0
    fragments: int = 1

    @property
    def is_served(self) -> bool:
        """Whether a server decides on each gradient as it arrives."""
        return self.mode in SERVED

    @property
    def is_lockless(self) -> bool:
        """Whether workers write to the same weights without waiting for each other."""
        return self.mode == ASYNCHRONOUS and self.lock == NO_LOCK and self.clock == "real"

    @property
    def depends_on_last_step(self) -> bool:
        """Whether steps before the last one depend on how long the training is."""
        is_uneven = self.overlap_steps or self.growth_coefficient or self.fragments > 1
        return self.is_served or (self.mode == LOCAL and bool(is_uneven))

    @property
    def measures_shares(self) -> bool:
        """Whether workers get unequal shares of a step, by measured times."""
        return self.mode == EVERY_STEP and self.shares == MEASURED

    @property
    def keeper(self) -> str:
        """Who keeps a server's weights: first, sharded, or none if nobody locks them."""
        if self.is_lockless:
            return NO_LOCK
        return self.server if self.clock == "real" else FIRST

    @property
    def has_real_server(self) -> bool:
        """Whether a server receives gradients from other processes as they arrive."""
        return self.is_served and self.clock == "real"

    @property
    def is_simulated(self) -> bool:
        """Whether one process computes for all learners."""
        return self.is_served and self.clock == "simulated"

    @property
    def goes_on_without_workers(self) -> bool:
        """Whether the run goes on if a worker is lost."""
        return self.has_real_server and self.server == FIRST

    def delayed_updates(self, learners: int) -> int:
        """Return the number of updates over which momentum is delayed; 0 if it is not."""
        is_late = self.mode in (STALE, ASYNCHRONOUS)
        if not is_late or self.server_momentum == "each":
            return 0
        return max(1, learners // self.gradients_per_update)

    def num_learners(self, world_size: int) -> int:
        """Return the number of learners at the beginning, for a number of workers."""
        return self.learners if self.clock == "simulated" else world_size * self.in_flight


def check_synchrony(config: SynchronyConfig) -> None:
    check_choice("synchrony.mode", config.mode, MODES)
    check_limits("synchrony", config, LIMITS)
    if config.mode == LOCAL:
        _check_outer(config)


def _check_outer(config: SynchronyConfig) -> None:
    if config.outer_lr <= 0 and config.outer_lr != -1:
        raise RecipeError(f"synchrony.outer_lr is {config.outer_lr:g}; it must be above 0, or -1")
    if not 0 <= config.outer_momentum < 1 and config.outer_momentum != -1:
        raise RecipeError(
            f"synchrony.outer_momentum is {config.outer_momentum:g}; it must be from 0 up to, not "
            "including, 1, or -1"
        )


def learner_count_problem(config: SynchronyConfig, learners: int, told: str) -> str:
    """Return why a server mode cannot have so many learners (`told`, for people), or ""."""
    if config.mode == BACKUP and config.backup_workers >= learners:
        return (
            f"synchrony.backup_workers is {config.backup_workers}; it must be less than {told}, so "
            "that some gradient counts"
        )
    if config.mode == ASYNCHRONOUS and config.gradients_per_update > learners:
        return (
            f"synchrony.gradients_per_update is {config.gradients_per_update}; it must be at most "
            f"{told}"
        )
    return ""
