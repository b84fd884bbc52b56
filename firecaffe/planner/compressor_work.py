"""The work of a compressor on a worker, counted by running it: bytes in memory, and kernels.

A vector of 65,536 elements goes through the compressor itself, on a wire without other workers. So
no number of passes is chosen, and a codec that changes has another price.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.gradients.compressors import COMPRESSORS, make_compressor
from firecaffe.gradients.compressors.codec import BucketLayout, LowRank, RowCodec
from firecaffe.gradients.compressors.feedback import keep_residual
from firecaffe.meta_kernels import without_compiler
from firecaffe.planner.cluster import Device

SIDE = 256
SIZE = SIDE * SIDE

ONLY_WRITE = ("copy_", "fill_", "zeros_like")
"""Kernels that do not read their first tensor."""


class KernelWork(NamedTuple):
    """The work on a vector of parameter tensors."""

    passes: float = 0.0
    """Bytes that kernels read and write, over those of the vector as float32."""
    kernels: float = 0.0
    kernels_per_tensor: float = 0.0

    def plus(self, other: "KernelWork", times: float = 1.0) -> "KernelWork":
        return KernelWork(*(a + times * b for a, b in zip(self, other, strict=True)))

    def seconds(self, device: Device, num_elements: float, num_tensors: float = 1) -> float:
        moved_s = self.passes * num_elements * BYTES_PER_ELEMENT / device.memory_rate
        return moved_s + self.kernels * device.overhead_s + self.tensors_s(device, num_tensors)

    def tensors_s(self, device: Device, num_tensors: float) -> float:
        """Seconds of the kernels that each tensor needs."""
        return self.kernels_per_tensor * num_tensors * device.overhead_s


class CompressorWork(NamedTuple):
    once: KernelWork
    """The work whatever the number of nodes."""
    own: KernelWork
    """KernelWork for each node of the worker: to encode it, and to keep what is not sent."""
    other: KernelWork
    """KernelWork for each node of other workers; none if sums travel encoded."""

    def of(self, own_nodes: int, other_nodes: int) -> KernelWork:
        return self.once.plus(self.own, own_nodes).plus(self.other, other_nodes)


@cache
def compressor_work(name: str) -> CompressorWork:
    """Return the work of exchanging one vector."""
    one, two, with_other = (_of_nodes(name, *nodes) for nodes in ((1, 0), (2, 0), (1, 1)))
    own = two.plus(one, -1)
    return CompressorWork(one.plus(own, -1), own, with_other.plus(one, -1))


@cache
def encoding_work(name: str) -> KernelWork:
    """Return the work of a push to a server: to encode a tensor, and to keep what is not sent."""
    codec, gradient, memory = COMPRESSORS[name], _vector(), _vector()
    assert not isinstance(codec, LowRank)

    def push() -> None:
        if isinstance(codec, RowCodec) and not codec.remembers:
            codec.encode(gradient)
            return
        x = gradient + memory
        if isinstance(codec, RowCodec):
            sent = codec.decode(codec.encode(x))
        else:
            sent = codec.decode(codec.encode(x, memory), SIZE)
        keep_residual(memory, x, sent)

    push()  # makes the tables of codecs
    passes, kernels = _counted(push)
    return KernelWork(passes, kernels_per_tensor=kernels)


@cache
def decoding_work(name: str) -> KernelWork:
    """Return the work to decode what `encoding_work` encodes."""
    codec, x = COMPRESSORS[name], _vector()
    assert not isinstance(codec, LowRank)
    if isinstance(codec, RowCodec):
        rows = codec.encode(x)
        passes, kernels = _counted(lambda: codec.decode(rows))
    else:
        payload = codec.encode(x, x)
        passes, kernels = _counted(lambda: codec.decode(payload, SIZE))
    return KernelWork(passes, kernels_per_tensor=kernels)


def _of_nodes(name: str, own: int, others: int) -> KernelWork:
    passes, of_one = _of_tensors(name, own, others, 1)
    of_two = _of_tensors(name, own, others, 2)[1]
    return KernelWork(passes, 2 * of_one - of_two, of_two - of_one)


def _of_tensors(name: str, own: int, others: int, tensors: int) -> tuple[float, int]:
    size = SIZE // tensors
    names = tuple(map(str, range(tensors)))
    spans = tuple((number * size, (number + 1) * size) for number in range(tensors))
    layout = BucketLayout(names, spans, ((SIDE // tensors, SIDE),) * tensors)
    compressor, wire = make_compressor(name, [layout]), _Wire(own, others)
    first, second = ([(node, _vector()) for node in range(own)] for _ in range(2))
    compressor.reduce(0, first, wire)  # makes the memory
    return _counted(lambda: compressor.reduce(0, second, wire))


def _vector() -> Tensor:
    return torch.arange(SIZE, dtype=torch.float32).sin()


class _Wire:
    """The wire of a worker whose `others`, nodes of other workers, send what its first node does.

    Workers share out rows, so each decodes as many as it has nodes of.
    """

    def __init__(self, own: int, others: int) -> None:
        self.num_nodes, self._others = own + others, others

    def sum_nodes(self, vectors: list[Tensor]) -> Tensor:
        total = vectors[0].clone()
        for vector in vectors[1:]:
            total += vector
        return total

    def sum_rows(self, vectors: list[Tensor], codec: RowCodec) -> Tensor:
        total = self.sum_nodes([codec.decode(codec.encode(vector)) for vector in vectors])
        return codec.decode(codec.encode(total))

    def gather(self, payloads: list[Tensor], equal_lengths: bool = False) -> list[Tensor]:
        return payloads + payloads[:1] * self._others


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view:
            return made
        reads = args[1:] if func.overloadpacket.__name__ in ONLY_WRITE else args
        given = {word: value for word, value in (kwargs or {}).items() if word != "out"}
        tensors = [x for x in tree_leaves((reads, given, made)) if isinstance(x, Tensor)]
        self.moved += sum(tensor.nbytes for tensor in tensors)
        self.kernels += 1
        return made


def _counted(work: Callable[[], object]) -> tuple[float, int]:
    """Return the bytes that work's kernels read and write, over a vector's, and their number."""
    with without_compiler(), _Counter() as counter:
        work()
    return counter.moved / (SIZE * BYTES_PER_ELEMENT), counter.kernels
