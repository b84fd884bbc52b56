"""Times exchanges in turns, under conditions that are recorded, and measures what a codec loses.

Sums are checked before timing, and so is each timed result. algbw and busbw are nccl-tests' names.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt, sqrt
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.agree import differing_ranks, digest, gather_as
from firecaffe.cluster.group import Traffic
from firecaffe.cluster.world import World, peers_may_be_lost
from firecaffe.errors import NotIdenticalError
from firecaffe.exchange import NATIVE
from firecaffe.exchange.route import Route
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.gradients.compressors import make_compressor
from firecaffe.gradients.compressors.codec import ROW, BucketLayout
from firecaffe.gradients.compressors.top_k import num_sent
from firecaffe.measure.known_sum import (
    EncodedSum,
    SumsByName,
    check_exchanges,
    checks_bits,
    difference,
    noise,
    summand,
    true_sum,
)
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.fold_nodes import NodeWire
from firecaffe.transport.link import finish
from firecaffe.transport.local_ranks import LocalRanks

WARM_UP = 1


GROUP, MEMORY, BOTH = "group", "memory", "both"
"""How a sum travels: through the backend's group, the memory of a host's ranks, or both."""

Encoder = Callable[[World, int], EncodedSum]
"""(world, elements) -> a sum of vectors of so many elements; called by all ranks."""


@dataclass(frozen=True)
class Timing:
    """The times of one exchange at one size; each sample is the slowest rank's in a repetition."""

    algorithm: str
    world_size: int
    size_bytes: int
    samples_s: tuple[float, ...]
    through: str = GROUP
    wire_bytes: int | None = None
    """Bytes one way through the busiest rank in one sum; None if only the backend knows."""
    is_encoded: bool = False
    bits_checked: bool = False

    @property
    def time_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def algbw_bytes_per_s(self) -> float:
        """Size / time. Source: nccl-tests, doc/PERFORMANCE.md."""
        return self.size_bytes / self.time_s

    @property
    def busbw_bytes_per_s(self) -> float:
        """algbw · 2 (p - 1) / p, for an all-reduce. Source: nccl-tests, doc/PERFORMANCE.md."""
        return self.algbw_bytes_per_s * 2 * (self.world_size - 1) / self.world_size

    def ratio_to(self, control: "Timing") -> float:
        """The median over repetitions of this time / the control's in the same repetition."""
        pairs = zip(self.samples_s, control.samples_s, strict=True)
        return statistics.median(taken_s / other for taken_s, other in pairs)

    def share_of_bound(self, link_bytes_per_s: float) -> float:
        """Least time of any all-reduce / the median time (Patarasuk, Yuan 2009, theorem 1)."""
        return self.busbw_bytes_per_s / link_bytes_per_s


@dataclass
class _OwnTimes:
    samples_s: list[float]
    digests: list[str]
    wire_bytes: int


def time_exchanges(
    world: World,
    algorithms: Sequence[str],
    sizes_bytes: Sequence[int],
    repetitions: int,
    progress: Callable[[str], None] = lambda _: None,
    local: LocalRanks | None = None,
    encoders: Mapping[str, Encoder] | None = None,
) -> list[Timing]:
    """Time each algorithm, then each encoder, at each size; all ranks must call this.

    Sizes are multiples of 4 bytes. Making a schedule is not timed. local: the ranks of this host,
    if they share memory. Raises: PeerLostError; NotIdenticalError, on every rank, if a sum is
    wrong.
    """
    coded = {} if encoders is None else encoders
    routes: dict[str, Route] = {}

    def make(num_elements: int) -> SumsByName:
        # Made anew for each size, so that shared memory of one size is freed before the next.
        ways = {name: Exchange.of_vectors(world, name, local) for name in algorithms}
        routes.update((name, exchange.route) for name, exchange in ways.items())
        return {**ways} | {name: encoder(world, num_elements) for name, encoder in coded.items()}

    progress("is every sum right?")
    check_exchanges(world, make, [size // BYTES_PER_ELEMENT for size in sizes_bytes])
    local_times: list[dict[str, _OwnTimes]] = []
    wrong = ""
    for size_bytes in sizes_bytes:
        progress(f"{size_bytes} bytes")
        times, fault = _time_size(world, make, size_bytes, repetitions)
        local_times.append(times)
        wrong = wrong or fault
    stated = gather_as(world, (wrong, local_times), tuple[str, list[dict[str, _OwnTimes]]])
    for rank, (fault, _) in enumerate(stated):
        if fault:
            raise NotIdenticalError(
                f"{fault} on rank {rank}, after a first sum that was right; "
                "no time of a wrong sum is shown"
            )
    return [
        _timing(name, routes.get(name), size_bytes, [times[i][name] for _, times in stated])
        for i, size_bytes in enumerate(sizes_bytes)
        for name in (*algorithms, *coded)
    ]


def _timing(
    name: str, route: Route | None, size_bytes: int, by_rank: Sequence[_OwnTimes]
) -> Timing:
    """Merge the ranks' times. Raises: NotIdenticalError if ranks ended with different bits."""
    samples_s = tuple(map(max, zip(*(times.samples_s for times in by_rank), strict=True)))
    ranks, size = len(by_rank), size_bytes // BYTES_PER_ELEMENT
    if route is None:
        different = differing_ranks([json.dumps(times.digests) for times in by_rank])
        if different:
            raise NotIdenticalError(
                f"{name} over {ranks} ranks, {size_bytes} bytes: rank "
                f"{', '.join(map(str, different))} ended in other bits than most, after a first "
                "sum that was right; no time of a wrong sum is shown"
            )
        most = max(times.wire_bytes for times in by_rank)
        return Timing(name, ranks, size_bytes, samples_s, GROUP, most, is_encoded=True)
    through, wire_bytes = way_of(route, size)
    is_checked = checks_bits(route, size)
    return Timing(name, ranks, size_bytes, samples_s, through, wire_bytes, bits_checked=is_checked)


def way_of(route: Route, num_elements: int) -> tuple[str, int | None]:
    """Return how a float32 sum travels, and the bytes one way through the busiest rank's port."""
    if route.algorithm == NATIVE:
        return GROUP, None
    if route.shares_memory and route.senders == 1:
        return MEMORY, 0
    wire_bytes = route.schedule(num_elements).elements_of_busiest_rank() * BYTES_PER_ELEMENT
    return BOTH if route.shares_memory else GROUP, wire_bytes


def _time_size(
    world: World, make: Callable[[int], SumsByName], size_bytes: int, repetitions: int
) -> tuple[dict[str, _OwnTimes], str]:
    num_elements = size_bytes // BYTES_PER_ELEMENT
    local_vector = summand(world.rank, world.world_size, num_elements).to(world.device)
    expected = true_sum(world.world_size, num_elements).to(world.device)
    sums = make(num_elements)
    by_name = {name: _OwnTimes([], [], 0) for name in sums}
    is_coded = not all(isinstance(way, Exchange) for way in sums.values())
    noisy = noise(world.rank, num_elements).to(world.device) if is_coded else local_vector
    # All exchanges that do not need their own memory share this vector.
    plain = torch.empty_like(local_vector)
    vectors = {
        name: plain
        if isinstance(way, Exchange) and not way.route.shares_memory
        else way.empty(num_elements, torch.float32, world.device)
        for name, way in sums.items()
    }
    wrong = ""
    for repetition in range(-WARM_UP, repetitions):
        turns = list(sums.items())
        # Alternate the order, so that no exchange always follows the same one.
        for name, way in turns if repetition % 2 == 0 else reversed(turns):
            vector, times = vectors[name], by_name[name]
            is_exact = isinstance(way, Exchange)
            vector.copy_(local_vector if is_exact else noisy)
            taken_s = _time_once(world, way, vector)
            if repetition >= 0:
                times.samples_s.append(taken_s)
            if not isinstance(way, Exchange):
                times.digests.append(digest([("total", vector)]))
                times.wire_bytes = max(times.wire_bytes, way.wire_bytes)
            elif not torch.equal(vector, expected) and not wrong:
                what = difference(vector.cpu(), expected.cpu())
                wrong = f"{name} over {world.world_size} ranks, {size_bytes} bytes: {what}"
    return by_name, wrong


def _time_once(world: World, way: Exchange | EncodedSum, vector: Tensor) -> float:
    finish(world.device)
    with peers_may_be_lost(world):
        # A sum on the CPU is a barrier. dist.barrier would use NCCL on a GPU's group.
        dist.all_reduce(torch.zeros(1), group=world.group)
    start_s = time.perf_counter()
    way.all_reduce(vector)
    finish(world.device)
    return time.perf_counter() - start_s


ROUNDING = {
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    # Each element is off by at most half a step, and a step is 1/127 of the row's largest
    # element, which is at most the row's norm.
    "int8": sqrt(ROW) / 254,
}
"""Bound of the error of one encoding by rows, as a share of the vector's L2 norm."""


def error_bound(name: str, num_elements: int) -> float:
    """Bound a first sum's L2 error, as a multiple of the sum of the summands' norms.

    Row codecs encode twice: each node, and the total. Other codecs encode once, and their decoded
    vector is never farther from the original than zero is.
    """
    if name in ROUNDING:
        return ROUNDING[name] * (2 + ROUNDING[name])
    # top_k decodes a part of the elements; others a mean per sign, multiples of tau, a projection.
    return sqrt(1 - num_sent(num_elements) / num_elements) if name == "top_k" else 1.0


def make_encoders(names: Sequence[str]) -> dict[str, Encoder]:
    return {name: partial(NodePerRank, name) for name in names}


class NodePerRank:
    """An `EncodedSum` by a compressor with one node per rank; its memory lasts from sum to sum."""

    def __init__(self, name: str, world: World, num_elements: int) -> None:
        self.name = name
        self.bound = error_bound(name, num_elements)
        self._num_elements = num_elements
        self._rank = world.rank
        self._wire = NodeWire(replace(world, traffic=Traffic()), world.world_size)
        self._compressor = make_compressor(name, [layout(num_elements)])
        self._flat = torch.zeros(0)
        self.wire_bytes = 0

    def empty(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._flat = torch.zeros(padded(num_elements), dtype=dtype, device=device)
        return self._flat[:num_elements]

    def all_reduce(self, vector: Tensor, lane: int = 0) -> None:
        before = self._wire.world.traffic.sent_bytes or 0
        total = self._compressor.reduce(0, [(self._rank, self._flat)], self._wire)
        vector.copy_(total[: self._num_elements])
        self._flat[self._num_elements :] = 0
        self.wire_bytes = (self._wire.world.traffic.sent_bytes or 0) - before

    def alone(self, vectors: Sequence[Tensor]) -> Tensor:
        missing = padded(self._num_elements) - self._num_elements
        nodes = [torch.nn.functional.pad(vector, (0, missing)) for vector in vectors]
        wire = NodeWire(World(0, 1, vectors[0].device), len(vectors))
        compressor = make_compressor(self.name, [layout(self._num_elements)])
        return compressor.reduce(0, list(enumerate(nodes)), wire)[: self._num_elements]


def padded(num_elements: int) -> int:
    return -(-num_elements // ROW) * ROW


def layout(num_elements: int) -> BucketLayout:
    """Lay out one parameter as a matrix that is nearly square, for which low rank sends least."""
    rows = next(rows for rows in range(isqrt(num_elements), 0, -1) if num_elements % rows == 0)
    return BucketLayout(("vector",), ((0, num_elements),), ((rows, num_elements // rows),))


PROC = Path("/proc")


@dataclass(frozen=True)
class Counters:
    total_cpu_s: float
    busy_cpu_s: float
    process_cpu_s: float
    retransmitted_segments: int | None


@dataclass(frozen=True)
class Conditions:
    """A host's conditions between two moments; shares are of all its processors."""

    congestion_control: str | None
    cpu_busy_share: float
    process_cpu_share: float
    retransmitted_segments: int | None


def read_counters(proc: Path = PROC) -> Counters:
    cpu = psutil.cpu_times()
    # User time already includes a guest's time.
    total_s = sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0)
    idle_s = cpu.idle + getattr(cpu, "iowait", 0.0)
    return Counters(total_s, total_s - idle_s, time.process_time(), _retransmitted(proc))


def conditions_since(before: Counters, proc: Path = PROC) -> Conditions:
    after = read_counters(proc)
    # The system counts in ticks of 10 ms, so the difference may be 0.
    total_s = max(after.total_cpu_s - before.total_cpu_s, 0.01)
    sent = (before.retransmitted_segments, after.retransmitted_segments)
    return Conditions(
        congestion_control=_read(proc / "sys/net/ipv4/tcp_congestion_control"),
        cpu_busy_share=(after.busy_cpu_s - before.busy_cpu_s) / total_s,
        process_cpu_share=(after.process_cpu_s - before.process_cpu_s) / total_s,
        retransmitted_segments=None if sent[0] is None or sent[1] is None else sent[1] - sent[0],
    )


def _retransmitted(proc: Path) -> int | None:
    lines = [
        line.split() for line in (_read(proc / "net/snmp") or "").splitlines() if line[:4] == "Tcp:"
    ]
    if len(lines) != 2 or "RetransSegs" not in lines[0]:
        return None
    return int(lines[1][lines[0].index("RetransSegs")])


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
