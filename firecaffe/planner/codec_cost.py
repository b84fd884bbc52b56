"""Prices compressors on a network: their bytes on the wire, and their passes over memory.

A worker with k nodes of the micro-batch tree encodes and sends k payloads. Row codecs use an
all-to-all of every node's shards and an all-gather of the totals; other codecs an all-gather.
"""

from collections.abc import Sequence
from math import prod

from firecaffe.exchange.leaves import num_nodes
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.gradients.compressors import COMPRESSORS, FIXED_LENGTH
from firecaffe.gradients.compressors.codec import LowRank, RowCodec, TensorCodec
from firecaffe.planner.price import Prices
from firecaffe.planner.simulate import Network
from firecaffe.planner.workload import Workload

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
    """Seconds to exchange vectors of these sizes, in elements.

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
        server = Prices("sharded_parameter_server", network, in_pieces=False)
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
