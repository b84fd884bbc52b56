"""Masks of weights, True for a weight that is kept.

Sources: Han et al. 2015, arXiv 1506.02626 (small magnitudes); Zhu and Gupta 2017, arXiv 1710.01878
(the schedule); Guo, Yao and Chen 2016, arXiv 1608.04493 (weights that return).
"""

from collections.abc import Mapping

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
