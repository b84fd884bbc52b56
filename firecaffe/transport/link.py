"""The link between two ranks, measured: latency by ping-pong, bandwidth by a stream one way."""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost

PING_BYTES = 8
PINGS = 100
IN_FLIGHT = 4
"""Messages of a stream under way at once: the link is never idle between two of them."""
FIRST_STREAM_BYTES = 2**16
MOST_MESSAGE_BYTES = 2**22
LEAST_STREAM_S = 0.2
"""Seconds of a stream at least: a shaped link lets its first 100 kB or so pass unshaped."""
STREAMS = 5
MOST_GROWTH = 4.0
"""Times as long as the last one is a stream at most: what a shaped link let pass said too much."""


@dataclass(frozen=True)
class Link:
    """What one message costs between two ranks: latency_s + bytes / bandwidth_bytes_per_s."""

    first: int
    second: int
    latency_samples_s: tuple[float, ...]
    bandwidth_samples_bytes_per_s: tuple[float, ...]

    @property
    def latency_s(self) -> float:
        """α: half a round trip of 8 bytes; of all samples, a tenth are quicker. The median would be
        that of a busy host: what else its processors do makes a round trip longer, never shorter.
        """
        return sorted(self.latency_samples_s)[len(self.latency_samples_s) // 10]

    @property
    def latency_ratio(self) -> float:
        """The median of the samples over `latency_s`: far above 1 if the processors were busy."""
        return statistics.median(self.latency_samples_s) / self.latency_s

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """1/β: median over streams from the first rank to the second."""
        return statistics.median(self.bandwidth_samples_bytes_per_s)


def measure_link(
    world: Group,
    first: int,
    second: int,
    least_stream_s: float = LEAST_STREAM_S,
    most_s: float = inf,
) -> Link:
    """Measures the link between two ranks through the exchange's own process group.

    All ranks call this and get the first rank's figures; those that are neither end only wait.
    most_s: after so long it makes do with the samples that it has.

    Raises: PeerLostError.
    """
    group, found = world.exchange_group, ""
    if group is None or first == second:
        raise ValueError(f"a link has two ends; these are rank {first} and rank {second}")
    if world.rank in (first, second):
        starts = world.rank == first
        peer = second if starts else first
        with peers_may_be_lost(world):
            half_s = most_s / 2
            latencies = latency_samples_s(group, peer, starts, world.device, most_s=half_s)
            streams = bandwidth_samples_bytes_per_s(
                group, peer, starts, world.device, least_stream_s, most_s=half_s
            )
        found = json.dumps(asdict(Link(first, second, tuple(latencies), tuple(streams))))
    stated = json.loads(gather_text(world, found)[first])
    return Link(
        stated["first"],
        stated["second"],
        tuple(stated["latency_samples_s"]),
        tuple(stated["bandwidth_samples_bytes_per_s"]),
    )


def latency_samples_s(
    group: ProcessGroup,
    peer: int,
    starts: bool,
    device: torch.device,
    pings: int = PINGS,
    most_s: float = inf,
) -> list[float]:
    """Measures half the time of each round trip of 8 bytes, after as many again to warm up; fewer
    if they take longer than `most_s` together.

    Both ranks call this, one of them with `starts`; only that one gets samples.
    """
    ball = torch.zeros(PING_BYTES, dtype=torch.uint8, device=device)
    if not starts:
        is_last = False
        while not is_last:
            dist.recv(ball, group_src=peer, group=group)
            is_last = bool(ball[0])
            dist.send(ball, group_dst=peer, group=group)
        return []
    samples = list[float]()
    begin_s = time.perf_counter()
    while not ball[0]:
        start_s = time.perf_counter()
        if len(samples) + 1 >= 2 * pings or (samples and start_s - begin_s >= most_s):
            ball.fill_(1)
        dist.send(ball, group_dst=peer, group=group)
        dist.recv(ball, group_src=peer, group=group)
        finish(device)
        samples.append((time.perf_counter() - start_s) / 2)
    return samples[len(samples) // 2 :]


def bandwidth_samples_bytes_per_s(
    group: ProcessGroup,
    peer: int,
    sends: bool,
    device: torch.device,
    least_s: float = LEAST_STREAM_S,
    streams: int = STREAMS,
    most_s: float = inf,
) -> list[float]:
    """Measures bytes per second of each stream, from its first byte until the receiver confirms the
    last.

    Both ranks call this, one of them with `sends`; only that one gets samples. Streams grow until
    one takes `least_s` seconds; the shorter ones warm up and are not counted. After `most_s` the
    next one that is long enough is the last.
    """
    samples: list[float] = []
    if not sends:
        while stream_bytes := _receive_number(group, peer, device):
            _stream(group, peer, False, stream_bytes, device)
        return samples
    stream_bytes = FIRST_STREAM_BYTES
    begin_s = time.perf_counter()
    while len(samples) < streams:
        if samples and time.perf_counter() - begin_s >= most_s:
            break
        _send_number(stream_bytes, group, peer, device)
        taken_s = _stream(group, peer, True, stream_bytes, device)
        if taken_s >= least_s or samples:
            samples.append(stream_bytes / taken_s)
        else:
            growth = min(MOST_GROWTH, max(2.0, 1.25 * least_s / taken_s))
            stream_bytes = round(stream_bytes * growth)
    _send_number(0, group, peer, device)
    return samples


def finish(device: torch.device) -> None:
    """Waits until the device has finished its work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _stream(
    group: ProcessGroup, peer: int, sends: bool, stream_bytes: int, device: torch.device
) -> float:
    """Sends one stream; seconds from its first byte to the confirmation."""
    message_bytes = min(MOST_MESSAGE_BYTES, -(-stream_bytes // IN_FLIGHT))
    slots = torch.zeros(IN_FLIGHT, message_bytes, dtype=torch.uint8, device=device)
    confirmation = torch.zeros(PING_BYTES, dtype=torch.uint8, device=device)
    works: list[dist.Work | None] = [None] * IN_FLIGHT
    start_s = time.perf_counter()
    for number, begin in enumerate(range(0, stream_bytes, message_bytes)):
        slot = number % IN_FLIGHT
        _wait(works[slot])
        message: Tensor = slots[slot, : min(message_bytes, stream_bytes - begin)]
        works[slot] = (
            dist.isend(message, group_dst=peer, group=group)
            if sends
            else dist.irecv(message, group_src=peer, group=group)
        )
    for work in works:
        _wait(work)
    if sends:
        dist.recv(confirmation, group_src=peer, group=group)
    else:
        finish(device)
        dist.send(confirmation, group_dst=peer, group=group)
    finish(device)
    return time.perf_counter() - start_s


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _send_number(number: int, group: ProcessGroup, peer: int, device: torch.device) -> None:
    dist.send(torch.tensor([number], device=device), group_dst=peer, group=group)


def _receive_number(group: ProcessGroup, peer: int, device: torch.device) -> int:
    number = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(number, group_src=peer, group=group)
    return int(number)
