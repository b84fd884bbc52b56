"""Two thin matrices: against the singular value decomposition, and for matrices that lack rank."""

import math

import pytest
import torch

from firecaffe.gradients.compressors.power_sgd import (
    first_query,
    matrix_columns,
    orthonormal,
    revive,
)

RANK = 4


@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ((), None),
        ((1,), None),
        ((1000,), None),
        ((0, 7), None),
        ((1, 1000), None),
        ((8, 8), None),  # 4 · (8 + 8) is 8 · 8
        ((8, 9), 9),
        ((9, 8), 8),
        ((64, 3, 3, 3), 27),
        ((5, 30), 30),
    ],
)
def test_a_weight_is_a_matrix_where_that_is_shorter(
    shape: tuple[int, ...], columns: int | None
) -> None:
    assert matrix_columns(shape, RANK) == columns
    if columns is not None:
        assert RANK * (shape[0] + columns) < math.prod(shape)


def test_the_first_query_depends_on_the_name_alone() -> None:
    torch.manual_seed(0)
    first = first_query("fc.weight", RANK, 500)
    torch.manual_seed(1)
    assert torch.equal(first_query("fc.weight", RANK, 500), first)
    assert not torch.equal(first_query("conv.weight", RANK, 500), first)
    assert abs(first.mean()) < 0.1
    assert abs(first.std() - 1) < 0.1


@pytest.mark.parametrize("kind", ["full", "one column zero", "equal columns", "zero", "tiny"])
def test_a_basis_is_orthonormal_and_holds_every_column(kind: str) -> None:
    product = torch.randn(30, RANK, generator=torch.Generator().manual_seed(0))
    if kind == "one column zero":
        product[:, 1] = 0
    elif kind == "equal columns":
        product[:] = product[:, :1].clone()
    elif kind == "zero":
        product[:] = 0
    elif kind == "tiny":
        product *= 1e-30
    basis = orthonormal(product)
    assert torch.allclose(basis.T @ basis, torch.eye(RANK), atol=1e-6)
    error = (basis @ (basis.T @ product) - product).norm()
    assert error <= 1e-6 * product.norm()


def test_rows_that_lead_nowhere_begin_again() -> None:
    query = torch.randn(RANK, 50, generator=torch.Generator().manual_seed(0))
    before = query.clone()
    query[1] = 0
    query[2, 7] = math.nan
    query[3, 7] = math.inf
    revived = revive(query, "w")
    assert torch.equal(revived[0], before[0])
    assert torch.equal(revived[1:], first_query("w", RANK, 50)[1:])


def test_iterating_comes_to_the_best_approximation_there_is() -> None:
    # Eckart and Young 1936: no rank-4 matrix is nearer than the first 4 singular values'.
    matrix = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    singular_values = torch.linalg.svdvals(matrix)
    best = singular_values[RANK:].norm().item()
    query = first_query("w", RANK, 60)
    errors = []
    for _ in range(100):
        basis = orthonormal(matrix @ query.T)
        query = basis.T @ matrix
        errors.append((matrix - basis @ query).norm().item())
    assert errors[0] > 1.05 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)
