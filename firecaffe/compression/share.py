"""Few values for many weights, by k-means in one dimension. Zero is a separate value.

Source: Han, Mao and Dally 2016, arXiv 1510.00149, section 3.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MOST_ROUNDS = 10_000
"""The most rounds of k-means, which mostly ends after some hundreds without a change."""


def _linear(ordered: Tensor, count: int, _: torch.Generator) -> Tensor:
    low, high = float(ordered[0]), float(ordered[-1])
    return torch.linspace(low, high, count, dtype=ordered.dtype)


def _density(ordered: Tensor, count: int, _: torch.Generator) -> Tensor:
    places = (torch.arange(count, dtype=ordered.dtype) + 0.5) / count * len(ordered)
    return ordered[places.long()]


def _random(ordered: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return ordered[torch.randperm(len(ordered), generator=generator)[:count]].sort().values


STARTS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "linear": _linear,
    "density": _density,
    "random": _random,
}


def share(
    weights: Tensor, bits: int, start: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Find 2^bits values, or fewer if some would have no weight, for the weights that are not zero.

    Return the weights' codes, int32 of their shape, and the values by code, float64 on the CPU.
    Code 0 is zero; all others have weights, and ascend. `generator` is for the random start.
    """
    flat = weights.detach().cpu().double().reshape(-1)
    ordered = flat[flat != 0].sort().values
    distinct = torch.unique_consecutive(ordered)
    if len(distinct) <= 2**bits:
        values = distinct
    else:
        values = lloyd(ordered, STARTS[start](ordered, 2**bits, generator))
    nearest = torch.bucketize(flat, (values[1:] + values[:-1]) / 2)
    used, codes = torch.unique(nearest[flat != 0], return_inverse=True)
    all_codes = torch.zeros(len(flat), dtype=torch.int32)
    all_codes[flat != 0] = codes.int() + 1
    return all_codes.view(weights.shape), torch.cat([torch.zeros(1).double(), values[used]])


def lloyd(ordered: Tensor, values: Tensor) -> Tensor:
    """Move values to the means of their nearest numbers, both ascending. Source: Lloyd 1982."""
    # In one dimension clusters are intervals, whose sums are differences of running sums.
    sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    ends = torch.tensor([0, len(ordered)])
    before = ends
    for _ in range(MOST_ROUNDS):
        middles = (values[1:] + values[:-1]) / 2
        edges = torch.cat([ends[:1], torch.searchsorted(ordered, middles, right=True), ends[1:]])
        if torch.equal(edges, before):
            break
        before, counts = edges, edges.diff()
        # A value without numbers does not move.
        values = torch.where(counts > 0, sums[edges].diff() / counts.clamp(min=1), values)
    return values
