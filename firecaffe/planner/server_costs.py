"""Prices where a server's weights are kept; see `training.served.keeper`."""

from dataclasses import dataclass
from typing import Protocol

from firecaffe.planner.served_clock import Costs
from firecaffe.synchrony.config import SHARDED, SynchronyConfig


class PlannedKeeper(Protocol):
    @property
    def part(self) -> float:
        """The share of what a worker sends and receives that leaves it."""

    def said(self, codec: str) -> str:
        """Words after the mode's name. codec: of gradients; empty without one."""

    @property
    def messages(self) -> int:
        """Messages of a pull or a push."""

    def costs(self, pull_s: float, push_s: float, take_s: float) -> Costs:
        """Costs for the simulated clock. take_s: the server's time for a gradient."""

    def beside_s(self, coded_s: float, update_s: float) -> float:
        """Seconds that a worker spends on its gradient. coded_s: to encode it."""


@dataclass(frozen=True)
class AtFirst:
    size: int

    @property
    def part(self) -> float:
        return 1.0

    @property
    def messages(self) -> int:
        return 1

    def said(self, codec: str) -> str:
        return f", {codec}" if codec else ""

    def costs(self, pull_s: float, push_s: float, take_s: float) -> Costs:
        return Costs(pull_s, push_s, take_s, self.size)

    def beside_s(self, coded_s: float, update_s: float) -> float:
        return coded_s


@dataclass(frozen=True)
class InShards(AtFirst):
    @property
    def part(self) -> float:
        return (self.size - 1) / self.size

    @property
    def messages(self) -> int:
        return self.size - 1

    def said(self, codec: str) -> str:
        return ", sharded" + super().said(codec)

    def costs(self, pull_s: float, push_s: float, take_s: float) -> Costs:
        return Costs(pull_s, push_s, take_s, self.size, is_sharded=True)


@dataclass(frozen=True)
class Lockless(AtFirst):
    """All workers write to weights in shared memory, so nothing travels."""

    @property
    def part(self) -> float:
        return 0.0

    def said(self, codec: str) -> str:
        return ", no lock"

    def costs(self, pull_s: float, push_s: float, take_s: float) -> Costs:
        return Costs(workers=self.size)

    def beside_s(self, coded_s: float, update_s: float) -> float:
        return update_s


def planned_keeper(words: SynchronyConfig, size: int) -> PlannedKeeper:
    if words.is_lockless:
        return Lockless(size)
    return InShards(size) if words.server == SHARDED and size > 1 else AtFirst(size)
