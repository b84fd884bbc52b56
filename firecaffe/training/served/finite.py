"""Which gradients of a worker are finite, where these go elsewhere than to rank 0."""

from collections.abc import Iterable

import torch
from torch import Tensor


def are_finite(names: Iterable[str], runs: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Whether that of each parameter is, bool, shape (parameters,); one that was not used is. runs:
    of gradients, by their parameters.
    """
    broken = {name for name, values in runs if not _is_finite(values)}
    return torch.tensor([name not in broken for name in names], dtype=torch.bool)


def _is_finite(values: Tensor) -> bool:
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(low.isfinite() & high.isfinite())
