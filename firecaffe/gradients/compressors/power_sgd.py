"""The codec power_sgd: the sum of all nodes' gradients of a weight as a product of thin matrices.

A gradient, viewed as a matrix M of a rows (its first dimension) and b columns, is sent as P Q with
P (a, r), Q (r, b), r = 16. One step of power iteration computes them for the sum over nodes:

    P = sum over nodes of M_node Qᵀ      Q: the last step's, which continues the iteration
    P = an orthonormal basis of P's columns
    Q = sum over nodes of Pᵀ M_node
    total = P Q,   memory of a node = M_node - total / number of nodes

Vectors, and matrices that would not shrink, are sent unencoded. Both sums are in tree order, and
all ranks compute the rest from the same bits. A row of Q that is zero (the gradient was, or has a
rank below r) or not finite would stay so for ever, so it begins again with random numbers.

Differs from the source: the basis is by Householder's QR, not Gram-Schmidt, because it stays
orthonormal if P has zero or dependent columns.

Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS, algorithms 1 and 2.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from firecaffe.errors import CheckpointError
from firecaffe.gradients.compressors.codec import BucketLayout, CodecWire, tensors_of
from firecaffe.gradients.compressors.feedback import NodeMemory, keep_residual


def matrix_columns(shape: Sequence[int], rank: int) -> int | None:
    """Return the columns of a weight as a matrix of shape[0] rows; None if it would not shrink."""
    rows, columns = shape[0] if shape else 1, prod(shape[1:])
    return columns if rank * (rows + columns) < rows * columns else None


def first_query(name: str, rank: int, columns: int) -> Tensor:
    """Draw normal random numbers (rank, columns) that depend on the parameter's name only."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    return torch.randn(rank, columns, generator=torch.Generator().manual_seed(seed))


def revive(query: Tensor, name: str) -> Tensor:
    """Replace rows of the query that are zero or not finite by those of the first query."""
    is_alive = (query.isfinite().all(dim=1) & query.any(dim=1)).view(-1, 1)
    return torch.where(is_alive, query, first_query(name, *query.shape).to(query.device))


def orthonormal(product: Tensor) -> Tensor:
    """Return orthonormal columns, (rows, rank), whose span holds all columns of `product`."""
    basis: Tensor = torch.linalg.qr(product).Q
    return basis


QUERY = "q."


@dataclass(frozen=True)
class _Matrix:
    name: str
    start: int
    rows: int
    columns: int

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.start : self.start + self.rows * self.columns].view(self.rows, -1)


class PowerSGD:
    def __init__(self, rank: int, layouts: Sequence[BucketLayout]) -> None:
        self._rank = rank
        self._layouts = layouts
        self._columns = {
            name: columns
            for name, shape in tensors_of(layouts).items()
            if (columns := matrix_columns(shape, rank)) is not None
        }
        self._memory = NodeMemory(layouts, self._columns)
        self._queries: dict[str, Tensor] = {}

    def reduce(self, bucket: int, nodes: list[tuple[int, Tensor]], wire: CodecWire) -> Tensor:
        matrices, exact = self._parts(self._layouts[bucket])
        memories = self._memory.vectors(bucket, nodes)
        xs = [x.add_(memory) for (_, x), memory in zip(nodes, memories, strict=True)]
        total = torch.zeros_like(xs[0])
        products = self._sum_products(xs, matrices, exact, total, wire)
        if not matrices:
            return total
        bases = [orthonormal(product) for product in products]
        sums = wire.sum_nodes(
            [_flatten([p.T @ m.of(x) for m, p in zip(matrices, bases, strict=True)]) for x in xs]
        )
        factors = sums.split_with_sizes([self._rank * m.columns for m in matrices])
        for m, basis, factor in zip(matrices, bases, factors, strict=True):
            # A copy, because the bits of a product must not depend on its factor's place in `sums`.
            query = factor.view(self._rank, -1).clone()
            torch.mm(basis, query, out=m.of(total))
            self._queries[m.name] = revive(query, m.name)
            share = m.of(total) / wire.num_nodes
            for x, memory in zip(xs, memories, strict=True):
                keep_residual(m.of(memory), m.of(x), share)
        return total

    def _sum_products(
        self,
        xs: list[Tensor],
        matrices: list[_Matrix],
        exact: list[tuple[int, int]],
        total: Tensor,
        wire: CodecWire,
    ) -> list[Tensor]:
        """Sum P of each matrix, (rows, rank), and along with it unencoded tensors, into `total`."""
        queries = [self._query(m, total.device) for m in matrices]
        sums = wire.sum_nodes(
            [
                _flatten(
                    [x[start:stop] for start, stop in exact]
                    + [m.of(x) @ q.T for m, q in zip(matrices, queries, strict=True)]
                )
                for x in xs
            ]
        )
        end = 0
        for start, stop in exact:
            begin, end = end, end + stop - start
            total[start:stop] = sums[begin:end]
        parts = sums[end:].split_with_sizes([m.rows * self._rank for m in matrices])
        return [part.view(-1, self._rank) for part in parts]

    def _parts(self, layout: BucketLayout) -> tuple[list[_Matrix], list[tuple[int, int]]]:
        matrices, exact = [], []
        for name, (start, stop) in zip(layout.names, layout.spans, strict=True):
            columns = self._columns.get(name)
            if columns is None:
                exact.append((start, stop))
            else:
                matrices.append(_Matrix(name, start, (stop - start) // columns, columns))
        return matrices, exact

    def _query(self, matrix: _Matrix, device: torch.device) -> Tensor:
        query = self._queries.get(matrix.name)
        if query is None:
            query = first_query(matrix.name, self._rank, matrix.columns)
        return query.to(device)

    def state(self) -> dict[str, Tensor]:
        queries = {QUERY + name: query for name, query in self._queries.items()}
        return {**queries, **self._memory.state()}

    def load_state(self, state: Mapping[str, Tensor], nodes: Collection[int]) -> None:
        queries: dict[str, Tensor] = {}
        for key in state:
            if not key.startswith(QUERY):
                continue
            name, value = key.removeprefix(QUERY), state[key]
            needed = (self._rank, self._columns.get(name))
            if value.shape != needed:
                raise CheckpointError(
                    f"the checkpoint's compressor state {key!r} has shape {tuple(value.shape)}; "
                    f"this model needs {needed if name in self._columns else 'none'}"
                )
            queries[name] = value.clone()
        memories = [key for key in state if not key.startswith(QUERY)]
        self._memory.load_state(state, nodes, memories)
        # A device may still read the loaded tensors after they are replaced.
        self._queries, self._loaded = queries, dict(queries)


def _flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
