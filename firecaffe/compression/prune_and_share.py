"""Pruning: masks of weights. Sharing: few values for many weights, by k-means in one dimension.

Sources: Han et al. 2015, arXiv 1506.02626 (small magnitudes); Zhu and Gupta 2017, arXiv 1710.01878
(the schedule); Guo, Yao and Chen 2016, arXiv 1608.04493 (weights that return).

Source: Han, Mao and Dally 2016, arXiv 1510.00149, section 3.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# Source: the code of Guo et al.
HOLD, RETURN = 0.9, 1.1
"""Kept weights stay down to HOLD times the threshold; pruned ones return above RETURN times it."""


def kept_share(keep: float, done: int, steps: int) -> float:
    """Return the share kept after `done` steps of gradual pruning (Zhu and Gupta, equation 1)."""
    left = max(0.0, 1 - done / steps)
    return float(keep + (1 - keep) * left**3)


def count_of(share: float, num_weights: int) -> int:
    return max(1, round(share * num_weights))


def largest(scores: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Return masks of each tensor's largest scores: of equal ones the first, and no zeros."""
    return {name: _largest(score, counts[name]) for name, score in scores.items()}


def largest_of_all(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    together = torch.cat([score.reshape(-1) for score in scores.values()])
    masks = torch.split(_largest(together, count), [score.numel() for score in scores.values()])
    pairs = zip(scores.items(), masks, strict=True)
    return {name: mask.view(score.shape) for (name, score), mask in pairs}


def adaptive(scores: Tensor) -> Tensor:
    """Return each weight's square over the sum of all squares as large or larger, in float64.

    Source: Lee, Park, Mo, Ahn and Shin 2021, arXiv 2010.07611 (LAMP), equation 4.
    """
    squares = scores.detach().cpu().double().reshape(-1).square()
    ascending, places = squares.sort(stable=True)
    sums = ascending.flip(0).cumsum(0).flip(0)
    shares = torch.zeros_like(squares)
    shares[places] = ascending / sums.clamp(min=torch.finfo(torch.float64).tiny)
    return shares.view(scores.shape)


def _largest(scores: Tensor, count: int) -> Tensor:
    flat = scores.reshape(-1)
    least = flat.topk(min(count, flat.numel()), sorted=False).values.min()
    kept = flat > least
    # It is not defined which of equal elements topk returns.
    equal = (flat == least).nonzero()[:, 0][: count - int(kept.sum())]
    kept[equal] = True
    return (kept & (flat > 0)).view(scores.shape)


def with_hold(scores: Tensor, mask: Tensor) -> Tensor:
    """Raise kept weights' scores by RETURN / HOLD, so that nearly equal ones do not alternate."""
    return torch.where(mask, scores * (RETURN / HOLD), scores)


def threshold_of(weights: Tensor, deviations: float) -> float:
    return float(deviations * weights[weights != 0].double().std(correction=0))


def above(weights: Tensor, threshold: float) -> Tensor:
    return weights.abs() > threshold


def above_with_hold(weights: Tensor, threshold: float, mask: Tensor) -> Tensor:
    """Return the mask above a threshold if weights may return (Guo et al., equation 3)."""
    size = weights.abs()
    return (size > RETURN * threshold) | (mask & (size > HOLD * threshold))


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
