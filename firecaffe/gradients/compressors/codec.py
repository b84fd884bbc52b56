"""Codecs: pairs of functions between float32 numbers and bytes, decided by nothing else.

A codec sees one row of 256 elements or one parameter tensor of one node, never a bucket, a rank or
a step. So its bytes are the same wherever the node is computed.

The protocols between a compressor and the ranks: what each is told, may ask for and promises.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

ROW = 256
"""Elements of a row. Every parameter tensor begins at a multiple of it, on all ranks and in all
buckets."""


@dataclass(frozen=True)
class RowCodec:
    """A codec whose rows stand alone, so that ranks can share out the rows of a vector."""

    encode: Callable[[Tensor], Tensor]
    """Encodes float32 (rows · ROW,) as uint8 (rows, row_bytes)."""
    decode: Callable[[Tensor], Tensor]
    """Decodes uint8 (rows, row_bytes) to float32 (rows · ROW,)."""
    row_bytes: int
    """The bytes of an encoded row."""
    remembers: bool
    """Whether what a step did not send is added to the next; see `feedback`."""
    row_elements: int = ROW
    """The elements of a row."""


@dataclass(frozen=True)
class TensorCodec:
    """A codec for one parameter tensor at a time, which keeps back what it does not send."""

    encode: Callable[[Tensor, Tensor], Tensor]
    """Encodes x = gradient + memory, and the memory, both float32 (n,), as uint8 (bytes,)."""
    decode: Callable[[Tensor, int], Tensor]
    """Decodes uint8 (bytes,), given n, to float32 (n,)."""
    has_fixed_length: bool = True
    """Whether the payload's length depends on n alone."""


@dataclass(frozen=True)
class LowRank:
    """The low-rank method. It encodes no single node: all nodes' gradients together become two thin
    matrices.
    """

    rank: int
    """The columns of the one matrix, and the rows of the other."""


@dataclass(frozen=True)
class Layout:
    """The layout of the parameter tensors in one bucket's flat vectors.

    Args:
        names: The parameters' names, which key memory in a checkpoint.
        spans: First element and the one after the last; each first is a multiple of ROW. Between
            tensors, and behind the last, are zeros.
        shapes: In the order of memory: a channels_last weight is (out, height, width, in).
    """

    names: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[int, ...], ...]


class Wire(Protocol):
    """The ranks, as a compressor sees them: nodes of one level of the micro-batch tree.

    A rank holds consecutive nodes and hands over its own, in order. It gets back what is the same
    bits on all ranks, however the nodes are shared out. All vectors are float32 and flat.
    """

    @property
    def num_nodes(self) -> int:
        """The number of nodes of all ranks together."""

    def sum_nodes(self, vectors: list[Tensor]) -> Tensor:
        """The sum over all nodes in tree order; vectors of any length, all of one length."""

    def sum_rows(self, vectors: list[Tensor], codec: RowCodec) -> Tensor:
        """The sum of vectors that travel encoded: decode(encode(sum of decode(encode(v))))."""

    def gather(self, payloads: list[Tensor]) -> list[Tensor]:
        """All nodes' payloads (uint8, of any length) in node order, from this rank's."""


class Compressor(Protocol):
    """Sums nodes' gradients with fewer bytes. One object for a training, with its memory."""

    def reduce(self, bucket: int, nodes: list[tuple[int, Tensor]], wire: Wire) -> Tensor:
        """The total over all ranks' nodes, shaped as one node's vector.

        Called by all ranks with the same buckets in the same order. Vectors must be in units that
        last from step to step (a gradient of the mean loss, unscaled), for what one step keeps
        back is added to the next step's.

        Args:
            nodes: This rank's nodes, at least one: index and flat vector, which is overwritten.
        """

    def state(self) -> dict[str, Tensor]:
        """The memory of this rank's nodes, by "node.parameter", for the checkpoint: no copy, so it
        changes with the next step.

        What all ranks hold alike is there on each of them, by "q.parameter".
        """

    def load_state(self, state: Mapping[str, Tensor], nodes: Collection[int]) -> None:
        """Loads from the state of all ranks the memory of this rank's `nodes`, and reads no more of
        it; a node that is not in it begins with no memory.

        Raises: CheckpointError if the state is that of another model or compressor.
        """


def tensors_of(layouts: Sequence[Layout]) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by its name."""
    return {
        name: shape
        for layout in layouts
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
