"""Codecs, and the protocols between compressors and ranks.

A codec's bytes depend only on one row of 256 elements or one parameter tensor of one node, never on
a bucket, rank or step. So they are the same wherever the node is computed. If an element is an
infinity or a NaN, so is at least one decoded element, because a training must see it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

ROW = 256
"""The elements of a row. Every parameter tensor begins at a multiple of it, in every bucket."""


@dataclass(frozen=True)
class RowCodec:
    """A codec that encodes each row by itself, so that ranks can share out the rows of a vector."""

    encode: Callable[[Tensor], Tensor]
    """Encodes float32 (rows · ROW,) as uint8 (rows, row_bytes); `decode` reverses that."""
    decode: Callable[[Tensor], Tensor]
    """Decode uint8 (rows, row_bytes) to float32 (rows * ROW,)."""
    row_bytes: int
    """The bytes of an encoded row."""
    remembers: bool
    """Whether the residual that a step did not send is added to the next; see `feedback`."""
    row_elements: int = ROW
    """The elements of a row."""


@dataclass(frozen=True)
class TensorCodec:
    """A codec for one parameter tensor at a time, with a memory of what it does not send."""

    encode: Callable[[Tensor, Tensor], Tensor]
    """Encodes gradient + memory, and memory, float32 (n,) each, as uint8 (bytes,)."""
    decode: Callable[[Tensor, int], Tensor]
    """Decode uint8 (bytes,) to float32 (n,)."""
    share: float | None
    """The payload's bytes over the tensor's, ignoring a few; None if they depend on the values."""

    @property
    def has_fixed_length(self) -> bool:
        """Whether the payload's length depends on n alone."""
        return self.share is not None


@dataclass(frozen=True)
class LowRank:
    """The low-rank method, which turns all nodes' gradients together into two thin matrices."""

    rank: int
    """The columns of the first matrix and the rows of the second."""


@dataclass(frozen=True)
class BucketLayout:
    """The layout of the parameter tensors in one bucket's flat vectors.

    Args:
        names: The parameters' names, which key memory in a checkpoint.
        spans: First element, a multiple of ROW, and one after the last. Between spans are zeros.
        shapes: In the order of memory: a channels_last weight is (out, height, width, in).
    """

    names: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[int, ...], ...]


class CodecWire(Protocol):
    """The ranks from a compressor's view. Vectors are float32 and flat.

    Each rank passes its consecutive nodes in order. Results have the same bits on all ranks,
    whichever nodes each rank has.
    """

    @property
    def num_nodes(self) -> int:
        """The number of nodes of all ranks together."""

    def sum_nodes(self, vectors: list[Tensor]) -> Tensor:
        """Sum vectors, all of one length, over all nodes in tree order."""

    def sum_rows(self, vectors: list[Tensor], codec: RowCodec) -> Tensor:
        """Sum vectors that travel encoded: decode(encode(sum of decode(encode(v))))."""

    def gather(self, payloads: list[Tensor], equal_lengths: bool = False) -> list[Tensor]:
        """Gather all nodes' payloads (uint8) in node order; equal_lengths: all have one length."""


class Compressor(Protocol):
    """Sums nodes' gradients with fewer bytes. A whole training uses one, because of its memory."""

    def reduce(self, bucket: int, nodes: list[tuple[int, Tensor]], wire: CodecWire) -> Tensor:
        """Return the total over all ranks' nodes, shaped as one node's vector.

        All ranks call it with the same buckets in the same order. `nodes` are this rank's, at least
        one: index and flat vector, which is overwritten. Their units must stay the same from step
        to step (a gradient of the mean loss, unscaled), because the next step adds what this one
        keeps back.
        """

    def state(self) -> dict[str, Tensor]:
        """Return this rank's memory by "node.parameter", in tensors that the next step changes.

        Memory that is equal on all ranks is returned on each of them, by "q.parameter".
        """

    def load_state(self, state: Mapping[str, Tensor], nodes: Collection[int]) -> None:
        """Load the memory of this rank's `nodes` from all ranks' state, and read nothing else.

        A node that is not in the state begins without memory. Raises CheckpointError if the state
        is that of another model or compressor.
        """


def tensors_of(layouts: Sequence[BucketLayout]) -> dict[str, tuple[int, ...]]:
    return {
        name: shape
        for layout in layouts
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
