"""The arithmetic of power_sgd, with thin matrices: basis (rows, r) and query (r, columns)."""

import hashlib
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


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
