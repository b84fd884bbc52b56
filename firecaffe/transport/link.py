"""The link between two ranks, measured: latency by ping-pong, bandwidth by a stream one way.

Links are remembered for a day in the user's cache folder, by hosts, interfaces, number of ranks and
device. If the file cannot be read or written, a link is measured again.
"""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Self

import psutil
import torch
import torch.distributed as dist
from msgspec import Meta
from torch import Tensor
from torch.distributed import ProcessGroup

from firecaffe.cluster.addresses import interface_of, own_addresses
from firecaffe.cluster.agree import gather_as
from firecaffe.cluster.group import Group
from firecaffe.cluster.groups import GLOO_INTERFACE
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.files import cache_folder, read_bytes, write_json
from firecaffe.schema import Count, decoded

PING_BYTES = 8
PINGS = 100
IN_FLIGHT = 4
"""Messages of a stream in flight: the link is never idle between two of them."""
FIRST_STREAM_BYTES = 2**16
MAX_MESSAGE_BYTES = 2**22
MIN_STREAM_S = 0.2
"""Least seconds of a stream: a shaped link lets its first 100 kB or so pass unshaped."""
STREAMS = 5
MAX_GROWTH = 4.0
"""Most growth from one stream to the next: unshaped bytes suggest too high a bandwidth."""


@dataclass(frozen=True)
class MeasuredLink:
    """The cost of a message between two ranks: latency_s + bytes / bandwidth_bytes_per_s."""

    first: int
    second: int
    latency_samples_s: tuple[float, ...]
    bandwidth_samples_bytes_per_s: tuple[float, ...]

    @property
    def latency_s(self) -> float:
        """α: half a round trip of 8 bytes, the 10th percentile of all samples."""
        # The median would include a host's other work, which makes a round trip longer, never
        # shorter.
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
    world: Group, first: int, second: int, least_stream_s: float = MIN_STREAM_S, most_s: float = inf
) -> MeasuredLink:
    """Measure a link in the exchange's group; all ranks call it. Raises: PeerLostError."""
    measured = list[MeasuredLink]()
    if world.exchange_group is None or first == second:
        raise ValueError(f"a link has two ends; these are rank {first} and rank {second}")
    # Ranks that are neither end only wait. All get the first rank's figures. After `most_s` seconds
    # no more samples are taken.
    if world.rank in (first, second):
        end = LinkEnd.of(world, first, second)
        with peers_may_be_lost(world):
            latencies = end.latency_samples_s(most_s=most_s / 2)
            streams = end.bandwidth_samples_bytes_per_s(least_stream_s, most_s / 2)
        measured = [MeasuredLink(first, second, tuple(latencies), tuple(streams))]
    return gather_as(world, measured, list[MeasuredLink])[first][0]


@dataclass(frozen=True)
class LinkEnd:
    """One end of a link. Both ends call the same methods; the one that starts gets the samples."""

    group: ProcessGroup
    peer: int
    starts: bool
    """Whether this end starts, and measures."""
    device: torch.device

    @classmethod
    def of(cls, world: Group, first: int, second: int) -> Self:
        """Return the end of one of two ranks, of which the first one measures."""
        assert world.exchange_group is not None
        starts = world.rank == first
        return cls(world.exchange_group, second if starts else first, starts, world.device)

    def latency_samples_s(self, pings: int = PINGS, most_s: float = inf) -> list[float]:
        """Return half of each 8-byte round trip."""
        ball = torch.zeros(PING_BYTES, dtype=torch.uint8, device=self.device)
        if not self.starts:
            is_last = False
            while not is_last:
                self._receive(ball)
                is_last = bool(ball[0])
                self._send(ball)
            return []
        # The first half of the pings warms up. There are fewer pings if `most_s` is over.
        samples = list[float]()
        begin_s = time.perf_counter()
        while not ball[0]:
            start_s = time.perf_counter()
            if len(samples) + 1 >= 2 * pings or (samples and start_s - begin_s >= most_s):
                ball.fill_(1)
            self._send(ball)
            self._receive(ball)
            finish(self.device)
            samples.append((time.perf_counter() - start_s) / 2)
        return samples[len(samples) // 2 :]

    def bandwidth_samples_bytes_per_s(
        self, least_s: float = MIN_STREAM_S, most_s: float = inf
    ) -> list[float]:
        samples: list[float] = []
        number = torch.zeros(1, dtype=torch.int64, device=self.device)
        if not self.starts:
            while stream_bytes := int(self._receive(number)):
                self._stream(stream_bytes)
            return samples
        # Streams grow until one takes `least_s` seconds; shorter ones warm up. After `most_s` the
        # next stream that is long enough is the last. Each ends with the receiver's confirmation.
        stream_bytes = FIRST_STREAM_BYTES
        begin_s = time.perf_counter()
        while len(samples) < STREAMS:
            if samples and time.perf_counter() - begin_s >= most_s:
                break
            self._send(number.fill_(stream_bytes))
            taken_s = self._stream(stream_bytes)
            if taken_s >= least_s or samples:
                samples.append(stream_bytes / taken_s)
            else:
                growth = min(MAX_GROWTH, max(2.0, 1.25 * least_s / taken_s))
                stream_bytes = round(stream_bytes * growth)
        self._send(number.fill_(0))
        return samples

    def _stream(self, stream_bytes: int) -> float:
        message_bytes = min(MAX_MESSAGE_BYTES, -(-stream_bytes // IN_FLIGHT))
        slots = torch.zeros(IN_FLIGHT, message_bytes, dtype=torch.uint8, device=self.device)
        confirmation = torch.zeros(PING_BYTES, dtype=torch.uint8, device=self.device)
        works: list[dist.Work | None] = [None] * IN_FLIGHT
        start_s = time.perf_counter()
        for number, begin in enumerate(range(0, stream_bytes, message_bytes)):
            slot = number % IN_FLIGHT
            _wait(works[slot])
            message: Tensor = slots[slot, : min(message_bytes, stream_bytes - begin)]
            works[slot] = (
                dist.isend(message, group_dst=self.peer, group=self.group)
                if self.starts
                else dist.irecv(message, group_src=self.peer, group=self.group)
            )
        for work in works:
            _wait(work)
        if self.starts:
            self._receive(confirmation)
        else:
            finish(self.device)
            self._send(confirmation)
        finish(self.device)
        return time.perf_counter() - start_s

    def _send(self, tensor: Tensor) -> None:
        dist.send(tensor, group_dst=self.peer, group=self.group)

    def _receive(self, tensor: Tensor) -> Tensor:
        dist.recv(tensor, group_src=self.peer, group=self.group)
        return tensor


def finish(device: torch.device) -> None:
    """Wait until the device has finished its work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


NAME = "links.json"

MAX_AGE_S = 24 * 3600.0

MAX_LINKS = 1000

MAX_BYTES = 1_000_000

UNREADABLE = (OSError, ValueError, RuntimeError)  # the last: a user without a home

Real = Annotated[float, Meta(gt=0, le=1e30)]


@dataclass(frozen=True)
class KnownLink:
    ranks: str
    """The digest of all ranks' `described`."""
    measured_at_s: Real
    """Seconds since 1970."""
    latency_s: Real
    bandwidth_bytes_per_s: Real


@dataclass(frozen=True)
class _File:
    version: Count
    links: list[KnownLink]


VERSION = 1
"""The version of the file, and of how its figures are measured."""


def described(device_type: str, place: Sequence[str]) -> str:
    """Return the properties of this rank on which a link depends. place: its host's names."""
    name = os.environ.get(GLOO_INTERFACE) or _interface_to(os.environ.get("MASTER_ADDR", ""))
    # The hardware address distinguishes a rebuilt host from an earlier host of the same name.
    addresses = psutil.net_if_addrs().get(name, [])
    hardware = [address.address for address in addresses if address.family == psutil.AF_LINK]
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    return json.dumps([*place, name, *hardware, nccl, device_type])


def _interface_to(host: str) -> str:
    return interface_of(own_addresses(host)[0]) if host else ""


def recall(ranks: Sequence[str]) -> KnownLink | None:
    """Return the link between ranks with these descriptions, if it was measured within a day."""
    key = _digest(ranks)
    return next((known for known in reversed(_read()) if known.ranks == key), None)


def remember(ranks: Sequence[str], latency_s: float, bandwidth_bytes_per_s: float) -> None:
    """Store the figures with the present time, if the file can be written."""
    key = _digest(ranks)
    kept = [known for known in _read() if known.ranks != key][1 - MAX_LINKS :]
    kept.append(KnownLink(key, time.time(), latency_s, bandwidth_bytes_per_s))
    with suppress(*UNREADABLE):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(_File(VERSION, kept)))


def _read() -> list[KnownLink]:
    try:
        file = decoded(read_bytes(_path(), MAX_BYTES), _File)
    except UNREADABLE:
        return []
    now_s = time.time()
    is_ours = file.version == VERSION
    return [link for link in file.links if is_ours and 0 <= now_s - link.measured_at_s < MAX_AGE_S]


def _path() -> Path:
    return cache_folder() / NAME


def _digest(ranks: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(ranks)).encode()).hexdigest()
