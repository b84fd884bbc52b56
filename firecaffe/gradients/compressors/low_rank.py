"""A matrix as the product of two thin ones: the arithmetic of power_sgd.

Thin matrices of rank r are kept as (rows, r), the basis, and (r, columns), the query.
"""

import hashlib
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def matrix_columns(shape: Sequence[int], rank: int) -> int | None:
    """The columns of a weight as a matrix of shape[0] rows; None if two factors are not smaller."""
    rows, columns = shape[0] if shape else 1, prod(shape[1:])
    return columns if rank * (rows + columns) < rows * columns else None


def first_query(name: str, rank: int, columns: int) -> Tensor:
    """The first query: normal random numbers (rank, columns) from the parameter's name."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    return torch.randn(rank, columns, generator=torch.Generator().manual_seed(seed))


def revive(query: Tensor, name: str) -> Tensor:
    """The query with rows that lead nowhere, zero or not finite, replaced by those of the first."""
    is_alive = (query.isfinite().all(dim=1) & query.any(dim=1)).view(-1, 1)
    return torch.where(is_alive, query, first_query(name, *query.shape).to(query.device))


def orthonormal(product: Tensor) -> Tensor:
    """Orthonormal columns (rows, rank) whose span holds all columns of product (rows, rank)."""
    basis: Tensor = torch.linalg.qr(product).Q
    return basis
