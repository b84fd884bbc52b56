"""The verdict on lost ranks, from what a rank receives, or does not, from its neighbours."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from firecaffe.cluster.links import Neighbour
from firecaffe.cluster.watch_message import RankProgress, Standing
from firecaffe.faults import Fault

BEATS = 4
"""Beats in `silent_s`, after which a silent rank is given up; at least one beat a second."""

SETTLE_S = 0.2
"""Seconds from the first lost rank to the verdict, as several may be lost at the same time."""


@dataclass(frozen=True)
class LossJudge:
    rank: int
    hosts: Sequence[str]
    """The name of each rank's host, by rank."""
    silent_s: float
    place: RankProgress
    neighbours: Mapping[int, Neighbour]

    @property
    def beat_s(self) -> float:
        return beat_s(self.silent_s)

    def lost(self, now: float) -> Fault | None:
        """Return the verdict on a rank that is gone or silent, if one is due."""
        gone_s = {r: n.gone_s for r, n in self.neighbours.items() if n.gone_s is not None}
        if gone_s and now - min(gone_s.values()) > SETTLE_S:
            return self.say("gone", min(gone_s), f"rank {self.rank}: its connection closed")
        silent_s = {r: now - n.last_seen_s for r, n in self.neighbours.items() if not n.has_left}
        # If this rank's own link is cut, all others fall silent within one beat, so wait for that.
        if max(silent_s.values(), default=0.0) > self.silent_s + 1.5 * self.beat_s:
            return self._silent([r for r, taken_s in silent_s.items() if taken_s > self.silent_s])
        return None

    def behind(self, now: float) -> Fault | None:
        """Return the fault of a silent rank, else of a rank that is behind this one, if any."""
        here = {
            rank: neighbour for rank, neighbour in self.neighbours.items() if not neighbour.has_left
        }
        silent = [
            rank
            for rank, neighbour in here.items()
            if now - neighbour.last_seen_s > 1.5 * self.beat_s
        ]
        if silent:
            return self._silent(silent)
        last = self.furthest_behind(without=self.rank)
        if last is None or (last.step, last.waits) >= (self.place.step, True):
            return None
        how = f"rank {self.rank}: others waited for it in vain"
        return Fault("stuck", last.rank, self.hosts[last.rank], last.step, how)

    def furthest_behind(self, without: int) -> Standing | None:
        """Return the rank furthest behind, except on the side of neighbour `without`."""
        known = [
            neighbour.furthest_behind
            for rank, neighbour in self.neighbours.items()
            if rank != without and neighbour.furthest_behind is not None and not neighbour.has_left
        ]
        if without != self.rank:  # otherwise this rank leaves itself out
            known.append(Standing(self.place.step, self.place.waits, self.rank))
        return min(known, default=None)

    def say(self, kind: str, rank: int, seen: str) -> Fault:
        """Return the fault of a linked rank, or of this rank."""
        # Beats are seconds old. But if ranks step together, none is in an earlier step.
        other = self.place if rank == self.rank else self.neighbours[rank].place
        return Fault(kind, rank, self.hosts[rank], max(self.place.step, other.step), seen)

    def _silent(self, silent: Sequence[int]) -> Fault:
        # A host that is alive and connected acknowledges every beat.
        too_long_s, linked = self.silent_s / 2, self.neighbours
        cut = [r for r in silent if linked[r].last_acknowledged_s() > too_long_s]
        elsewhere = {self.hosts[rank] for rank in linked} - {self.hosts[self.rank]}
        cut_hosts = {self.hosts[rank] for rank in cut}
        # If most other hosts are silent, this rank's own link is cut.
        if len(elsewhere) > 1 and 2 * len(cut_hosts) > len(elsewhere):
            how = f"itself: {len(cut_hosts)} of {len(elsewhere)} other hosts do not answer"
            return self.say("unreachable", self.rank, how)
        taken_s = time.monotonic() - min(linked[rank].last_seen_s for rank in silent)
        how = f"rank {self.rank}: silent for {taken_s:.0f} s"
        if cut:
            return self.say("unreachable", min(cut), f"{how}, and its host does not answer")
        return self.say("frozen", min(silent), f"{how}, while its host answers")


def beat_s(silent_s: float) -> float:
    """Return seconds between two beats; a rank silent for `silent_s` is given up."""
    return min(1.0, silent_s / BEATS)
