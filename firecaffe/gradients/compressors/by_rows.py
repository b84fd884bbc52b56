"""Compressors whose rows stand alone: encoded, added and encoded again by whoever owns a row.

Encoded rows travel both ways; payloads of whole tensors travel only on the way out. The way back
has no memory: what an int8 row's total loses in rounding is lost. For elements of less than 1/254
of the largest in their row's total that may be all of a step's gradient.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from firecaffe.gradients.compressors.codec import ROW, RowCodec
from firecaffe.gradients.compressors.feedback import NodeMemory, keep_rest
from firecaffe.gradients.compressors.wire import Layout, Wire, tensors_of


class RowCompressor:
    """A compressor by rows; see `Compressor`."""

    def __init__(self, codec: RowCodec, layouts: Sequence[Layout]) -> None:
        self._codec = codec
        self._layouts = layouts
        self._memory = NodeMemory(layouts, tensors_of(layouts) if codec.remembers else ())

    def reduce(self, bucket: int, nodes: list[tuple[int, Tensor]], wire: Wire) -> Tensor:
        if self._codec.remembers:
            memories = self._memory.vectors(bucket, nodes)
            for (_, x), memory in zip(nodes, memories, strict=True):
                x.add_(memory)
                keep_rest(memory, x, self._codec.decode(self._codec.encode(x)))
        total = wire.sum_rows([x for _, x in nodes], self._codec)
        for _, stop in self._layouts[bucket].spans:
            # A row that is not finite is so to its end, which may lie behind the tensor's.
            total[stop : -(-stop // ROW) * ROW] = 0
        return total

    def state(self) -> dict[str, Tensor]:
        return self._memory.state()

    def load_state(self, state: Mapping[str, Tensor], nodes: Collection[int]) -> None:
        self._memory.load_state(state, nodes)
