"""Sums of the gradients of split layers, whose parts see the micro-batches of all ranks of a row.

With one weird trick, a rank has gradients of its parts for each micro-batch of its row. They are
leaves of the tree over all micro-batches. The tree continues over the ranks of the column, which
hold the same parts. A single row exchanges nothing. Such parts are most of a network's weights, so
memory traffic matters: nothing is copied, and the last additions, the division and the check for
finite values run block by block, in the cache.

A codec encodes each part as a separate tensor, at the tree's nodes, whichever rank has it, so the
number of ranks changes no bit. A checkpoint has the codec's memory of parts under NODE.NAME/PART,
of other tensors under NODE.NAME. NAME is the whole tensor's. A rank reads that of its own nodes.
"""

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.exchange.leaves import Node, Shares, TreeSum, largest_nodes, sum_of_nodes
from firecaffe.gradients.bucket_sums import CodecMemory, CompressedSum
from firecaffe.gradients.buckets import Leaf, add_leaf, layout_of, make_bucket, views_like
from firecaffe.gradients.compressors import make_compressor
from firecaffe.gradients.compressors.codec import ROW
from firecaffe.gradients.threads import ExchangeThreads
from firecaffe.parallel.own_samples import Gradients
from firecaffe.recipe.worker_numbers import rows_of
from firecaffe.training.parallel.cut_pieces import Names
from firecaffe.training.tensor_file import Stored, StoredByName
from firecaffe.transport.collect import HeldPart
from firecaffe.transport.fold_nodes import NodeSum
from firecaffe.transport.queue import queue_of


class PartCodec:
    """The mean of encoded gradients of parts over the ranks of a column."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        column: Group,
        num_leaves: int,
        name: str,
        level: int,
    ) -> None:
        self.names, self.level = list(named), level
        parts, device = list(named.values()), column.device
        multiple = column.world_size * ROW
        self._bucket = make_bucket(parts, range(len(parts)), multiple, _zeros, ROW)
        compressor = make_compressor(name, [layout_of(self._bucket, self.names)])
        self._combine = CompressedSum(column, compressor, num_leaves, level, len(parts))
        self.memory = self._combine.memory
        self.begin_step, self.undo_step = self._combine.begin_step, self._combine.undo_step
        self.set_shares = self._combine.set_shares
        # It runs in a thread, as for gradients of whole tensors: there, torch uses another number
        # of threads for a sum than in the main thread.
        self._threads = ExchangeThreads(column, self._combine.lanes, device, queue_of(device))
        self.seconds = 0.0

    def close(self) -> None:
        """End the codec's thread, which may still wait for a lost rank."""
        self._threads.close(wait=False)

    def mean(
        self, nodes: Sequence[Node], gradients: Sequence[Sequence[Tensor]], weight: float
    ) -> Sequence[Tensor]:
        """Return each part's mean from gradients of this rank's nodes. Raises: PeerLostError."""
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
    """The compressors' memory under the names of whole tensors; implements `Piece`."""

    held_by_all = False
    is_result = False

    def __init__(
        self, memories: Sequence[tuple[Container[str], CodecMemory]], names: Names
    ) -> None:
        self._memories, self._names = memories, names
        self._paths = {
            local_name: f"{source.whole}/{source.part}" if source.cut else source.whole
            for local_name, source in names.sources.items()
        }
        self._own = {path: local_name for local_name, path in self._paths.items()}
        self._cut = {source.whole for source in names.sources.values() if source.cut}

    def parts(self) -> dict[str, HeldPart]:
        parts = {}
        for _, memory in self._memories:
            for key, part in memory.parts().items():
                node, _, local_name = key.partition(".")
                order = self._names.places[self._names.source(local_name)[0].whole]
                parts[f"{node}.{self._paths.get(local_name, local_name)}"] = replace(
                    part, order=order
                )
        return parts

    def load(self, stored: Stored) -> None:
        keys: list[dict[str, str]] = [{} for _ in self._memories]
        for key in stored:
            node, _, path = key.partition(".")
            local_name = self._own.get(path, path)
            if local_name == path and self._is_elsewhere(path):
                continue
            of = (place for place, (names, _) in enumerate(self._memories) if local_name in names)
            keys[next(of, 0)][f"{node}.{local_name}"] = key  # if none has it, the first one raises
        for own_keys, (_, memory) in zip(keys, self._memories, strict=True):
            memory.load(_ByOwnKeys(stored, own_keys))

    def _is_elsewhere(self, path: str) -> bool:
        whole, _, part = path.partition("/")
        return whole in self._names.elsewhere or (bool(part) and whole in self._cut)


class _ByOwnKeys(StoredByName):
    def __init__(self, stored: Stored, keys: Mapping[str, str]) -> None:
        super().__init__(keys)
        self._stored = stored

    def __getitem__(self, key: str) -> Tensor:
        return self._stored[self._by_name[key]]


BLOCK_ELEMENTS = 65_536
"""Elements of a block on a CPU: 256 kB per node, so that a few nodes' blocks fit into its cache."""


class PartSums:
    """Sums gradients of parts: `begin`, `add` for each round of micro-batches, `finish`."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        column: Group,
        row_size: int,
        shares: Shares,
        codec: PartCodec | None = None,
    ) -> None:
        self.codec = codec
        self._level = None if codec is None else codec.level
        self.names = list(named)
        self.parameters = list(named.values())
        self._column, self._row_size = column, row_size
        self._is_alone = column.world_size == 1
        self.finite = torch.ones(len(self.names), dtype=torch.bool, device=column.device)
        """Whether each mean is finite, in the order of `names`; set by `finish`."""
        self.set_shares(shares)

    def set_shares(self, shares: Shares) -> None:
        rows = rows_of(shares, self._row_size)
        self._num_leaves = rows[-1][-1].stop
        self._own = rows[self._column.rank]
        if self.codec is not None:
            self.codec.set_shares(tuple(range(row[0].start, row[-1].stop) for row in rows))
        nodes = [
            [node for share in row for node in largest_nodes(self._num_leaves, share, self._level)]
            for row in rows
        ]
        self._sum = NodeSum(self._column, nodes, self._num_leaves)

    @property
    def seconds(self) -> float:
        return self._sum.seconds + (0.0 if self.codec is None else self.codec.seconds)

    def begin(self, scale: Tensor | None) -> None:
        if self.codec is not None:
            self.codec.begin_step(scale)
        for parameter in self.parameters:
            parameter.grad = None
        self._counters: list[TreeSum[Leaf]] = [
            TreeSum(self._num_leaves, add_leaf, self._level) for _ in self._own
        ]

    def undo_step(self) -> None:
        """Undo a codec's changes in a step whose update the loss scale skipped."""
        if self.codec is not None:
            self.codec.undo_step()

    def add(self, of_row: Sequence[tuple[int, Gradients]]) -> None:
        """Add each rank's micro-batch (number, gradients). May change the gradients in place."""
        if not self.names:
            return
        for counter, (leaf, gradients) in zip(self._counters, of_row, strict=True):
            counter.push(Node(0, leaf), self._leaf(gradients))

    def finish(self, weight: float) -> None:
        """Set each `grad` to the mean, or None if no micro-batch used it. Raises: PeerLostError."""
        if not self.names:
            return
        pending = [pair for counter in self._counters for pair in counter.pending]
        self._counters = []
        pending.sort(key=lambda pair: pair[0].index << pair[0].level)
        nodes = [node for node, _ in pending]
        uses = self._sum([leaf[-1] for _, leaf in pending]).tolist()
        leaves = [leaf[:-1] for _, leaf in pending]
        if self.codec is None:
            results = [self._mean(nodes, vectors, weight) for vectors in zip(*leaves, strict=True)]
        else:
            means = self.codec.mean(nodes, leaves, weight)
            results = [(mean, mean.isfinite().all()) for mean in means]
        for parameter, (mean, _), used in zip(self.parameters, results, uses, strict=True):
            # What a codec kept back may arrive in a later step that does not use the parameter.
            has_any = used or (self.codec is not None and bool(mean.any()))
            parameter.grad = mean.view_as(parameter) if has_any else None
        self.finite = torch.stack([is_finite for _, is_finite in results])

    def _mean(
        self, nodes: Sequence[Node], vectors: Sequence[Tensor], weight: float
    ) -> tuple[Tensor, Tensor]:
        if not self._is_alone:
            vectors = [self._sum(vectors)]
        ends: list[Tensor] = []
        for block in _blocks(vectors):
            if self._is_alone:
                sum_of_nodes(nodes, block, self._num_leaves, Tensor.add_)
            # On a CPU this is twelve times as fast as a norm.
            ends += torch.aminmax(block[0].div_(weight))
        return vectors[0], torch.stack(ends).isfinite().all()

    def _leaf(self, gradients: Gradients) -> Leaf:
        """Return the flat gradients by parameter, then for each whether it was used."""
        like = self.parameters[0]
        uses = like.new_tensor([float(parameter in gradients) for parameter in self.parameters])
        parts = [
            gradients[parameter].reshape(-1)
            if parameter in gradients
            else parameter.new_zeros(parameter.numel())
            for parameter in self.parameters
        ]
        return [*parts, uses]


def _blocks(vectors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    length = len(vectors[0])
    step = length if vectors[0].is_cuda else BLOCK_ELEMENTS
    for start in range(0, length, step):
        yield [vector[start : start + step] for vector in vectors]
