"""Who keeps a server's weights, as it is priced; see `training.served.keeper`."""

from dataclasses import dataclass
from typing import Protocol

from firecaffe.synchrony.clock import Costs
from firecaffe.synchrony.config import SHARDED, SynchronyConfig


class PlannedKeeper(Protocol):
    """What a gradient costs that goes to a server."""

    @property
    def part(self) -> float:
        """The share of what a worker sends and gets that leaves it."""

    def said(self, codec: str) -> str:
        """For people, behind the mode. codec: of gradients; empty without one."""

    def costs(self, pull_s: float, push_s: float, take_s: float) -> Costs:
        """take_s: the server's time for a gradient."""

    def beside_s(self, coded_s: float, update_s: float) -> float:
        """What a worker does for its own gradient. coded_s: to encode it."""

    def is_sent(self, learner: int) -> bool:
        """Whether a learner's gradients leave its worker."""


@dataclass(frozen=True)
class AtFirst:
    """Rank 0 keeps all of them."""

    size: int

    @property
    def part(self) -> float:
        return 1.0

    def said(self, codec: str) -> str:
        return f", {codec}" if codec else ""

    def costs(self, pull_s: float, push_s: float, take_s: float) -> Costs:
        return Costs(pull_s, push_s, take_s, self.size)

    def beside_s(self, coded_s: float, update_s: float) -> float:
        return coded_s

    def is_sent(self, learner: int) -> bool:
        return learner % self.size > 0


@dataclass(frozen=True)
class InShards(AtFirst):
    """Each rank keeps a part."""

    @property
    def part(self) -> float:
        return (self.size - 1) / self.size

    def said(self, codec: str) -> str:
        return ", sharded" + super().said(codec)

    def costs(self, pull_s: float, push_s: float, take_s: float) -> Costs:
        return Costs(pull_s, push_s, take_s, self.size, is_sharded=True)

    def is_sent(self, learner: int) -> bool:
        return True


@dataclass(frozen=True)
class Lockless(AtFirst):
    """They lie in memory to which each worker writes: nothing travels."""

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
    """That of a mode with a server, on so many workers."""
    if words.is_lockless:
        return Lockless(size)
    return InShards(size) if words.server == SHARDED and size > 1 else AtFirst(size)
