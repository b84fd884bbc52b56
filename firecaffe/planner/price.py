"""Prices what sums gradients on a network: an exchange, or a compressor.

An exchange is simulated for few ranks, and priced by classes of equal rounds for many. A compressor
costs its bytes on the wire and its passes over memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import numpy as np

from firecaffe.exchange import (
    NATIVE,
    SEGMENTED,
    find_schedule,
    fold,
    sharded_parameter_server,
    shared_memory,
    useful_lanes,
)
from firecaffe.exchange.collectives import half
from firecaffe.exchange.leaves import equal_shares, num_nodes
from firecaffe.exchange.route import FOLD
from firecaffe.exchange.schedule import ALL_GATHER, ALL_REDUCE, BYTES_PER_ELEMENT, Schedule
from firecaffe.gradients.compressors import COMPRESSORS, FIXED_LENGTH
from firecaffe.gradients.compressors.codec import LowRank, RowCodec, TensorCodec
from firecaffe.planner.round_prices import equal_rounds, sharded_s, whole_and_latency_s
from firecaffe.planner.simulate import Network, simulate_s
from firecaffe.planner.workload import Workload

SIMULATED_RANKS = 16
"""With more ranks, rounds are summed and scaled by the overlap that is simulated at this number."""

MAX_PAIRS = 512
"""The most ranks, in partly filled groups, whose pairs are listed; more are priced by a formula."""

SHARDED = "sharded_parameter_server"

NATIVE_CANDIDATES = ("ring", "halving_doubling")
"""A library's all_reduce is priced as the faster of these, with its additions hidden."""

MAX_KEPT = 4096
"""Cached times of exchanges: a plan asks for the same ones with other batches and precisions."""

SIZES = (2**16, 2**20)
"""Elements at which exchanges are priced, besides the largest wanted; linear in between."""

MAX_ELEMENTS = 2**27
"""The most elements at which exchanges are priced; times beyond are extrapolated linearly.

A simulation visits each message, and VGG's largest layer has 1e8 numbers, a table may have 1e11.
"""

MAX_SEGMENTED_ELEMENTS = 2**23
"""A limit for exchanges in segments: once the pipeline is full, each segment takes as long.

256 segments are simulated. The two halves of `double_tree` may go on shifting against each other:
its exchange of VGG-16 (3,136 segments) came out 5 % shorter to 14 % longer than simulated whole.
"""


def rounds_only_s(algorithm: str, network: Network, num_elements: int) -> float:
    """Seconds of rounds one after the other, each as long as its busiest port."""
    return _whole_and_latency_s(algorithm, network, num_elements)[0]


@lru_cache(maxsize=MAX_KEPT)
def _whole_and_latency_s(
    algorithm: str, network: Network, num_elements: int
) -> tuple[float, float]:
    is_formula = network.fills_groups or network.world_size > MAX_PAIRS
    if algorithm == SHARDED and is_formula:
        return sharded_s(network, num_elements), sharded_s(network, num_elements, 0)
    per_node = ranks_per_node(network)
    rounds = equal_rounds(algorithm, network.world_size, num_elements, per_node)
    return whole_and_latency_s(rounds, network)


def ranks_per_node(network: Network) -> int:
    """Ranks that the innermost link joins, which are a node for `hierarchical`."""
    return min(network.links[0].group or network.world_size, network.world_size)


@dataclass
class Prices:
    """The times of one exchange on one network, cached by size."""

    algorithm: str
    network: Network
    in_pieces: bool = True
    """Whether vectors travel in pieces, as ours do, or whole."""
    num_leaves: int = 0
    """Micro-batches of a step; only for `fold`."""
    across: str = ""
    """The exchange between nodes, if ranks of a node add in memory; as in a `Route`."""
    kind: str = ALL_REDUCE
    """Only for `fold`: both ways, only to the shards' owners (REDUCE_SCATTER), or only back."""
    _at: dict[int, float] = field(default_factory=dict)

    def seconds(self, sizes: Sequence[int]) -> list[float]:
        """Seconds of float32 vectors, one at a time. Raises: ValueError if ranks do not fit."""
        if self.network.world_size == 1:
            return [0.0] * len(sizes)
        largest = min(_max_elements(self.algorithm), max(2, *sizes))
        points = [0, *(size for size in SIZES if 4 * size < largest), largest]
        # The latencies remain when the bytes shrink to zero: an element for each rank.
        fewest = min(self.network.world_size, largest)
        times = [self._exact_s(point or fewest) for point in points]
        each_s = (times[-1] - times[-2]) / (points[-1] - points[-2])
        priced = np.interp(sizes, points, times)
        further = (each_s * max(0, size - largest) for size in sizes)
        return [float(a) + b for a, b in zip(priced, further, strict=True)]

    def lanes(self, most: int) -> int:
        """How many vectors are under way at once on a cluster that allows `most`."""
        is_one_by_one = bool(self.across) or self.algorithm == FOLD
        return 1 if is_one_by_one else min(most, useful_lanes(self.algorithm))

    def share_in_lanes(self, num_elements: int, lanes: int) -> float:
        """Time of vectors in all lanes at once over that in sequence; 1 if not simulated."""
        lanes = self.lanes(lanes)
        is_simulated = 1 < self.network.world_size <= SIMULATED_RANKS and self.in_pieces
        if lanes == 1 or not is_simulated:
            return 1.0
        num_elements = min(_max_elements(self.algorithm), num_elements)
        one_s = _simulated_s(self.algorithm, self.network, num_elements)
        return _simulated_s(self.algorithm, self.network, num_elements, lanes) / lanes / one_s

    def _exact_s(self, num_elements: int) -> float:
        if num_elements not in self._at:
            self._at[num_elements] = self._price_s(num_elements) * self._correction()
        return self._at[num_elements]

    def _correction(self) -> float:
        outermost = self.network.outermost
        # The messages of `fold` go straight to their receivers, as those of the sharded server do.
        algorithm = SHARDED if self.algorithm == FOLD else self.algorithm
        return outermost.exchange_scale / outermost.efficiency.get(algorithm, 1.0)

    def _price_s(self, num_elements: int) -> float:
        network = self.network
        if self.across:
            return _shared_s(self.across, network, num_elements)
        if self.algorithm == NATIVE:
            return min(
                rounds_only_s(candidate, network, num_elements) for candidate in NATIVE_CANDIDATES
            )
        if self.algorithm == FOLD:
            return _fold_s(network, num_elements, self.num_leaves, self.kind)
        if not self.in_pieces:
            return rounds_only_s(self.algorithm, network, num_elements)
        if network.world_size <= SIMULATED_RANKS:
            return _simulated_s(self.algorithm, network, num_elements)
        whole_s = rounds_only_s(self.algorithm, network, num_elements)
        return whole_s * overlap_share(self.algorithm, network, num_elements)


def _max_elements(algorithm: str) -> int:
    return MAX_SEGMENTED_ELEMENTS if algorithm in SEGMENTED else MAX_ELEMENTS


def _shared_s(across: str, network: Network, num_elements: int) -> float:
    """Seconds of `exchange.shared_memory`: the busiest rank's in memory, then between nodes."""
    m, inner = ranks_per_node(network), network.links[0]
    whole = shared_memory.schedule(
        network.world_size, num_elements, outer=find_schedule(across), ranks_per_host=m
    )
    most = 0
    for rank in range(m):
        part = shared_memory.memory_part(whole, rank)
        added = sum(stop - start for start, stop in part.adds)
        copied = 0 if part.reads is None else num_elements
        most = max(most, added * (m + len(part.into)) + 2 * copied)
    in_memory_s = most * BYTES_PER_ELEMENT / inner.memory_bytes_per_s
    if m == network.world_size:
        return in_memory_s
    # One rank of each node takes part: all links but the innermost.
    outer = tuple(replace(link, group=link.group // m) for link in network.links[1:])
    return in_memory_s + Prices(across, Network(outer, network.world_size // m))._price_s(
        num_elements
    )


def _fold_s(network: Network, num_elements: int, num_leaves: int, kind: str = ALL_REDUCE) -> float:
    """Seconds of `fold` without its early round, for which nobody waits."""
    inputs = fold.inputs_of(num_leaves, equal_shares(num_leaves, network.world_size))
    if network.world_size > SIMULATED_RANKS:
        return sharded_s(network, num_elements) / (1 if kind == ALL_REDUCE else 2)

    def schedule(world_size: int, size: int) -> Schedule:
        if kind == ALL_GATHER:
            return half(sharded_parameter_server.schedule, ALL_GATHER)(world_size, size)
        make = fold.schedule if kind == ALL_REDUCE else fold.reduce_scatter
        return make(inputs, num_leaves, size, early=True).late()

    return simulate_s(schedule, network, num_elements, in_pieces=False)


def overlap_share(algorithm: str, network: Network, num_elements: int) -> float:
    """The share of the rounds' time that remains if pieces overlap, among about SIMULATED_RANKS.

    The simulated vector has the ratio of bytes to latencies that it has on `network`, up to
    `_max_elements`, because the share depends on this ratio.
    """
    per_node = network.links[0].group or 1
    ranks = max(2, SIMULATED_RANKS // per_node) * per_node
    if ranks > 2 * SIMULATED_RANKS:
        return 1.0
    few = Network(network.links, ranks)
    size = num_elements
    ours, theirs = (_bytes_by_latency(algorithm, among, size) for among in (network, few))
    if theirs:
        size = min(_max_elements(algorithm), max(ranks, round(size * ours / theirs)))
    return _simulated_s(algorithm, few, size) / rounds_only_s(algorithm, few, size)


def _bytes_by_latency(algorithm: str, network: Network, num_elements: int) -> float:
    """Seconds of the rounds' bytes over those of their latencies; 0 if there are none."""
    whole_s, latency_s = _whole_and_latency_s(algorithm, network, num_elements)
    return whole_s / latency_s - 1 if latency_s else 0.0


@lru_cache(maxsize=MAX_KEPT)
def _simulated_s(algorithm: str, network: Network, num_elements: int, vectors: int = 1) -> float:
    schedule = find_schedule(algorithm, ranks_per_node(network))
    return simulate_s(schedule, network, num_elements, vectors=vectors)


MEASURED = FIXED_LENGTH
"""Compressors whose times for any vector also hold for a network's gradients."""

PRICED = tuple(
    name
    for name, codec in COMPRESSORS.items()
    if isinstance(codec, LowRank) or name in FIXED_LENGTH
)
"""Compressors with a price; what the others send depends on the gradients."""

PASSES = 16
"""Passes over a node's float32 to encode it, to keep what was not sent, and to decode."""

OTHERS_PASSES = 3
"""Passes to decode a whole tensor of another worker's node, and to add it."""


def coded_s(
    name: str,
    share: float,
    nodes: int,
    network: Network,
    memory_rate: float,
    sizes: Sequence[int],
) -> list[float]:
    """Seconds to exchange encoded vectors of these sizes, in elements.

    A worker with k nodes of the micro-batch tree encodes and sends k payloads. Row codecs use an
    all-to-all of every node's shards and an all-gather of the totals; other codecs an all-gather.

    share: bytes of an encoded node over its bytes as float32. nodes: those of all workers.
    memory_rate: bytes/s that the device reaches.
    """
    local_nodes = -(-nodes // network.world_size)
    passes = PASSES * local_nodes
    if isinstance(COMPRESSORS[name], TensorCodec):
        passes += OTHERS_PASSES * (nodes - local_nodes)
        ring = Prices("ring", network, in_pieces=False)
        wire_s = [time_s / 2 for time_s in ring.seconds([round(nodes * share * n) for n in sizes])]
    else:
        server = Prices(SHARDED, network, in_pieces=False)
        out = server.seconds([round(local_nodes * share * n) for n in sizes])
        back = server.seconds([round(share * n) for n in sizes])
        wire_s = [(a + b) / 2 for a, b in zip(out, back, strict=True)]
    passes_s = [passes * BYTES_PER_ELEMENT * size / memory_rate for size in sizes]
    slower = 1 / network.outermost.efficiency.get(name, 1.0)
    return [slower * (a + b) for a, b in zip(passes_s, wire_s, strict=True)]


def coded_gradients_s(
    name: str, workload: Workload, network: Network, memory_rate: float, sizes: Sequence[int]
) -> list[float]:
    """Seconds to exchange buckets of a workload's gradients; sizes: as in `coded_s`."""
    nodes = num_nodes(workload.num_micro_batches, workload.compressor_level)
    return coded_s(name, sent_share(name, workload), nodes, network, memory_rate, sizes)


def encoding_s(size_bytes: float, memory_rate: float) -> float:
    """Seconds to encode a gradient for a server; decoding takes as long."""
    return PASSES / 2 * size_bytes / memory_rate


def sent_share(name: str, workload: Workload) -> float:
    """Bytes of an encoded node over its bytes as float32."""
    if isinstance(codec := COMPRESSORS[name], LowRank):
        shapes = [shape for layer in workload.layers for shape in layer.shapes]
        thin = sum(_low_rank_elements(shape, codec.rank) for shape in shapes)
        return thin * BYTES_PER_ELEMENT / max(1, workload.parameter_bytes)
    return fixed_share(name)


def fixed_share(name: str) -> float:
    """Bytes of an encoded node over its bytes as float32, for a codec of FIXED_LENGTH."""
    codec = COMPRESSORS[name]
    if isinstance(codec, RowCodec):
        return codec.row_bytes / (codec.row_elements * BYTES_PER_ELEMENT)
    assert isinstance(codec, TensorCodec)
    assert codec.share is not None
    return codec.share


def _low_rank_elements(shape: tuple[int, ...], rank: int) -> int:
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[0], prod(shape[1:])
    return min(rank * (rows + columns), rows * columns)
