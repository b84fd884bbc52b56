"""Error feedback, and the compressors that encode each node by itself with it.

The residual that a step did not send is added to the next step's gradient:

    x = gradient + memory,   sent = decode(encode(x)),   memory = x - sent

So the error of all steps together is the error of the last step. Without feedback, one_bit,
threshold and top_k do not converge to the same loss. A memory belongs to a node of the micro-batch
tree and a parameter, so a checkpoint can be continued on another number of workers.

Source: Seide et al. 2014, section 2.2 (as "quantization error"); Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD", which proves it for every codec that sends part of its input.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from firecaffe.errors import CheckpointError
from firecaffe.exchange.leaves import Node, TreeSum
from firecaffe.gradients.compressors.codec import (
    ROW,
    BucketLayout,
    CodecWire,
    RowCodec,
    TensorCodec,
    tensors_of,
)


def keep_residual(memory: Tensor, x: Tensor, sent: Tensor) -> None:
    """Write memory = x - sent in place, with 0 for elements that are not finite."""
    # The trainer sees in the total that a gradient is not finite. If memory kept it, every later
    # step would see it again.
    torch.sub(x, sent, out=memory)
    memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class NodeMemory:
    """The memories of this rank's nodes: a vector for each bucket and node."""

    def __init__(self, layouts: Sequence[BucketLayout], remembered: Iterable[str]) -> None:
        """`remembered` names the parameters with a memory; others have a zero one, not saved."""
        self._layouts = layouts
        self._sizes = {
            name: stop - start
            for layout in layouts
            for name, (start, stop) in zip(layout.names, layout.spans, strict=True)
            if name in set(remembered)
        }
        self._vectors: dict[tuple[int, int], Tensor] = {}
        # Loaded and not yet used, by parameter, then by node.
        self._loaded: dict[str, dict[int, Tensor]] = {}

    def vectors(self, bucket: int, nodes: list[tuple[int, Tensor]]) -> list[Tensor]:
        """Return the memories of this rank's nodes of a bucket, to be changed in place."""
        for node, vector in nodes:
            if (bucket, node) not in self._vectors:
                self._vectors[bucket, node] = torch.zeros_like(vector)
        if self._loaded:
            self._take_loaded(bucket, [node for node, _ in nodes])
        return [self._vectors[bucket, node] for node, _ in nodes]

    def _take_loaded(self, bucket: int, nodes: list[int]) -> None:
        layout = self._layouts[bucket]
        for name, (start, stop) in zip(layout.names, layout.spans, strict=True):
            by_node = self._loaded.pop(name, {})
            for node in by_node.keys() & set(nodes):
                self._vectors[bucket, node][start:stop] = by_node[node]

    def state(self) -> dict[str, Tensor]:
        state = {
            f"{node}.{name}": memory
            for name, by_node in self._loaded.items()
            for node, memory in by_node.items()
        }
        for (bucket, node), vector in self._vectors.items():
            layout = self._layouts[bucket]
            for name, (start, stop) in zip(layout.names, layout.spans, strict=True):
                if name in self._sizes:
                    state[f"{node}.{name}"] = vector[start:stop]
        return state

    def load_state(
        self,
        state: Mapping[str, Tensor],
        nodes: Collection[int],
        keys: Iterable[str] | None = None,
    ) -> None:
        """Load memories; see `Compressor.load_state`. `keys` are those to load; None: all."""
        loaded: dict[str, dict[int, Tensor]] = {}
        for key in state if keys is None else keys:
            node, _, name = key.partition(".")
            if not node.isdecimal() or name not in self._sizes:
                raise CheckpointError(
                    f"the checkpoint has compressor memory {key!r}, "
                    "which this model and exchange.compressor do not keep"
                )
            if int(node) not in nodes:
                continue
            memory = state[key]
            if memory.shape != (self._sizes[name],):
                raise CheckpointError(
                    f"compressor memory {key!r} has shape {tuple(memory.shape)}; "
                    f"the parameter needs ({self._sizes[name]},)"
                )
            loaded.setdefault(name, {})[int(node)] = memory
        self._vectors.clear()
        self._loaded = loaded


class RowCompressor:
    """The owner of a row decodes, adds and encodes it again; the encoded total has no memory.

    With int8, elements below 1/254 of the largest in their row's total may lose all of a step's
    gradient.
    """

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
    """All ranks gather payloads, which cannot be summed, decode them, and add in tree order."""

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
