"""Compressors that encode each node by itself.

RowCompressor: the owner of a row decodes, adds and encodes it again. The encoded total has no
memory: with int8, elements below 1/254 of the largest in their row's total may lose all of a step's
gradient. TensorCompressor: payloads of whole tensors cannot be summed, so all ranks gather them,
decode them, and add in tree order.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from firecaffe.exchange.leaves import Node, TreeSum
from firecaffe.gradients.compressors.codec import (
    ROW,
    BucketLayout,
    CodecWire,
    RowCodec,
    TensorCodec,
    tensors_of,
)
from firecaffe.gradients.compressors.feedback import NodeMemory, keep_residual


class RowCompressor:
    def __init__(self, codec: RowCodec, layouts: Sequence[BucketLayout]) -> None:
        self._codec = codec
        self._layouts = layouts
        self._memory = NodeMemory(layouts, tensors_of(layouts) if codec.remembers else ())

    def reduce(self, bucket: int, nodes: list[tuple[int, Tensor]], wire: CodecWire) -> Tensor:
        if self._codec.remembers:
            memories = self._memory.vectors(bucket, nodes)
            for (_, x), memory in zip(nodes, memories, strict=True):
                x.add_(memory)
                keep_residual(memory, x, self._codec.decode(self._codec.encode(x)))
        total = wire.sum_rows([x for _, x in nodes], self._codec)
        for _, stop in self._layouts[bucket].spans:
            # Values that are not finite may fill a row up to its end, past the tensor's end.
            total[stop : -(-stop // ROW) * ROW] = 0
        return total

    def state(self) -> dict[str, Tensor]:
        return self._memory.state()

    def load_state(self, state: Mapping[str, Tensor], nodes: Collection[int]) -> None:
        self._memory.load_state(state, nodes)


LENGTH_BYTES = 4


class TensorCompressor:
    def __init__(self, codec: TensorCodec, layouts: Sequence[BucketLayout]) -> None:
        self._codec = codec
        self._layouts = layouts
        self._memory = NodeMemory(layouts, tensors_of(layouts))

    def reduce(self, bucket: int, nodes: list[tuple[int, Tensor]], wire: CodecWire) -> Tensor:
        spans = self._layouts[bucket].spans
        memories = self._memory.vectors(bucket, nodes)
        encoded = [
            self._encode(x.add_(memory), memory, spans)
            for (_, x), memory in zip(nodes, memories, strict=True)
        ]
        gathered = wire.gather(encoded, self._codec.has_fixed_length)
        payloads = [split_parts(payload, len(spans)) for payload in gathered]
        sent_by = dict(nodes)
        total = torch.zeros_like(nodes[0][1])
        for index, (start, stop) in enumerate(spans):
            counter: TreeSum[Tensor] = TreeSum(wire.num_nodes, lambda left, right: left.add_(right))
            for node, parts in enumerate(payloads):
                if node in sent_by:
                    sent = sent_by[node][start:stop]
                else:
                    sent = self._codec.decode(parts[index], stop - start)
                counter.push(Node(0, node), sent)
            total[start:stop] = counter.total()
        return total

    def _encode(self, x: Tensor, memory: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        parts = []
        for start, stop in spans:
            tensor, rest = x[start:stop], memory[start:stop]
            parts.append(self._codec.encode(tensor, rest))
            sent = self._codec.decode(parts[-1], stop - start)
            keep_residual(rest, tensor, sent)
            tensor.copy_(sent)
        return join_parts(parts, x.device)

    def state(self) -> dict[str, Tensor]:
        return self._memory.state()

    def load_state(self, state: Mapping[str, Tensor], nodes: Collection[int]) -> None:
        self._memory.load_state(state, nodes)


def join_parts(parts: list[Tensor], device: torch.device) -> Tensor:
    lengths = torch.tensor([part.numel() for part in parts], dtype=torch.int32, device=device)
    return torch.cat([lengths.view(torch.uint8), *parts])


def split_parts(payload: Tensor, num_parts: int) -> list[Tensor]:
    head = num_parts * LENGTH_BYTES
    lengths = payload[:head].clone().view(torch.int32).tolist()
    return list(payload[head:].split_with_sizes(lengths))
