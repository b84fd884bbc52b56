"""A compressor beside split layers and stages.

A part is encoded as a tensor of its own, at the nodes of the tree over micro-batches, whoever has
it. So how many ranks there are changes no bit. What is kept back of a part is in a checkpoint by
NODE.NAME/PART, of other tensors by NODE.NAME, with the whole tensor's name; ranks read those of
their nodes and parts.
"""

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.exchange.leaves import Node
from firecaffe.gradients.buckets import layout_of, make_bucket, views_like
from firecaffe.gradients.codec_memory import CodecMemory
from firecaffe.gradients.combine import Compressed
from firecaffe.gradients.compressors import make_compressor
from firecaffe.gradients.compressors.codec import ROW
from firecaffe.gradients.threads import ExchangeThreads
from firecaffe.training.parallel.pieces import Names
from firecaffe.training.stored import Stored
from firecaffe.transport.collect import HeldPart
from firecaffe.transport.queue import queue_of


class PartCodec:
    """Means of the gradients of parts, encoded, over the ranks of a column."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        column: Group,
        num_leaves: int,
        name: str,
        level: int,
    ) -> None:
        """named: the parts that are trained. name, level: of the codec, and of the nodes that it
        encodes.
        """
        self.names, self.level = list(named), level
        parts, device = list(named.values()), column.device
        multiple = column.world_size * ROW
        self._bucket = make_bucket(parts, range(len(parts)), multiple, _zeros, ROW)
        compressor = make_compressor(name, [layout_of(self._bucket, self.names)])
        self._combine = Compressed(column, compressor, num_leaves, level, len(parts))
        self.memory = self._combine.memory
        self.begin_step, self.undo_step = self._combine.begin_step, self._combine.undo_step
        self.share_out = self._combine.share_out
        # In a thread, as gradients of what is not in parts: a thread has another number of threads
        # for one sum than the main one.
        self._threads = ExchangeThreads(column, self._combine.lanes, device, queue_of(device))
        self.seconds = 0.0
        """What encoding and exchanges have taken so far."""

    def close(self) -> None:
        """Ends its thread, which may still wait for a rank that is lost."""
        self._threads.close(wait=False)

    def mean(
        self, nodes: Sequence[Node], gradients: Sequence[Sequence[Tensor]], weight: float
    ) -> Sequence[Tensor]:
        """The means, each shaped as its part. gradients: of each of this rank's nodes, those of the
        parts. weight: what sums are divided by. Raises: PeerLostError.
        """
        start_s, bucket = time.perf_counter(), self._bucket
        flats = list[Tensor]()
        for of_parts in gradients:
            flat = torch.zeros_like(bucket.flat)
            views = views_like(flat, bucket.views, ROW)
            for view, part in zip(views, of_parts, strict=True):
                view.copy_(part.view_as(view))
            flats.append(flat.div_(weight))
        numbered = list(zip(nodes, flats, strict=True))
        self._threads.submit(0, lambda: self._combine(0, numbered, bucket), flats)
        self._threads.finish()
        self.seconds += time.perf_counter() - start_s
        return bucket.views


def _zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(elements, dtype=dtype, device=device)


class MemoryInParts:
    """What compressors keep back, by whole names; see `training.piece.Piece`."""

    held_by_all = False
    is_result = False

    def __init__(
        self, memories: Sequence[tuple[Container[str], CodecMemory]], names: Names
    ) -> None:
        """memories: each with the parameters that it is of, by this rank's names."""
        self._memories, self._names = memories, names
        self._paths = {
            own: f"{each.whole}/{each.part}" if each.cut else each.whole
            for own, each in names.sources.items()
        }
        self._own = {path: own for own, path in self._paths.items()}
        self._cut = {each.whole for each in names.sources.values() if each.cut}

    def parts(self) -> dict[str, HeldPart]:
        found = {}
        for _, memory in self._memories:
            for key, part in memory.parts().items():
                node, _, own = key.partition(".")
                order = self._names.places[self._names.source(own)[0].whole]
                found[f"{node}.{self._paths.get(own, own)}"] = replace(part, order=order)
        return found

    def load(self, stored: Stored) -> None:
        """Raises: CheckpointError if there is memory of no parameter of this network."""
        keys: list[dict[str, str]] = [{} for _ in self._memories]
        for key in stored:
            node, _, path = key.partition(".")
            own = self._own.get(path, path)
            if own == path and self._is_elsewhere(path):
                continue
            of = (place for place, (names, _) in enumerate(self._memories) if own in names)
            keys[next(of, 0)][f"{node}.{own}"] = key  # none has it: the first one tells of it
        for own_keys, (_, memory) in zip(keys, self._memories, strict=True):
            memory.load(_ByOwnKeys(stored, own_keys))

    def _is_elsewhere(self, path: str) -> bool:
        whole, _, part = path.partition("/")
        return whole in self._names.elsewhere or (bool(part) and whole in self._cut)


class _ByOwnKeys(Mapping[str, Tensor]):
    """Stored tensors by other keys; read when they are asked for."""

    def __init__(self, stored: Stored, keys: Mapping[str, str]) -> None:
        self._stored, self._keys = stored, keys

    def __getitem__(self, key: str) -> Tensor:
        return self._stored[self._keys[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
