"""`exchange.algorithm = "auto"`: measures one link and chooses the exchange that is fastest on it.

If there is nothing to choose, nothing is measured, and tree is chosen. A link that was measured
within the last day is not measured again (`transport.link`).
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from firecaffe.cluster.agree import broadcast_text, gather_text
from firecaffe.cluster.group import Group
from firecaffe.exchange import AUTO
from firecaffe.exchange.route import CODEC, FOLD, HOOK, Route, choose
from firecaffe.transport.link import described, measure_link, recall, remember

MIN_STREAM_S = 0.05
"""Seconds of a stream: longer than the burst that a shaped link lets pass; five take 0.3 s."""

MAX_S = 1.0
"""Seconds after which the measurement stops, as it does for 10 Mbit/s or 50 ms."""

SHARED_MEMORY = "shared memory, nothing goes between hosts"

TAKEN_BY = {
    HOOK: "the communication hook takes the gradients",
    CODEC: "compressor {route.codec} takes the gradients",
    FOLD: "fold sums in its place, since {route.apart}",
}
"""The reasons why there is nothing to choose, by the way that gradients go."""


@dataclass(frozen=True)
class AutoChoice:
    algorithm: str
    reason: str
    """For people, in one line."""
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    """None, as is the latency, if no link was measured."""
    predicted_s: dict[str, float] | None = None
    """Seconds for all buckets of a step, by candidate."""


def choose_exchange(world: Group, sizes_bytes: Sequence[int], tree: Route) -> AutoChoice:
    """Choose the exchange; all ranks call it and get rank 0's choice. Raises: PeerLostError.

    sizes_bytes: of a step's buckets. tree: the route that tree would take.
    """
    reason = _nothing_to_choose(tree)
    # Every rank must come to the same answer before some of them measure.
    reason = broadcast_text(world, reason)
    if reason:
        return AutoChoice("tree", f"tree ({reason})")
    places = gather_text(world, described(world.device.type, _place()))
    stated = ""
    if world.is_first and (known := recall(places)) is not None:
        age = _age(time.time() - known.measured_at_s)
        measured = known.latency_s, known.bandwidth_bytes_per_s
        stated = _stated(world, sizes_bytes, tree, *measured, f"measured {age} ago")
    stated = broadcast_text(world, stated)
    if not stated:
        link = measure_link(world, 0, rank_elsewhere(places), MIN_STREAM_S, MAX_S)
        if world.is_first:
            measured = link.latency_s, link.bandwidth_bytes_per_s
            remember(places, *measured)
            stated = _stated(world, sizes_bytes, tree, *measured, "measured")
        stated = broadcast_text(world, stated)
    return AutoChoice(**json.loads(stated))


def _stated(
    world: Group,
    sizes_bytes: Sequence[int],
    tree: Route,
    latency_s: float,
    bandwidth_bytes_per_s: float,
    how: str,
) -> str:
    choice = choose(world.world_size, sizes_bytes, latency_s, bandwidth_bytes_per_s, tree.senders)
    others = sorted(
        (seconds, name) for name, seconds in choice.by_algorithm.items() if name != choice.algorithm
    )
    predicted = "; ".join(f"{name} {seconds:.3g} s" for seconds, name in others)
    reason = (
        f"{choice.algorithm} (α {latency_s * 1e6:.0f} µs, {bandwidth_bytes_per_s / 1e6:.1f} MB/s "
        f"{how}: {choice.predicted_s:.3g} s a step for {sum(sizes_bytes) / 1e6:.3g} MB; "
        f"{predicted})"
    )
    return json.dumps(
        asdict(
            AutoChoice(
                algorithm=choice.algorithm,
                reason=reason,
                latency_s=latency_s,
                bandwidth_bytes_per_s=bandwidth_bytes_per_s,
                predicted_s=choice.by_algorithm,
            )
        )
    )


def _age(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h" if hours else f"{minutes} min"


def rank_elsewhere(places: Sequence[object]) -> int:
    """Return the first rank in another place than rank 0; rank 1 if all are in one place."""
    return next((rank for rank, place in enumerate(places) if place != places[0]), 1)


def _place() -> tuple[str, str]:
    # torchrun numbers its agents; hosts that another launcher uses are told apart by name.
    return socket.gethostname(), os.environ.get("GROUP_RANK", "")


def _nothing_to_choose(tree: Route) -> str:
    if tree.world_size == 1:
        return f"{AUTO}: one worker, nothing to send"
    if tree.to_owners:
        return f"{AUTO}: fold brings shards to their owners"
    if tree.way in TAKEN_BY:
        return f"{AUTO}: {TAKEN_BY[tree.way].format(route=tree)}"
    return f"{AUTO}: {SHARED_MEMORY}" if tree.senders == 1 else ""
