"""The ports that a message between two ranks uses, and the link between them.

Rank r is on device r, and devices fill the innermost groups first, as launchers number ranks. Two
ranks meet at the innermost link that joins them; device i of a group uses port i mod ports there.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from firecaffe.planner.cluster import Link

Port = tuple[int, str, int, int]
"""(number of the link, "out" or "in", group, number in the group)."""


@dataclass(frozen=True)
class Network:
    links: tuple[Link, ...]
    world_size: int

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The number of devices in the groups that each link joins."""
        return (1, *(link.group for link in self.links[:-1]))

    @cached_property
    def fills_groups(self) -> bool:
        """Whether every group that is used has all its ranks."""
        return all(self.world_size % devices == 0 for devices in self.inner)

    def level(self, first: int, second: int) -> int:
        """The number of the innermost link that joins two ranks."""
        for number, link in enumerate(self.links):
            if not link.group or first // link.group == second // link.group:
                return number
        raise AssertionError("the last link joins all")

    def link(self, first: int, second: int) -> Link:
        return self.links[self.level(first, second)]

    def agreement_s(self, ranks: int) -> float:
        """Seconds in which so many ranks, from the first on, tell each other a few numbers.

        Their messages go round a ring, as those of Gloo's all-gather.
        """
        return (ranks - 1) * self.link(0, ranks - 1).latency_s if ranks > 1 else 0.0

    def ports(self, source: int, destination: int) -> tuple[Port, Port]:
        level = self.level(source, destination)
        inner, count = self.inner[level], self.links[level].ports
        out = level, "out", source // inner, source % inner % count
        into = level, "in", destination // inner, destination % inner % count
        return out, into

    def strided(self, stride: int) -> "Network":
        """The network as one of `stride` sets of every stride-th rank sees it, if all exchange.

        Each rank stands for `stride` ranks. Raises: ValueError if they neither fill nor divide
        groups.
        """
        if stride == 1:
            return self
        links = []
        for link, inner in zip(self.links, self.inner, strict=True):
            if link.group and max(link.group, stride) % min(link.group, stride):
                raise ValueError(f"{stride} ranks in a row, and {link.name} joins {link.group}")
            if link.group and link.group <= stride:
                continue  # it joins no two ranks of one set
            sharing = min(inner, stride)
            times = max(1, sharing // link.ports)
            links.append(
                replace(
                    link,
                    group=link.group // stride,
                    ports=max(1, link.ports // sharing) if inner > stride else 1,
                    latency_s=link.latency_s * times,
                    bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times,
                    memory_bytes_per_s=0.0,
                )
            )
        return Network(tuple(links), self.world_size // stride)
