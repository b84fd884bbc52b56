"""`exchange.algorithm = "auto"`: one link is measured, and the fastest exchange by that is taken.

Nothing is chosen where there is nothing to choose: one worker, one host whose ranks add in shared
memory, a compressor or a hook that has a way of its own. That is said too, and tree is taken.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World
from firecaffe.exchange.choose import AUTO, choose
from firecaffe.exchange.leaves import shares_are_subtrees
from firecaffe.transport.link import measure_link

LEAST_STREAM_S = 0.05
"""Long beside what a shaped link lets pass unshaped, and 0.3 s in all for the five."""


SHARED_MEMORY = "shared memory, nothing goes between hosts"


@dataclass(frozen=True)
class AutoChoice:
    """What `auto` came to, the same on all ranks."""

    algorithm: str
    reason: str
    """For people, in one line."""
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    """None, as the latency, where no link was measured."""
    predicted_s: dict[str, float] | None = None
    """Of the exchanges that there were to choose from, for all buckets of a step."""


def choose_exchange(
    world: World,
    sizes_bytes: Sequence[int],
    num_leaves: int,
    *,
    shared_memory: bool,
    instead: str = "",
) -> AutoChoice:
    """What `auto` is in this world; all ranks call it and get rank 0's choice.

    sizes_bytes: of a step's buckets. shared_memory: whether ranks of one host may add in it.
    instead: what takes the gradients in place of an exchange, if anything does.

    Raises: PeerLostError.
    """
    reason = _nothing_to_choose(world, num_leaves, shared_memory, instead)
    # Every rank must come to the same answer before some of them measure.
    reason = gather_text(world, reason)[0]
    if reason:
        return AutoChoice("tree", f"tree ({reason})")
    link = measure_link(world, 0, rank_elsewhere(_places(world)), LEAST_STREAM_S)
    stated = ""
    if world.is_first:
        senders = num_senders(world, shared_memory)
        alpha_s, rate = link.latency_s, link.bandwidth_bytes_per_s
        found = choose(world.world_size, sizes_bytes, alpha_s, rate, senders)
        others = sorted(
            (seconds, name)
            for name, seconds in found.by_algorithm.items()
            if name != found.algorithm
        )
        predicted = "; ".join(f"{name} {seconds:.3g} s" for seconds, name in others)
        reason = (
            f"{found.algorithm} (α {alpha_s * 1e6:.0f} µs, {rate / 1e6:.1f} MB/s measured: "
            f"{found.predicted_s:.3g} s a step for {sum(sizes_bytes) / 1e6:.3g} MB; {predicted})"
        )
        chosen = AutoChoice(found.algorithm, reason, alpha_s, rate, found.by_algorithm)
        stated = json.dumps(asdict(chosen))
    return AutoChoice(**json.loads(gather_text(world, stated)[0]))


def rank_elsewhere(places: Sequence[object]) -> int:
    """The first rank that is not where rank 0 is; rank 1 where all are in one place."""
    return next((rank for rank, place in enumerate(places) if place != places[0]), 1)


def _places(world: World) -> list[str]:
    # torchrun numbers its agents; hosts that another launcher uses are told apart by name.
    own = [socket.gethostname(), os.environ.get("GROUP_RANK", "")]
    return gather_text(world, json.dumps(own))


def _nothing_to_choose(world: World, num_leaves: int, shared_memory: bool, instead: str) -> str:
    """Why there is no choice; empty where there is one."""
    if world.world_size == 1:
        return f"{AUTO}: one worker, nothing to send"
    if instead:
        return f"{AUTO}: {instead} takes the gradients"
    if not shares_are_subtrees(num_leaves, world.world_size):
        return f"{AUTO}: fold stands in for any exchange, since shares are no subtrees"
    return f"{AUTO}: {SHARED_MEMORY}" if num_senders(world, shared_memory) == 1 else ""


def num_senders(world: World, shared_memory: bool) -> int:
    """How many ranks send: one of each host where its ranks add in shared memory.

    As `transport.local.meet_local_ranks` and `transport.exchange.outer_algorithm` will have it.
    """
    size, ranks = world.local_world_size, world.world_size
    is_possible = shared_memory and world.device.type == "cpu" and sys.platform.startswith("linux")
    is_subtree = size == ranks or size & (size - 1) == 0
    return ranks // size if is_possible and ranks % size == 0 and is_subtree else ranks
