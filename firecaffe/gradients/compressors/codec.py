"""Codecs: pairs of functions between float32 numbers and bytes, decided by nothing else.

A codec sees one row of 256 elements or one parameter tensor of one node, never a bucket, a rank or
a step. So its bytes are the same wherever the node is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
