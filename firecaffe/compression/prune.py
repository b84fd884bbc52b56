"""Which weights stay: masks, True where a weight is kept.

Sources: Han et al. 2015, arXiv 1506.02626 (small magnitudes); Zhu and Gupta 2017, arXiv 1710.01878
(the schedule); Guo, Yao and Chen 2016, arXiv 1608.04493 (weights that come back).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

HOLD, RETURN = 0.9, 1.1
"""Where weights may come back, one that is kept stays down to the threshold times HOLD, and one
that is pruned comes back above the threshold times RETURN. Source: the code of Guo et al.
"""


def kept_share(keep: float, done: int, steps: int) -> float:
    """The share of weights that a gradual pruning keeps after `done` of its steps: from 1 to
    `keep`, fast at first. Source: Zhu and Gupta 2017, equation 1.
    """
    left = max(0.0, 1 - done / steps)
    return float(keep + (1 - keep) * left**3)


def count_of(share: float, num_weights: int) -> int:
    """How many weights that share is; at least one."""
    return max(1, round(share * num_weights))


def largest(scores: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Tensor]:
    """The masks of each tensor's largest scores, so many. Of equal ones the first are kept, and
    zeros never are.
    """
    return {name: _largest(each, counts[name]) for name, each in scores.items()}


def largest_of_all(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """The masks of the largest scores among all tensors, so many together."""
    together = torch.cat([each.reshape(-1) for each in scores.values()])
    masks = torch.split(_largest(together, count), [each.numel() for each in scores.values()])
    found = zip(scores.items(), masks, strict=True)
    return {name: mask.view(each.shape) for (name, each), mask in found}


def adaptive(scores: Tensor) -> Tensor:
    """A layer's scores relative to it: of each weight its square over the sum of all squares there
    that are as large or larger, float64 on the CPU. The largest has 1.

    Source: Lee, Park, Mo, Ahn and Shin 2021, arXiv 2010.07611 (LAMP), equation 4.
    """
    squares = scores.detach().cpu().double().reshape(-1).square()
    ascending, places = squares.sort(stable=True)
    sums = ascending.flip(0).cumsum(0).flip(0)
    found = torch.zeros_like(squares)
    found[places] = ascending / sums.clamp(min=torch.finfo(torch.float64).tiny)
    return found.view(scores.shape)


def _largest(scores: Tensor, count: int) -> Tensor:
    flat = scores.reshape(-1)
    least = flat.topk(min(count, flat.numel()), sorted=False).values.min()
    kept = flat > least
    # topk does not say which of equal ones it takes.
    equal = (flat == least).nonzero()[:, 0][: count - int(kept.sum())]
    kept[equal] = True
    return (kept & (flat > 0)).view(scores.shape)


def with_hold(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores by which a weight that was pruned takes a kept one's place only if it is larger by
    RETURN / HOLD, so that weights of nearly equal size do not change places at each look.
    """
    return torch.where(mask, scores * (RETURN / HOLD), scores)


def threshold_of(weights: Tensor, deviations: float) -> float:
    """So many standard deviations of the weights that are not zero."""
    return float(deviations * weights[weights != 0].double().std(correction=0))


def above(weights: Tensor, threshold: float) -> Tensor:
    """The mask of the weights whose magnitude is above a threshold."""
    return weights.abs() > threshold


def above_with_hold(weights: Tensor, threshold: float, mask: Tensor) -> Tensor:
    """The same where weights may come back. Source: Guo et al. 2016, equation 3."""
    size = weights.abs()
    return (size > RETURN * threshold) | (mask & (size > HOLD * threshold))
